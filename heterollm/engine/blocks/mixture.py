"""Emits a layer's mixture of experts: router, order of the rows, products of each expert, and weighted sum.

The GPU computes all of it but the experts that a plan gives to the NPU. The lists of steps do not depend on
the routing: kernels read it on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from heterollm.base import PlanError, Progress
from heterollm.engine.builder import PassBuilder
from heterollm.engine.experts.residency import ExpertBudget, ExpertResidency
from heterollm.engine.experts.shares import SharedExperts
from heterollm.engine.lanes import Lane
from heterollm.engine.placed import Begun, Delta, codes_of, segments_of
from heterollm.engine.slots import (
    EXPERT_ACTIVATED,
    EXPERT_GATE_UP,
    EXPERT_LISTS,
    EXPERT_OUTPUT,
    EXPERT_ROWS,
    ROUTER_LOGITS,
)
from heterollm.engine.step import LinearWork, Step, operator_name
from heterollm.engine.techniques.registry import Techniques
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import (
    STEP_POSITION,
    Argument,
    DeviceMemory,
    ExpertLists,
    ExpertShape,
    GlueKernels,
    GpuLinear,
    GroupedLinear,
    RoundedInputs,
    Segments,
)
from heterollm.kernels.operators import ExpertBiases, GpuExperts, activate, rms_norm, weigh_tokens
from heterollm.kernels.ops import OpSpec, Phase
from heterollm.model import (
    EXPERT_FACTORS,
    ROUTER_BIAS,
    ROUTER_NORM,
    LayerStage,
    MixtureBlock,
    ModelWeights,
)
from heterollm.solver import EXPERTS_ON_GPU, ExpertsPlacement, Plan

ExpertRows: TypeAlias = Callable[[int, Phase, int, int], tuple[int, int]]
"""Returns the experts that have rows on the GPU, and the rows, by layer, phase, tokens and first position."""


@dataclass(frozen=True, slots=True)
class MixtureOptions:
    """Options of a mixture of experts.

    Args:
        budget: Memory that the experts may take on the GPU; None for all of them.
        assumed: Assumed rows of experts, for a simulated device without values.
    """

    budget: ExpertBudget | None = None
    assumed: ExpertRows | None = None


ALL_IN_MEMORY: Final = MixtureOptions()


@dataclass(frozen=True, slots=True)
class _Layer:
    """The weights of a layer's mixture: router and its norm, experts or slots, biases and factors."""

    spec: OpSpec
    router: GpuLinear
    gate_up: GroupedLinear
    down: GroupedLinear
    norm: Argument
    bias: Argument
    shift: Argument
    factors: Argument
    gate_up_bias: Argument
    down_bias: Argument


