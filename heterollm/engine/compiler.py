"""Compiles a plan to the steps of each phase and length.

A compiled pass is ready to run: arguments of kernels are set, memory of NPU graphs is bound, and fences are
prepared. Running the pass means calling its steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from heterollm.base import Progress
from heterollm.engine.blocks.attention import AttentionEmitter
from heterollm.engine.blocks.delta_net import DeltaNetEmitter
from heterollm.engine.blocks.ffn import FfnEmitter
from heterollm.engine.blocks.latent_attention import LatentAttentionEmitter
from heterollm.engine.blocks.laurel import LaurelEmitter
from heterollm.engine.blocks.layer_input import LayerInputEmitter
from heterollm.engine.blocks.mixture import ALL_IN_MEMORY, MixtureEmitter, MixtureOptions
from heterollm.engine.blocks.short_conv import ShortConvEmitter
from heterollm.engine.blocks.streams import StreamEmitter
from heterollm.engine.builder import PassBuilder
from heterollm.engine.endings import with_endings
from heterollm.engine.experts.residency import ExpertResidency
from heterollm.engine.flights import Chunk, interleaved
from heterollm.engine.glue import GlueEmitter
from heterollm.engine.lanes import Lane
from heterollm.engine.linears import LinearEmitter
from heterollm.engine.memory import NO_VALUES
from heterollm.engine.merging import merge_steps
from heterollm.engine.passes import CompiledPass
from heterollm.engine.placed import Delta, segments_of
from heterollm.engine.slot_check import SlotCheck
from heterollm.engine.slot_shifts import Placed, SlotShifts
from heterollm.engine.slots import (
    NORMED_OUTPUTS,
    SHORT_PASS,
    chunk_sizes,
    is_for_host,
    is_private,
    lane_slot,
    pool_sizes,
)
from heterollm.engine.splits import NO_RANGES
from heterollm.engine.state import StateMemory, kv_groups
from heterollm.engine.step import Buffer, Step
from heterollm.engine.techniques.registry import Techniques
from heterollm.engine.tensors import GlueTensors
from heterollm.engine.waits import Fences
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import DeviceMemory, NpuCodes
from heterollm.kernels.npu import StaticRanges
from heterollm.kernels.ops import Group, Phase
from heterollm.kernels.sync import Pool
from heterollm.model import (
    AttentionBlock,
    DeltaNetBlock,
    FfnBlock,
    LatentAttentionBlock,
    LaurelBlock,
    LayerInputBlock,
    LayerStage,
    MambaBlock,
    MixtureBlock,
    ModelWeights,
    RecurrentSpec,
    ShortConvBlock,
)
from heterollm.solver import Plan


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
        techniques: Mapping[str, Any] = NO_VALUES,
        mixture: MixtureOptions = ALL_IN_MEMORY,
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
        item_bytes = device.activation_dtype.itemsize
        sizes = pool_sizes(self._config, weights.specs, plan, item_bytes, context)
        own = {slot: size for slot, size in sizes.items() if not is_private(slot)}
        arena = None
        if plan.uses_npu and device.arenas is not None:
            arena = device.arenas.allocate(
                {slot: size for slot, size in own.items() if not is_for_host(slot)}
            )
        self.pool = Pool(device.gpu, own, arena)
        self._shifts = SlotShifts(device.activation_dtype)
        self._moved: dict[tuple[int, int], Lane] = {}
        self.private = {
            slot: DeviceMemory(device.gpu.scratch(size), size)
            for slot, size in sizes.items()
            if is_private(slot)
        }
        self.states = StateMemory(
            device,
            kv_groups(self._config, context, plan.longest_flight),
            {layer: spec for layer, spec in self._config.states if isinstance(spec, RecurrentSpec)},
        )
        self._specs = {(spec.layer, spec.group): spec for spec in weights.specs}
        self.techniques = Techniques(device, weights, plan, context, ranges, techniques)
        self._linears = LinearEmitter(device, weights, plan, progress, self.techniques, ranges)
        self._splits = self._linears.splits
        self._experts = MixtureEmitter(device, weights, plan, progress, self.techniques, mixture)
        self._tensors = tensors = GlueTensors(device.gpu, weights, context)
        self._glue = GlueEmitter(device, weights.config, tensors)
        self.layer_inputs = LayerInputEmitter(device, weights, self._linears, tensors)
        self._streams = StreamEmitter(device, weights, tensors)
        self._laurel = LaurelEmitter(device, weights, tensors)
        self._emitters: dict[str, Any] = {
            AttentionBlock.NAME: AttentionEmitter(
                device, weights.config, context, self._linears, tensors, self.techniques
            ),
            LatentAttentionBlock.NAME: LatentAttentionEmitter(
                device, weights.config, context, self._linears, tensors, self.techniques
            ),
            DeltaNetBlock.NAME: DeltaNetEmitter(device, self._config, self._linears, tensors),
            MambaBlock.NAME: DeltaNetEmitter(device, self._config, self._linears, tensors),
            ShortConvBlock.NAME: ShortConvEmitter(device, self._linears, tensors),
            FfnBlock.NAME: FfnEmitter(device, self._config, self._linears, tensors, self._glue),
            LayerInputBlock.NAME: self.layer_inputs,
            LaurelBlock.NAME: self._laurel,
            MixtureBlock.NAME: self._experts,
        }
        self.lanes = tuple(self._new_lane(number) for number in range(plan.lanes))
        # So passes of several sessions can run beside a chunk whose graphs the NPU computes.
        self.batch_lane = self._new_lane(plan.lanes) if plan.uses_npu else self.lanes[0]

    def chunk_sizes(self, tokens: int) -> Mapping[str, int]:
        """Return the bytes of each slot that a chunk of so many tokens uses, from its start."""
        item_bytes = self._device.activation_dtype.itemsize
        return chunk_sizes(self._config, self._weights.specs, self._plan, item_bytes, self._context, tokens)

    def _new_lane(self, number: int) -> Lane:
        slots = {slot.partition(".")[0]: None for slot in (*self.pool, *self.private)}
        own = {slot: lane_slot(slot, number) for slot in slots}
        own = {slot: name for slot, name in own.items() if name in self.pool or name in self.private}
        shared = {slot: self.pool[name] for slot, name in own.items() if not is_private(slot)}
        private = {slot: self.private[name] for slot, name in own.items() if is_private(slot)}
        has_rows = number == (self._plan.lanes if self._plan.uses_npu else 0)
        rows = min(SHORT_PASS, self._plan.chunk_length) if has_rows else 1
        tokens, step = (
            self._runtime.shared((count,), np.int32)
            for count in (self._plan.chunk_length, rows * self.states.row_words)
        )
        memories: dict[str, DeviceMemory] = {own[slot]: memory for slot, memory in (shared | private).items()}
        memories |= {lane_slot("tokens", number): tokens, lane_slot("step", number): step}
        memories |= {"code_counts": self._splits.saturation.memory, **self.techniques.memories}
        names = {memory: Buffer(name) for name, memory in memories.items()}
        names |= {memory: Buffer(name) for memory, name in self.states.memory.memories.items()}
        return Lane(number, shared, private, tokens, step, names)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on the integer graphs and the techniques of the passes so far."""
        return (*self._splits.notes, *self.techniques.notes)

    @property
    def residency(self) -> ExpertResidency | None:
        """The experts in memory under a budget; None without one."""
        return self._experts.residency

    def reset_counts(self) -> None:
        """Count all from 0 again."""
        self._splits.saturation.reset()
        self.techniques.reset()
        if self.residency is not None:
            self.residency.reset_counts()

    def close(self) -> None:
        """Drop the packed weights and the memory of state; no compiled pass may run afterwards."""
        self._linears.clear()
        self._experts.clear()
        self.techniques.clear()
        self.layer_inputs.clear()
        self._streams.clear()
        self._laurel.clear()
        self._emitters.clear()
        self.states.close()

    def leave_npu(self) -> None:
        """Compile for the GPU alone from now on; no pass that was compiled before may run afterwards."""
        self._plan = self._plan.without_npu()
        self._splits.clear()
        self.techniques.clear()

    # -- passes --------------------------------------------------------------------------------------

    def compile_pass(
        self, phase: Phase, tokens: int, keys: int, *, shared: bool = False, builds_graphs: bool = True
    ) -> CompiledPass:
        """Return the steps of ``tokens`` tokens through all layers, without the head.

        Args:
            phase: Phase whose placements to use.
            tokens: Length of the pass.
            keys: In prefill the border of :attr:`heterollm.engine.kept_passes.KeptPasses.key_borders` at or
                behind the last position.
            shared: Whether each token belongs to another session.
            builds_graphs: Whether to build the NPU's graphs; a pass without them is readable but cannot run.
        """
        lane = self.batch_lane if shared else self.lanes[0]
        builder = self._begin(phase, tokens, keys, lane=lane, shared=shared, builds_graphs=builds_graphs)
        delta = self._layers(builder)
        steps = self._finished(builder, f"{phase} of {tokens}")
        return CompiledPass.of(steps, delta, lane.number, builder.names)

    def compile_flight(self, lengths: Sequence[int], position: int, keys: Sequence[int]) -> CompiledPass:
        """Return the steps of several chunks of a prompt at once, in the order of the plan's schedule.

        Args:
            lengths: Tokens of each chunk.
            position: Position of the first chunk.
            keys: Of each chunk, as for :meth:`compile_pass`.
        """
        schedule = self._plan.schedule
        assert schedule is not None  # the plan has lanes
        chunks, first, names = [], position, dict[DeviceMemory, Buffer]()
        for lane, tokens, seen in zip(self.lanes, lengths, keys, strict=False):
            builder = self._begin("prefill", tokens, seen, lane=lane, plan=self._flight_plan)
            delta = self._layers(builder)
            chunks.append(Chunk(tokens, first, builder.steps))
            names |= builder.names
            first += tokens
        where = f"prefill of {' + '.join(map(str, lengths))}"
        kinds = {spec.layer: spec.kind for spec in self._weights.specs}
        steps = interleaved(chunks, schedule, self._plan.chunk_length, kinds)
        if self._check is not None:
            steps = self._check.checked(steps, names, where)
        return CompiledPass.of(tuple(steps), delta, len(lengths) - 1, names)

    def _layers(self, builder: PassBuilder) -> Delta:
        """Append the embedding and all layers, and return the output of the last."""
        self._glue.embedding(builder, self._linears.embedding)
        self.layer_inputs.start(builder)
        self._streams.start(builder)
        delta: Delta | None = None
        for number, layer in enumerate(self._config.per_layer):
            for stage in layer.stages:
                delta = self._stage(builder, number, stage, delta)
            assert delta is not None  # a layer has stages
            delta = replace(delta, gain=self._tensors.gain(number))
            builder.submit_layer(number)
        assert delta is not None  # a model has layers
        return self._streams.end(builder, delta)

    def _stage(
        self, builder: PassBuilder, layer: int, stage: LayerStage, added: Delta | None
    ) -> Delta | None:
        """Append the norms and blocks of a stage, and return the sum of outputs.

        It is None where the operators of the next stage compute the last linears of this one.

        Args:
            builder: The pass so far.
            layer: Decoder layer.
            stage: The stage.
            added: Values to add to the residual stream first; None at the start of the model.
        """
        begun = [self._emitters[block.NAME].begin(builder, layer, block) for block in stage.blocks]
        norms = [stage.norms_of(block) for block in stage.blocks]
        outputs: list[Delta] = []
        lent: Delta | None = None
        first, written = 0, None
        self._experts.weigh_tokens(builder, layer, stage, added)
        for number, (block, one, own) in enumerate(zip(stage.blocks, begun, norms, strict=True)):
            if number == 0 or own.norm != norms[number - 1].norm:
                readers = (other for other, its in zip(begun, norms, strict=True) if its.norm == own.norm)
                first, written = number, next((one.codes for one in readers if one.codes is not None), None)
                if number == 0 and stage.streams:
                    added = self._mix(builder, layer, stage, added)
                if one.reads == "stream":
                    self._glue.copy_stream(builder, layer, added, written)
                elif one.reads == "norm" and stage.streams != "corrected":
                    self._glue.norm(builder, layer, own.norm, None if number else added, written)
                elif written is not None:
                    self._glue.codes(builder, layer, written)
            if lent is not None:
                # The norm does not see the output of a block beside it.
                before, unread = norms[number - 1].norm, builder.lane.shared["activated"]
                self._glue.add(builder, layer, before, lent, unread)
                lent = None
            lost = isinstance(one.codes, NpuCodes) and not all(other.keeps for other in begun[first:number])
            if one.codes is not None and (lost or one.codes != written):
                self._glue.codes(builder, layer, one.codes)
            output = one.emit()
            if output is None:
                return None
            if own.output_norm is not None:
                target = builder.lane.private[NORMED_OUTPUTS[block.NAME]]
                output = self._glue.normed(builder, layer, own.output_norm, output, target)
            if one.keeps or number == len(begun) - 1:
                outputs.append(output)
            else:
                lent = output
        return replace(self._glue.summed(builder, layer, stage, outputs), gain=stage.gain)

    def _mix(self, builder: PassBuilder, layer: int, stage: LayerStage, added: Delta | None) -> Delta | None:
        """Append the prediction or correction of several streams, and return the values left to add."""
        if stage.streams == "predicted":
            self._streams.predict(builder, layer, added)
        else:
            assert added is not None  # the correction follows a network
            self._streams.correct(builder, layer, added)
        return None

    def compile_head(
        self, phase: Phase, rows: int, layers: CompiledPass, *, builds_graphs: bool = True
    ) -> CompiledPass:
        """Return the steps from the output of ``layers`` to the logits of ``rows`` positions.

        A pass on the GPU alone ends in the driver's wait, as under plan ``gpu``: a predicted sleep for all of
        it would end late until the prediction has learnt its length.
        """
        output = layers.output
        assert output is not None
        lane = self._lane(layers)
        builder = self._begin(phase, rows, behind=layers, lane=lane, builds_graphs=builds_graphs)
        op = self._linears.placed(builder, -1, "head")
        self._glue.final_norm(builder, output, op.source, op.input_codes)
        if op.placement.npu_lengths:
            self._glue.join(builder, self._linears.linear(builder, op))
        else:
            self._linears.head_of_gpu(builder, op)
        self._glue.finish_logits(builder)
        self._splits.end(builder, waits=layers.uses_npu or bool(op.placement.npu_lengths))
        written = (*segments_of(output.segments), builder.lane.private["residual"])
        return CompiledPass.of(self._finished(builder, f"head of {rows}", written))

    def _lane(self, layers: CompiledPass) -> Lane:
        """Return the lane of a pass's output."""
        return (*self.lanes, self.batch_lane)[layers.lane]

    def compile_states(self, phase: Phase, rows: int, layers: CompiledPass) -> CompiledPass:
        """Return the steps from the output of ``layers`` to the normed states of ``rows`` positions.

        They are in the slot of the head's input.
        """
        output = layers.output
        assert output is not None
        builder = self._begin(phase, rows, behind=layers, lane=self._lane(layers), moves=False)
        self._glue.final_norm(builder, output, builder.lane.shared["head_input"], None)
        self._splits.end(builder, waits=layers.uses_npu)
        written = (*segments_of(output.segments), builder.lane.private["residual"])
        return CompiledPass.of(self._finished(builder, f"states of {rows}", written))

    def _begin(
        self,
        phase: Phase,
        tokens: int,
        keys: int = 0,
        *,
        behind: CompiledPass | None = None,
        lane: Lane | None = None,
        moves: bool = True,
        plan: Plan | None = None,
        shared: bool = False,
        builds_graphs: bool = True,
    ) -> PassBuilder:
        lane = lane or self.lanes[0]
        own = self._weights.specs[:-1] if behind is None else [self._specs[-1, "head"]]
        placed = list((plan or self._plan).operators(phase, tokens, own, rows=tokens))
        if moves:
            lane = self._moved_lane(lane, placed)
        return PassBuilder(
            phase,
            tokens,
            self._plan,
            {(spec.layer, spec.group): (spec, placement) for spec, placement in placed},
            self._fences.of_pass(phase, tokens),
            lane,
            lane.names if behind is None else {**behind.names, **lane.names},
            self._runtime,
            self.states.memory,
            keys=keys,
            row_words=self.states.row_words if shared else 0,
            after_every_operator=self._fences.after_every_operator,
            builds_graphs=builds_graphs,
        )

    def _moved_lane(self, lane: Lane, placed: Placed) -> Lane:
        """Return a lane whose slots begin in the arena where the graphs of a pass find their tensors."""
        arena, number = self.pool.arena, lane.number
        shift = 0 if arena is None else self._shifts.find(number, placed)
        if arena is None or not shift:
            return lane
        if (number, shift) not in self._moved:
            names = {slot: lane_slot(slot, number) for slot in lane.shared}
            shared = {slot: arena.slot(name, shift) for slot, name in names.items() if name in arena}
            self._moved[number, shift] = lane.moved(shared)
        return self._moved[number, shift]

    def _finished(
        self, builder: PassBuilder, where: str, written: Sequence[DeviceMemory] = ()
    ) -> tuple[Step, ...]:
        """Return all steps of a pass, checked if the environment requests it, and merged."""
        found = with_endings(self._runtime, builder.steps) if builder.has_endings else builder.steps
        if self._check is not None:
            found = self._check.checked(found, builder.names, where, written, merged=builder.merges)
        return tuple(merge_steps(self._runtime, found) if builder.merges else found)
