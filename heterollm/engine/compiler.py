"""Compiles a plan to the steps of each phase and length.

A compiled pass is ready to run: arguments of kernels are set, memory of NPU graphs is bound, and fences are
prepared. Running the pass means calling its steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from heterollm.base import Progress
from heterollm.engine.builder import PassBuilder
from heterollm.engine.expert_residency import ExpertBudget, ExpertResidency
from heterollm.engine.expert_shares import ExpertCounts
from heterollm.engine.experts import ExpertEmitter, ExpertRows
from heterollm.engine.flights import Chunk, interleaved
from heterollm.engine.glue import GlueEmitter
from heterollm.engine.lanes import Lane
from heterollm.engine.merging import merge_steps
from heterollm.engine.passes import CompiledPass
from heterollm.engine.placed import PlacedOp, codes_of, segments_of
from heterollm.engine.slot_check import SlotCheck
from heterollm.engine.slots import INPUT_SLOTS, is_private, lane_slot, pool_sizes
from heterollm.engine.sparse_attention import NO_SCALES, ScoreScales, SparseAttentionEmitter
from heterollm.engine.splits import NO_RANGES, SplitEmitter
from heterollm.engine.step import Buffer, LinearWork, Step, shard_name
from heterollm.engine.tensors import GlueTensors
from heterollm.engine.waits import Fences
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import STEP_WORDS, DeviceMemory, GpuLinear, KvMemory, RoundedInputs, Segments
from heterollm.kernels.npu import StaticRanges
from heterollm.kernels.ops import Group, OpSpec, Phase
from heterollm.kernels.sync import Pool
from heterollm.model import ModelWeights
from heterollm.solver import EXPERTS_ON_GPU, Placement, Plan, SparseAttention

FIRST_OF_FFN: Final[tuple[Group, ...]] = ("ffn", "gate_up")
"""The operator that begins a feed-forward network, as a whole or as two."""


class Compiler:
    """Compiles passes of one model, plan and device; packs the weights for the GPU first."""

    def __init__(
        self,
        device: Device,
        weights: ModelWeights,
        plan: Plan,
        context: int,
        progress: Progress,
        fences: Fences,
        ranges: Mapping[tuple[int, Group], StaticRanges] = NO_RANGES,
        score_scales: ScoreScales = NO_SCALES,
        expert_rows: ExpertRows | None = None,
        experts: ExpertBudget | None = None,
    ) -> None:
        self._device = device
        self._weights = weights
        self._config = weights.config
        self._plan = plan
        self._flight_plan = plan.of_flights
        self._context = context
        self._runtime = device.gpu
        self._fences = fences
        self._check = SlotCheck.from_environment(device.gpu)
        sizes = pool_sizes(self._config, weights.specs, plan, device.activation_dtype.itemsize, context)
        self.pool = Pool(device.gpu, {slot: size for slot, size in sizes.items() if not is_private(slot)})
        self.private = {
            slot: DeviceMemory(device.gpu.scratch(size), size)
            for slot, size in sizes.items()
            if is_private(slot)
        }
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
        self._experts = ExpertEmitter(device, weights, progress, expert_rows, experts, plan.chunk_length)
        tensors = GlueTensors(device.gpu, weights, context)
        self._splits = SplitEmitter(device, weights, plan, ranges)
        self._splits.load_shadows(plan)
        self._sparse = SparseAttentionEmitter(device, weights.config, plan, context, score_scales)
        self.lanes = tuple(self._new_lane(number) for number in range(plan.lanes))
        self._glues = tuple(
            GlueEmitter(device, weights.config, lane, tensors, context) for lane in self.lanes
        )

    def _new_lane(self, number: int) -> Lane:
        gpu = self._runtime
        slots = {slot.partition(".")[0]: None for slot in (*self.pool, *self.private)}
        own = {slot: lane_slot(slot, number) for slot in slots}
        shared = {slot: self.pool[name] for slot, name in own.items() if not is_private(slot)}
        private = {slot: self.private[name] for slot, name in own.items() if is_private(slot)}
        tokens = gpu.shared((self._plan.chunk_length,), np.int32)
        step = gpu.shared((STEP_WORDS,), np.int32)
        memories: dict[str, DeviceMemory] = {own[slot]: memory for slot, memory in (shared | private).items()}
        memories |= {lane_slot("tokens", number): tokens, lane_slot("step", number): step}
        memories["code_counts"] = self._splits.saturation.memory
        memories["expert_counts"] = self.expert_counts.memory
        names = {memory: Buffer(name) for name, memory in memories.items()}
        return Lane(number, shared, private, tokens, step, names)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on the integer graphs, and the experts on the NPU, of the passes so far."""
        return (*self._splits.notes, *self.expert_counts.notes())

    @property
    def expert_counts(self) -> ExpertCounts:
        """The counts of pairs of a token and an expert, of passes with experts on the NPU."""
        return self._experts.shares.counts

    @property
    def residency(self) -> ExpertResidency | None:
        """The experts in memory under a budget; None without one."""
        return self._experts.residency

    def reset_counts(self) -> None:
        """Count saturated values, pairs and reads of experts from 0 again."""
        self._splits.saturation.reset()
        self.expert_counts.reset()
        if self.residency is not None:
            self.residency.reset_counts()

    def close(self) -> None:
        """Drop the packed weights; no compiled pass may run afterwards."""
        self._linears.clear()
        self._experts.clear()
        self._splits.clear()
        self._sparse.clear()
        del self._embedding, self._glues

    def leave_npu(self) -> None:
        """Compile for the GPU alone from now on; no pass that was compiled before may run afterwards."""
        self._plan = self._plan.without_npu()
        self._splits.clear()
        self._sparse.clear()
        self._experts.shares.clear()

    # -- passes --------------------------------------------------------------------------------------

    def compile_pass(
        self, phase: Phase, tokens: int, bucket: int, cache: KvMemory, *, builds_graphs: bool = True
    ) -> CompiledPass:
        """Return the steps of ``tokens`` tokens through all layers, without the head.

        Args:
            phase: Phase whose placements to use.
            tokens: Length of the pass.
            bucket: Positions that the grids of a decode pass must cover; in prefill the border of
                :func:`heterollm.engine.score_slots.key_borders` at or behind the last position.
            cache: A session's KV cache to bind first.
            builds_graphs: Whether to build the NPU's graphs; a pass without them is readable but cannot run.
        """
        builder = self._begin(phase, tokens, cache, builds_graphs=builds_graphs)
        delta = self._layers(builder, bucket, cache)
        return CompiledPass.of(self._finished(builder, f"{phase} of {tokens}"), delta, cache)

    def compile_flight(
        self, lengths: Sequence[int], position: int, bucket: int, cache: KvMemory
    ) -> CompiledPass:
        """Return the steps of several chunks of a prompt at once, in the order of the plan's schedule.

        Args:
            lengths: Tokens of each chunk.
            position: Position of the first chunk.
            bucket: Positions that the grids of a decode pass must cover.
            cache: A session's KV cache to bind first.
        """
        schedule = self._plan.schedule
        assert schedule is not None  # the plan has lanes
        chunks, first = [], position
        for lane, tokens in zip(self.lanes, lengths, strict=False):
            builder = self._begin("prefill", tokens, cache, lane=lane, plan=self._flight_plan)
            delta = self._layers(builder, bucket, cache)
            chunks.append(Chunk(tokens, first, builder.steps))
            first += tokens
        names = {memory: name for lane in self.lanes for memory, name in lane.names.items()}
        where = f"prefill of {' + '.join(map(str, lengths))}"
        kinds = {spec.layer: spec.kind for spec in self._weights.specs}
        steps = interleaved(chunks, schedule, self._plan.chunk_length, kinds)
        if self._check is not None:
            steps = self._check.checked(steps, names | _cache_names(cache), where)
        return CompiledPass.of(tuple(steps), delta, cache, len(lengths) - 1)

    def _layers(self, builder: PassBuilder, bucket: int, cache: KvMemory) -> Segments:
        """Append the embedding and all layers, and return the output of the last."""
        glue = self._glue(builder)
        glue.embedding(builder, self._embedding)
        delta: Segments | None = None
        for layer in range(self._config.layers):
            op = self._placed(builder, layer, "qkv")
            glue.norm(builder, layer, "attention", delta, op.rounded or op.codes)
            qkv = self._linear(builder, op)
            glue.rope(builder, layer, qkv, cache)
            op = self._placed(builder, layer, "o")
            self._attention(builder, layer, bucket, cache, op.rounded)
            delta = self._linear(builder, op)
            delta = self._feed_forward(builder, layer, delta)
            builder.submit_layer(layer)
        assert delta is not None  # a model has layers
        return delta

    def _attention(
        self,
        builder: PassBuilder,
        layer: int,
        bucket: int,
        cache: KvMemory,
        rounded: RoundedInputs | None,
    ) -> None:
        """Append a layer's attention; only prefill attends sparsely."""
        placement = self._plan.attention_of(builder.tokens, bucket, layer)
        if builder.phase == "prefill" and isinstance(placement, SparseAttention):
            self._sparse.attention(builder, layer, placement, bucket, cache, rounded)
        else:
            self._glue(builder).attention(builder, layer, bucket, cache, rounded)

    def compile_head(
        self, phase: Phase, rows: int, layers: CompiledPass, *, builds_graphs: bool = True
    ) -> CompiledPass:
        """Return the steps from the output of ``layers`` to the logits of ``rows`` positions.

        A pass on the GPU alone ends in the driver's wait, as under plan ``gpu``: a predicted sleep for all of
        it would end late until the prediction has learnt its length.
        """
        output = layers.output
        assert output is not None
        builder = self._begin(phase, rows, lane=self.lanes[layers.lane], builds_graphs=builds_graphs)
        glue = self._glue(builder)
        op = self._placed(builder, -1, "head")
        glue.final_norm(builder, output, op)
        if op.placement.npu_lengths:
            glue.join(builder, self._linear(builder, op))
        else:
            self._head_of_gpu(builder, op)
        glue.finish_logits(builder)
        self._splits.end(builder, waits=layers.uses_npu or bool(op.placement.npu_lengths))
        written = (*segments_of(output), builder.lane.private["residual"])
        return CompiledPass.of(self._finished(builder, f"head of {rows}", written))

    def _begin(
        self,
        phase: Phase,
        tokens: int,
        cache: KvMemory | None = None,
        *,
        lane: Lane | None = None,
        plan: Plan | None = None,
        builds_graphs: bool = True,
    ) -> PassBuilder:
        lane = lane or self.lanes[0]
        own = [self._specs[-1, "head"]] if cache is None else self._weights.specs[:-1]
        placed = (plan or self._plan).operators(phase, tokens, own, rows=tokens)
        return PassBuilder(
            phase,
            tokens,
            {(spec.layer, spec.group): (spec, placement) for spec, placement in placed},
            self._fences.of_pass(phase, tokens),
            lane,
            {**lane.names, **_cache_names(cache)},
            self._runtime,
            after_every_operator=self._fences.after_every_operator,
            builds_graphs=builds_graphs,
        )

    def _finished(
        self, builder: PassBuilder, where: str, written: Sequence[DeviceMemory] = ()
    ) -> tuple[Step, ...]:
        """Return all steps of a pass, checked if the environment requests it, and merged."""
        found = builder.steps
        if self._check is not None:
            found = self._check.checked(found, builder.names, where, written, merged=builder.merges)
        return tuple(merge_steps(self._runtime, found) if builder.merges else found)

    def _glue(self, builder: PassBuilder) -> GlueEmitter:
        return self._glues[builder.lane.number]

    # -- linears -------------------------------------------------------------------------------------

    def _placed(self, builder: PassBuilder, layer: int, group: Group) -> PlacedOp:
        spec, placement = builder.placements[layer, group]
        lane, npu_output, gpu_output = builder.lane, "npu_output", "gpu_output"
        if spec.group == "head":
            # Without the NPU, the GPU writes the logits directly.
            split = bool(placement.npu_lengths)
            npu_output, gpu_output = ("head_npu_output", "head_gpu_output") if split else ("logits", "logits")
        return PlacedOp(
            spec,
            placement,
            source=lane.shared[INPUT_SLOTS[spec.group]],
            npu_output=lane.shared[npu_output],
            gpu_output=lane.shared[gpu_output] if gpu_output == "logits" else lane.private[gpu_output],
            rounded=self._rounded(lane, spec, placement),
            codes=self._splits.codes(lane, spec, placement),
            shadow=self._splits.shadow(lane, spec, placement),
        )

    def _rounded(self, lane: Lane, spec: OpSpec, placement: Placement) -> RoundedInputs | None:
        """Return the buffers for int8 codes that the kernel before a group writes; None without them.

        That kernel writes codes if the GPU computes rows of all tokens. Under a sequence split the GPU
        rounds its own tokens while the NPU, which rounds its input itself, is busy.
        """
        if not spec.integer_inputs or placement.npu_rows == spec.member_rows:
            return None
        slot = INPUT_SLOTS[spec.group]
        codes, blocks = lane.private[f"{slot}_codes"], lane.private[f"{slot}_blocks"]
        return RoundedInputs(codes, blocks, spec.weight.bits, spec.weight.block)

    def _linear(self, builder: PassBuilder, op: PlacedOp) -> Segments:
        return self._splits.linear(builder, op, self._linears[op.spec.layer, op.spec.group])

    def _head_of_gpu(self, builder: PassBuilder, op: PlacedOp) -> None:
        """Append the head as one kernel that writes the logits in float32."""
        launch = self._linears[-1, "head"].launch(
            op.source,
            op.gpu_output,
            tokens=builder.tokens,
            output_dtype=np.float32,
            rounded=op.rounded,
            label=op.name,
        )
        work = LinearWork.of_rows(op.spec, builder.tokens, op.spec.rows)
        builder.steps += builder.shard(op, launch, op.name, op.source, op.gpu_output, work, op.rounded)
        builder.end_operator(op.operator, op.layer)

    # -- feed-forward network ------------------------------------------------------------------------

    def _feed_forward(self, builder: PassBuilder, layer: int, delta: Segments) -> Segments:
        """Append a layer's norm, experts and feed-forward network, and return the output."""
        glue, routed = self._glue(builder), self._experts.rounded(builder.lane, layer)
        group = next((own for own in FIRST_OF_FFN if (layer, own) in builder.placements), None)
        op = None if group is None else self._placed(builder, layer, group)
        codes = None if op is None else op.rounded or op.codes
        glue.norm(builder, layer, "feed_forward", delta, routed or codes)
        prefill = builder.phase == "prefill"
        placement = self._plan.experts_of(builder.tokens, layer) if prefill else EXPERTS_ON_GPU
        experts = self._experts.mixture(builder, layer, placement)
        if op is None:
            assert experts is not None  # a layer has experts, a network, or both
            return experts
        out = self._ffn(builder, op) if group == "ffn" else self._gate_up_and_down(builder, op)
        if experts is None:
            return out
        if out.a is out.b:
            return Segments(experts.a, out.a, out.rows, out.rows, join="sum")
        # The next norm adds two arrays at most.
        glue.add(builder, layer, experts)
        return out

    def _gate_up_and_down(self, builder: PassBuilder, op: PlacedOp) -> Segments:
        """Append the feed-forward network as two operators, of which ``op`` is the first."""
        gate_up = self._linear(builder, op)
        down = self._placed(builder, op.spec.layer, "down")
        self._glue(builder).activation(builder, op.spec.layer, gate_up, down.rounded)
        return self._linear(builder, down)

    def _ffn(self, builder: PassBuilder, op: PlacedOp) -> Segments:
        """Append the ffn operator, split along the intermediate width; the outputs of both shards are added.

        The GPU's queue runs three kernels while the NPU runs one graph.
        """
        ffn = op.spec
        (width, *_), (whole, *_) = op.placement.npu_rows, ffn.member_rows
        gpu = [] if width == whole else self._gpu_ffn(builder, op, width, whole)
        return self._splits.ffn(builder, op, gpu)

    def _gpu_ffn(self, builder: PassBuilder, op: PlacedOp, width: int, whole: int) -> list[Step]:
        """Return the steps of the GPU's shard: the intermediate width from ``width`` to ``whole``."""
        lane, ffn, then, out = builder.lane, op.spec, op.spec.then, op.gpu_output
        activated = lane.shared["activated"]
        assert then is not None
        tokens, rows = builder.tokens, ((width, whole),) * 2
        gate_up = self._linears[ffn.layer, "gate_up"].launch(
            op.source, out, kept=rows, rounded=op.rounded, tokens=tokens, label=op.name
        )
        rounded = self._rounded(lane, then, op.placement)
        halves = Segments(out, out, (whole - width,) * 2, (0, 0))
        activation = self._glue(builder).activation_launch(tokens, ffn.layer, halves, rounded, start=width)
        # The activation has read the rows of gate and up, so that the same slot can take the sum.
        down = self._linears[ffn.layer, "down"].launch(
            activated, out, columns=(width, whole), rounded=rounded, tokens=tokens, label=op.name
        )
        work = LinearWork.of_rows(ffn, tokens, 2 * (whole - width))
        label = shard_name(op.name, ffn, rows)
        found = builder.shard(op, gate_up, label, op.source, out, work, op.rounded)
        writes = (activated, *codes_of(rounded))
        found.append(builder.prepared("activation", ffn.layer, activation, (out,), writes))
        work = LinearWork.of_columns(then, tokens, whole - width)
        label = f"{op.name} down[:, {width}:{whole}]"
        return found + builder.shard(op, down, label, activated, out, work, rounded)


def _cache_names(cache: KvMemory | None) -> dict[DeviceMemory, Buffer]:
    return dict.fromkeys(cache.memories if cache else (), Buffer("kv_cache"))