class MixtureEmitter:
    """Packs the experts of a model for the GPU and emits blocks of them; of a model without, none.

    Where the NPU has some experts of a layer, its rows are gathered before the mark. The GPU's own rows and
    products are enqueued before the wait for the mark, so that both processors work at once.

    Args:
        device: The device.
        weights: The model's weights.
        plan: The plan.
        progress: Called while weights are packed.
        techniques: The techniques of the engine.
        options: The budget, and assumed rows.

    Attributes:
        residency: The experts in memory under a budget; None without one.
    """

    def __init__(
        self,
        device: Device,
        weights: ModelWeights,
        plan: Plan,
        progress: Progress,
        techniques: Techniques,
        options: MixtureOptions,
    ) -> None:
        self._assumed, budget = options.assumed, options.budget
        kinds = device.gpu, device.activation_dtype, device.cache_dtype
        self._kernels, self._glue = GpuExperts(*kinds), GlueKernels(*kinds)
        self._techniques, self._epsilon = techniques, weights.config.rms_norm_eps
        self.residency: ExpertResidency | None = None
        if budget is not None:
            self.residency = ExpertResidency(device, weights, budget, plan.chunk_length)
        self._layers: dict[int, _Layer] = {}
        for spec in weights.experts:
            progress("Packing experts for the GPU", spec.layer, len(weights.experts))
            self._layers[spec.layer] = _packed(device, weights, spec, self.residency)

    def clear(self) -> None:
        """Drop the weights and graphs; no compiled pass may run afterwards."""
        self._layers.clear()
        if self.residency is not None:
            self.residency.close()

    def begin(self, builder: PassBuilder, layer: int, block: MixtureBlock) -> Begun:
        """Return a layer's mixture, whose norm comes next."""
        codes = _codes(builder.lane, "linear_input", self._layers[layer].spec)
        return Begun(codes, lambda: Delta(self._emit(builder, layer, block)))

    def weigh_tokens(self, builder: PassBuilder, layer: int, stage: LayerStage, added: Delta | None) -> None:
        """Append the saliency of tokens before a stage, if its experts on the NPU drop tokens.

        Args:
            builder: The pass so far.
            layer: Decoder layer.
            stage: The stage.
            added: Output of the layer's attention, or of what it has in its place.

        Raises:
            PlanError: There is no such output.
        """
        if not any(isinstance(block, MixtureBlock) for block in stage.blocks):
            return
        op = self._techniques.around(builder, "experts", layer)
        if not isinstance(op, SharedExperts) or op.taken.saliency is None:
            return
        if added is None:
            raise PlanError(
                f"Layer {layer} drops tokens by the norm of attention's output, and has none before experts.",
                fix="Plan with --overflow gpu.",
            )
        saliency, segments = op.taken.saliency, added.segments
        launch = weigh_tokens(self._glue, segments, saliency, tokens=builder.tokens, bias=added.bias)
        reads, written = segments_of(segments), (saliency,)
        builder.kernel("saliency", layer, launch, reads=reads, writes=written, ends=False)

    def _emit(self, builder: PassBuilder, layer: int, block: MixtureBlock) -> Segments:
        own = self._layers[layer]
        routing = own.spec.experts
        assert routing is not None  # by expert_specs
        lane, hidden = builder.lane, own.spec.columns
        shape = ExpertShape(routing, builder.tokens)
        slots = lane.private
        x, rows, out, logits = (
            *(lane.shared["linear_input"], slots[EXPERT_ROWS], slots[EXPERT_OUTPUT]),
            slots[ROUTER_LOGITS],
        )
        memory = {name: slots[slot] for name, slot in EXPERT_LISTS.items()}
        lists = ExpertLists(**memory, counted=self._counted(builder, layer))
        around = self._techniques.around(builder, "experts", layer)
        op = around if isinstance(around, SharedExperts) else None
        taken = None if op is None else op.taken
        placement = EXPERTS_ON_GPU if op is None else op.placement
        if op is not None and (block.biased or block.clip or not block.gated):
            raise PlanError(
                f"The NPU has experts of layer {layer}, whose biases, bounds or lack of a gate no graph has.",
                fix="Plan without the technique npumoe.",
            )

        routed = self._routed(builder, own)
        label = f"{layer}.router"
        launch = own.router.launch(
            routed, logits, tokens=builder.tokens, output_dtype=np.float32, label=label
        )
        builder.kernel("router", layer, launch, reads=(routed,), writes=(logits,), ends=False)
        launch = self._kernels.route(
            *(logits, lists), shape=shape, bias=own.bias, shift=own.shift, factors=own.factors
        )
        chosen = lists.chosen, lists.weights
        builder.kernel("routing", layer, launch, reads=(logits,), writes=chosen, ends=False)
        launch = self._kernels.sort(lists, shape=shape, taken=taken)
        order = lists.source, lists.position, lists.places, *(() if taken is None else (taken.counts,))
        by = () if taken is None or taken.saliency is None else (taken.saliency,)
        builder.kernel("order of experts", layer, launch, reads=(lists.chosen, *by), writes=order, ends=False)
        if op is None:
            builder.steps += self._own_rows(builder, block, own, shape, lists, placement)
        else:
            launch = self._kernels.gather_taken(
                *(x, op.npu_source, lists, op.taken),
                shape=shape,
                columns=hidden,
                weighs=block.weighs_inputs,
            )
            reads, written = (x, lists.position), (op.npu_source,)
            builder.kernel("gathering of rows", layer, launch, reads=reads, writes=written, ends=False)
            steps = self._own_rows(builder, block, own, shape, lists, placement)
            builder.hand_over(op, steps, op.acquire)
            op.graphs()
        other = None if op is None else op.npu_target
        launch = self._kernels.combine(
            *(rows, lists, out),
            shape=shape,
            columns=hidden,
            other=other,
            taken=taken,
            bias=own.down_bias,
            weighed=block.weighs_inputs,
        )
        others = *(() if other is None else (other,)), *(() if own.down_bias is None else (lists.chosen,))
        reads = (rows, lists.weights, lists.position, *others)
        builder.kernel("sum of experts", layer, launch, reads=reads, writes=(out,))
        return Segments(out, out, (hidden,), (0,))

    def _routed(self, builder: PassBuilder, own: _Layer) -> DeviceMemory:
        """Return the router's input, behind a norm of its own if it has one."""
        lane = builder.lane
        if own.norm is None:
            return lane.shared["linear_input"]
        residual, out = lane.private["residual"], lane.private[EXPERT_OUTPUT]
        launch = rms_norm(
            *(self._glue, residual, own.norm, out),
            hidden=own.spec.columns,
            tokens=builder.tokens,
            epsilon=self._epsilon,
        )
        builder.kernel("norm", own.spec.layer, launch, reads=(residual,), writes=(out,), ends=False)
        return out

    def _own_rows(
        self,
        builder: PassBuilder,
        block: MixtureBlock,
        own: _Layer,
        shape: ExpertShape,
        lists: ExpertLists,
        placement: ExpertsPlacement,
    ) -> list[Step]:
        """Return the steps of the rows that the GPU computes."""
        lane, layer = builder.lane, own.spec.layer
        x, rows = lane.shared["linear_input"], lane.private[EXPERT_ROWS]
        inputs, row_codes = (_codes(lane, slot, own.spec) for slot in ("linear_input", EXPERT_ROWS))
        codes = (inputs, row_codes) if inputs is not None and row_codes is not None else None
        launch = self._kernels.gather(
            *(x, rows, lists),
            shape=shape,
            columns=own.spec.columns,
            codes=codes,
            weighs=block.weighs_inputs,
        )
        gathered = codes_of(row_codes) or (rows,)
        reads = (*(codes_of(inputs) or (x,)), lists.source)
        steps = [builder.prepared("gathering of rows", layer, launch, reads, gathered)]
        residency = self.residency
        if residency is None:
            return steps + self._products(builder, block, own, shape, lists)
        for number, load in enumerate(residency.calls(layer, lists.chosen, shape, placement)):
            label = f"{operator_name('experts', layer)} round {number}: reading into {residency.slots} slots"
            steps.append(builder.prepared_read("experts", layer, load, label, (lists.chosen,)))
            launch = self._kernels.place_in_slots(lists, residency.table, number, shape=shape)
            places = (lists.places,)
            steps.append(builder.prepared("order of experts", layer, launch, places, places))
            steps += self._products(builder, block, own, shape, lists)
        return steps

    def _products(
        self,
        builder: PassBuilder,
        block: MixtureBlock,
        own: _Layer,
        shape: ExpertShape,
        lists: ExpertLists,
    ) -> list[Step]:
        """Return the steps of gate and up, activation and down of the experts in the places."""
        lane, slots, layer, then = builder.lane, builder.lane.private, own.spec.layer, own.spec.then
        assert then is not None  # by expert_specs
        rows, gate_up, activated = slots[EXPERT_ROWS], slots[EXPERT_GATE_UP], slots[EXPERT_ACTIVATED]
        row_codes, inner_codes = _codes(lane, EXPERT_ROWS, own.spec), _codes(lane, EXPERT_ACTIVATED, then)
        width, bias = then.columns, own.gate_up_bias

        name = f"{layer}.experts"
        launch = own.gate_up.launch(rows, gate_up, lists, shape=shape, rounded=row_codes, label=name)
        work, reads = _work(own.spec, shape), (*(codes_of(row_codes) or (rows,)), lists.places)
        steps = [builder.prepared("experts", layer, launch, reads, (gate_up,), work=work)]
        launch = activate(
            self._glue,
            Segments(gate_up, gate_up, own.spec.member_rows, (0,) * len(own.spec.members)),
            activated,
            tokens=shape.pairs,
            intermediate=width,
            activation=block.activation,
            bias=None if bias is None else ExpertBiases(bias, lists.position, lists.chosen),
            clip=block.clip,
            rounded=inner_codes,
        )
        writes = activated, *codes_of(inner_codes)
        reads = gate_up, *(() if bias is None else (lists.position, lists.chosen))
        steps.append(builder.prepared("activation", layer, launch, reads, writes))
        launch = own.down.launch(
            activated, rows, lists, shape=shape, rounded=inner_codes, label=f"{name} down"
        )
        work, reads = _work(then, shape), (*(codes_of(inner_codes) or (activated,)), lists.places)
        steps.append(
            builder.prepared("experts", layer, launch, reads, (rows,), label=launch.label, work=work)
        )
        return steps

    def _counted(self, builder: PassBuilder, layer: int) -> Callable[[], tuple[int, int]] | None:
        """Return what the GPU's lists of a layer are assumed to hold, at the position of the step buffer."""
        assumed, phase, tokens, step = self._assumed, builder.phase, builder.tokens, builder.lane.step.array
        return None if assumed is None else lambda: assumed(layer, phase, tokens, int(step[STEP_POSITION]))


