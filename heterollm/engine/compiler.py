"""Turns a plan into the steps of each phase and length.

Everything a pass needs is decided and bound here: kernels with their arguments set, NPU graphs with their
memory bound, waits where a processor hands over to the other. Running a pass is calling its steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from heterollm.base import Progress
from heterollm.engine.builder import PassBuilder, PlacedOperator, codes_of, merge_steps, segments_of
from heterollm.engine.glue import GlueEmitter
from heterollm.engine.passes import CompiledPass
from heterollm.engine.slot_check import SlotCheck
from heterollm.engine.slots import INPUT_SLOTS, pool_sizes
from heterollm.engine.splits import SplitEmitter
from heterollm.engine.step import Buffer, LinearWork, Step, shard_name
from heterollm.engine.tensors import SmallTensors
from heterollm.engine.waits import HandOvers
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import STEP_WORDS, GpuLinear, RoundedInputs, Segments, SharedArray
from heterollm.kernels.ops import Group, OpSpec, Phase
from heterollm.kernels.sync import Pool
from heterollm.model import ModelWeights
from heterollm.solver import Placement, Plan

__all__ = ["Compiler"]


class Compiler:
    """Compiles passes of one model, plan and device.

    Args:
        device: The opened device.
        weights: The model's weights; packed for the GPU here.
        plan: Who computes what.
        context: Positions of a session.
        progress: Called with a stage's name, steps done and steps in all.
        hand_overs: How the parts wait for each other.
    """

    def __init__(
        self,
        device: Device,
        weights: ModelWeights,
        plan: Plan,
        context: int,
        progress: Progress,
        hand_overs: HandOvers,
    ) -> None:
        self._device = device
        self._weights = weights
        self._config = weights.config
        self._plan = plan
        self._context = context
        self._runtime = device.gpu
        self._hand_overs = hand_overs
        self._check = SlotCheck.from_environment(device.gpu)
        self._splits = SplitEmitter(device, weights)
        sizes = pool_sizes(self._config, weights.specs, plan, device.activation_dtype.itemsize)
        self.pool = Pool(device.gpu, sizes)
        self.tokens = device.gpu.shared((plan.chunk_length,), np.int32)
        self.step = device.gpu.shared((STEP_WORDS,), np.int32)
        self._specs = {(spec.layer, spec.group): spec for spec in weights.specs}
        self._linears: dict[tuple[int, Group], GpuLinear] = {}
        for done, spec in enumerate(weights.specs):
            progress("Packing weights for the GPU", done, len(weights.specs))
            members = weights.linear(spec.layer, spec.group)
            self._linears[spec.layer, spec.group] = GpuLinear.pack(
                device.gpu,
                members,
                activation_dtype=device.activation_dtype,
                integer_inputs=spec.integer_inputs,
            )
        progress("Packing weights for the GPU", len(weights.specs), len(weights.specs))
        if weights.embedding is weights.head:
            self._embedding = self._linears[-1, "head"]
        else:
            self._embedding = GpuLinear.pack(
                device.gpu, [weights.embedding], activation_dtype=device.activation_dtype
            )
        small = SmallTensors(device.gpu, weights, context)
        self._glue = GlueEmitter(device, weights.config, self.pool, small, self.tokens, self.step, context)
        named = {name: self.pool[name] for name in self.pool} | {"tokens": self.tokens, "step": self.step}
        self._names = {memory: Buffer(name) for name, memory in named.items()}

    def close(self) -> None:
        """Drop the packed weights; nothing compiled may run afterwards."""
        self._linears.clear()
        self._splits.clear()
        del self._embedding, self._glue

    def leave_npu(self) -> None:
        """Compile for the GPU alone from now on; what was compiled before must not run any more."""
        self._plan = self._plan.without_npu()
        self._splits.clear()

    # -- passes --------------------------------------------------------------------------------------

    def compile_pass(
        self, phase: Phase, tokens: int, bucket: int, cache: SharedArray, *, builds_graphs: bool = True
    ) -> CompiledPass:
        """Return the steps that take ``tokens`` tokens through all layers, head excepted.

        Args:
            phase: Which placements of the plan to use.
            tokens: Length of the pass.
            bucket: Positions that the grids of a decode pass must cover.
            cache: A session's KV cache to bind at first.
            builds_graphs: Whether the NPU's graphs are built; without them the pass can be read, and not run.
        """
        glue, steps = self._glue, self._begin(phase, tokens, cache, builds_graphs=builds_graphs)
        glue.embedding(steps, self._embedding)
        delta: Segments | None = None
        for layer in range(self._config.layers):
            here = self._placed(steps, layer, "qkv")
            glue.norm(steps, layer, "attention", delta, here.rounded)
            qkv = self._linear(steps, here)
            glue.rope(steps, layer, qkv, cache)
            here = self._placed(steps, layer, "o")
            glue.attention(steps, layer, bucket, cache, here.rounded)
            delta = self._linear(steps, here)
            delta = self._feed_forward(steps, layer, delta)
        return CompiledPass.of(self._finished(steps, f"{phase} of {tokens}"), delta, cache)

    def compile_head(
        self, phase: Phase, rows: int, output: Segments, *, builds_graphs: bool = True
    ) -> CompiledPass:
        """Return the steps from the last layer's output to the logits of ``rows`` positions."""
        glue, steps = self._glue, self._begin(phase, rows, builds_graphs=builds_graphs)
        here = self._placed(steps, -1, "head")
        glue.final_norm(steps, output, here)
        if here.placement.npu_lengths:
            glue.join(steps, self._linear(steps, here))
        else:
            self._head_of_gpu(steps, here)
        glue.soft_cap(steps)
        self._splits.end(steps, waits=self._plan.uses_npu)
        written = (*segments_of(output), self.pool["residual"])
        return CompiledPass.of(self._finished(steps, f"head of {rows}", written))

    def _begin(
        self, phase: Phase, tokens: int, cache: SharedArray | None = None, *, builds_graphs: bool
    ) -> PassBuilder:
        own = [self._specs[-1, "head"]] if cache is None else self._weights.specs[:-1]
        placed = self._plan.operators(phase, tokens, own, rows=tokens)
        return PassBuilder(
            phase,
            tokens,
            {(spec.layer, spec.group): (spec, placement) for spec, placement in placed},
            self._hand_overs.of_pass(phase, tokens),
            self._names if cache is None else self._names | {cache: Buffer("kv_cache")},
            self._runtime,
            after_every_operator=self._hand_overs.after_every_operator,
            builds_graphs=builds_graphs,
        )

    def _finished(
        self, steps: PassBuilder, where: str, written: Sequence[SharedArray] = ()
    ) -> tuple[Step, ...]:
        """Return the steps of a whole pass: checked where the environment asks for it, and merged."""
        found = steps.steps
        if self._check is not None:
            found = self._check.checked(found, steps.names, where, written, merged=steps.merges)
        return tuple(merge_steps(self._runtime, found) if steps.merges else found)

    # -- linears -------------------------------------------------------------------------------------

    def _placed(self, steps: PassBuilder, layer: int, group: Group) -> PlacedOperator:
        return self._operator(*steps.placements[layer, group])

    def _operator(self, spec: OpSpec, placement: Placement) -> PlacedOperator:
        npu_output, gpu_output = "npu_output", "gpu_output"
        if spec.group == "head":
            # The GPU alone writes the logits at once.
            split = bool(placement.npu_lengths)
            npu_output, gpu_output = ("head_npu_output", "head_gpu_output") if split else ("logits", "logits")
        return PlacedOperator(
            spec,
            placement,
            source=self.pool[INPUT_SLOTS[spec.group]],
            npu_output=self.pool[npu_output],
            gpu_output=self.pool[gpu_output],
            rounded=self._rounded(spec, placement),
        )

    def _rounded(self, spec: OpSpec, placement: Placement) -> RoundedInputs | None:
        """Return where the kernel that writes a group's input leaves the int8 codes; None if it leaves none.

        It does where the GPU computes rows of all tokens. Under a sequence cut the GPU rounds its own few
        while the NPU, which rounds for itself, is at work.
        """
        if not spec.integer_inputs or placement.npu_rows == spec.member_rows:
            return None
        slot = INPUT_SLOTS[spec.group]
        codes, blocks = self.pool[f"{slot}_codes"], self.pool[f"{slot}_blocks"]
        return RoundedInputs(codes, blocks, spec.weight.bits, spec.weight.block)

    def _linear(self, steps: PassBuilder, here: PlacedOperator) -> Segments:
        return self._splits.linear(steps, here, self._linears[here.spec.layer, here.spec.group])

    def _head_of_gpu(self, steps: PassBuilder, here: PlacedOperator) -> None:
        """Append the head as one kernel that writes the logits in float32."""
        launch = self._linears[-1, "head"].launch(
            here.source,
            here.gpu_output,
            tokens=steps.tokens,
            output_dtype=np.float32,
            rounded=here.rounded,
            label=here.name,
        )
        work = LinearWork.of_rows(here.spec, steps.tokens, here.spec.rows)
        steps.steps += steps.shard(here, launch, here.name, here.source, here.gpu_output, work, here.rounded)
        steps.end_operator(here.operator, here.layer)

    # -- the feed-forward network --------------------------------------------------------------------

    def _feed_forward(self, steps: PassBuilder, layer: int, delta: Segments) -> Segments:
        """Append a layer's feed-forward network, its norm included, and return where its output lies."""
        if (layer, "ffn") in steps.placements:
            return self._feed_forward_block(steps, self._placed(steps, layer, "ffn"), delta)
        here = self._placed(steps, layer, "gate_up")
        self._glue.norm(steps, layer, "feed_forward", delta, here.rounded)
        gate_up = self._linear(steps, here)
        here = self._placed(steps, layer, "down")
        self._glue.activation(steps, layer, gate_up, here.rounded)
        return self._linear(steps, here)

    def _feed_forward_block(self, steps: PassBuilder, here: PlacedOperator, delta: Segments) -> Segments:
        """As :meth:`_feed_forward`, cut as a whole along the intermediate width: both shards make a sum.

        The GPU's three kernels follow one another in its queue while the NPU runs one graph.
        """
        block = here.spec
        self._glue.norm(steps, block.layer, "feed_forward", delta, here.rounded)
        (width, *_), (whole, *_) = here.placement.npu_rows, block.member_rows
        gpu = [] if width == whole else self._gpu_block(steps, here, width, whole)
        return self._splits.block(steps, here, gpu)

    def _gpu_block(self, steps: PassBuilder, here: PlacedOperator, width: int, whole: int) -> list[Step]:
        """Return the GPU's share of a block: the intermediate width from ``width`` to ``whole``."""
        block, then, out, activated = here.spec, here.spec.then, here.gpu_output, self.pool["activated"]
        assert then is not None
        tokens, kept = steps.tokens, ((width, whole),) * 2
        gate_up = self._linears[block.layer, "gate_up"].launch(
            here.source, out, kept=kept, rounded=here.rounded, tokens=tokens, label=here.name
        )
        rounded = self._rounded(then, here.placement)
        halves = Segments(out, out, (whole - width,) * 2, (0, 0))
        activation = self._glue.activation_launch(tokens, block.layer, halves, rounded, start=width)
        # The rows of gate and up have been read by then: the same slot takes the sum.
        down = self._linears[block.layer, "down"].launch(
            activated, out, columns=(width, whole), rounded=rounded, tokens=tokens, label=here.name
        )
        work = LinearWork.of_rows(block, tokens, 2 * (whole - width))
        label = shard_name(here.name, block, kept)
        found = steps.shard(here, gate_up, label, here.source, out, work, here.rounded)
        found.append(
            steps.prepared("activation", block.layer, activation, (out,), (activated, *codes_of(rounded)))
        )
        work = LinearWork.of_columns(then, tokens, whole - width)
        label = f"{here.name} down[:, {width}:{whole}]"
        return found + steps.shard(here, down, label, activated, out, work, rounded)