def _packed(device: Device, weights: ModelWeights, spec: OpSpec, residency: ExpertResidency | None) -> _Layer:
    gpu, dtype, routing = device.gpu, device.activation_dtype, spec.experts
    assert routing is not None  # by expert_specs

    def packed(members: Sequence[str]) -> GroupedLinear:
        return GroupedLinear.pack(
            gpu,
            weights.expert_members(spec.layer, members),
            activation_dtype=dtype,
            integer_inputs=spec.integer_inputs,
            experts=routing.experts,
        )

    router = GpuLinear.pack(gpu, [weights.router(spec.layer)], activation_dtype=dtype)
    block = weights.config.per_layer[spec.layer].find(MixtureBlock)
    assert block is not None  # by expert_specs
    others = {role: weights.other(spec.layer, role) for role in block.tensors(spec.columns)}
    if ROUTER_NORM in others:
        others[ROUTER_NORM] = others[ROUTER_NORM] / np.sqrt(np.float32(spec.columns))

    def uploaded(*roles: str) -> Argument:
        found = [others[role] for role in roles if role in others]
        return gpu.upload(np.concatenate(found, axis=-1)) if found else None

    bias = uploaded(ROUTER_BIAS)
    return _Layer(
        spec,
        router,
        packed([member.name for member in spec.members]) if residency is None else residency.gate_up,
        packed(("down",)) if residency is None else residency.down,
        norm=uploaded(ROUTER_NORM),
        bias=bias if routing.biased else None,
        shift=None if routing.biased else bias,
        factors=uploaded(EXPERT_FACTORS),
        gate_up_bias=uploaded("gate_bias", "up_bias"),
        down_bias=uploaded("down_bias"),
    )


def _codes(lane: Lane, slot: str, spec: OpSpec) -> RoundedInputs | None:
    """Return the slots of int8 codes of a linear's input; None where it reads floats."""
    if not spec.integer_inputs:
        return None
    codes, blocks = lane.private[f"{slot}_codes"], lane.private[f"{slot}_blocks"]
    return RoundedInputs(codes, blocks, spec.weight.bits, spec.weight.block)


def _work(spec: OpSpec, shape: ExpertShape) -> LinearWork:
    """Return the work of a product of each row with its expert's weights, and the bytes of chosen experts."""
    routing = shape.routing
    size = spec.weight.weight_bytes(spec.rows, spec.columns) * routing.touched(shape.tokens)
    flops = 2 * shape.pairs * spec.columns * spec.rows
    return LinearWork(shape.pairs, spec.columns, spec.rows, flops, round(size))
