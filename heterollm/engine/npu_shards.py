"""The NPU's shards of a model's operators, and the contexts that their graphs share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from heterollm.engine.slots import HEAD_ROWS
from heterollm.kernels.formats import concatenate_rows, take_columns, take_rows
from heterollm.kernels.npu import (
    CONTEXT_BYTES,
    INTEGER_FORMS,
    ContextGraph,
    ExpertsShard,
    FfnRanges,
    FfnShard,
    FusedOutput,
    GraphForm,
    LinearRanges,
    LinearShard,
    NpuShard,
    StaticRanges,
    StreamNorm,
    WeightShard,
)
from heterollm.kernels.ops import Group, OpSpec, joined_specs
from heterollm.model import ModelWeights, norm_before
from heterollm.solver import ExpertGroup, ExpertsPlacement, Plan, PlannedExperts


def shard_ranges(
    ranges: Mapping[tuple[int, Group], StaticRanges],
    spec: OpSpec,
    npu_rows: tuple[int, ...],
    *,
    shadow: bool = False,
) -> StaticRanges | None:
    """Return the calibrated ranges of an operator's shard; None without suitable ones.

    Args:
        ranges: Ranges by layer and group.
        spec: A group of linears, or an ffn operator.
        npu_rows: Leading rows of each member.
        shadow: Whether inputs are clamped, and the GPU multiplies the rest of them.
    """
    found = ranges.get((spec.layer, spec.group))
    if isinstance(found, LinearRanges):
        return found.of_placement(shadow=shadow)
    return None if found is None else found.of_shard(whole=npu_rows == spec.member_rows)


def form_of_ranges(form: GraphForm | None, ranges: StaticRanges | None) -> GraphForm | None:
    """Return the planned form, or ``integer`` in place of ``static_int8`` where ranges have 16 bits.

    Plans treat layers alike; a calibration keeps 16 bits where 8 are not enough. Every length of
    ``static_int8`` is one of ``integer``.
    """
    wide = isinstance(ranges, LinearRanges) and ranges.bits == 16
    return "integer" if wide and form == "static_int8" else form


@dataclass(frozen=True, slots=True)
class PlannedGraph:
    """A graph that some pass of a plan runs.

    Args:
        spec: The group of linears, the ffn operator, or the experts of a layer.
        npu_rows: Leading rows of each member.
        length: Tokens of one run; of each expert.
        form: Graph form; None for the backend's first one.
        shadow: Whether inputs are clamped.
        experts: The experts of a group of them; empty for others.
    """

    spec: OpSpec
    npu_rows: tuple[int, ...]
    length: int
    form: GraphForm | None
    shadow: bool = False
    experts: tuple[int, ...] = ()

    @classmethod
    def of_experts(cls, spec: OpSpec, placement: ExpertsPlacement, group: ExpertGroup) -> PlannedGraph:
        """Return the graph of a group of experts.

        Args:
            spec: The experts of the layer.
            placement: Their placement.
            group: One of its groups.
        """
        form = cast("GraphForm | None", placement.form)
        return cls(spec, spec.member_rows, group.capacity, form, experts=group.experts)

    @property
    def weight_bytes(self) -> int:
        """Bytes of its weights."""
        return self.spec.slice_bytes(self.npu_rows) * max(1, len(self.experts))


def planned_graphs(
    plan: Plan, specs: Sequence[OpSpec], ranges: Mapping[tuple[int, Group], StaticRanges]
) -> Iterator[PlannedGraph]:
    """Yield every graph that some pass of the plan runs, layer by layer, repeated ones included.

    Args:
        plan: The plan.
        specs: Every group of the model, and the experts of a mixture.
        ranges: Calibrated ranges by layer and group; without suitable ones the default takes the place of an
            integer form.
    """
    for spec in (*specs, *joined_specs(specs)):
        for entry in plan.placed:
            placement = entry.placement
            if entry.holds(spec) and entry.lengths[0] <= plan.longest_pass(entry, HEAD_ROWS):
                form, rows = cast("GraphForm | None", placement.form), placement.npu_rows
                shadow = placement.shadow
                if form in INTEGER_FORMS:
                    own = shard_ranges(ranges, spec, rows, shadow=shadow)
                    form, shadow = (None, False) if own is None else (form_of_ranges(form, own), shadow)
                for length in placement.npu_lengths:
                    yield PlannedGraph(spec, rows, length, form, shadow)
    for spec in (spec for spec in specs if spec.experts is not None):
        for mixed in plan.technique(PlannedExperts).entries:
            if mixed.holds(spec.layer) and mixed.lengths[0] <= plan.chunk_length:
                for group in mixed.placement.groups:
                    yield PlannedGraph.of_experts(spec, mixed.placement, group)


def planned_contexts(
    graphs: Iterable[PlannedGraph], layers: int, most_bytes: int = CONTEXT_BYTES
) -> list[tuple[PlannedGraph, ...]]:
    """Return graphs by context, in the order in which a pass runs them.

    QNN puts contexts into process domains in the order in which they are loaded. So graphs that follow one
    another share a context or lie side by side. All lengths of a slice or a group of experts, which hold the
    same weights, share one in any case.

    Args:
        graphs: The graphs of a model, those of a layer in the order of :func:`planned_graphs`.
        layers: Most layers of one context; 0 for contexts of one graph.
        most_bytes: Most weights of a context of several slices; a larger slice has one of its own.
    """
    distinct = dict.fromkeys(graphs)
    if not layers:
        return [(graph,) for graph in distinct]
    slices: dict[tuple[int, str, tuple[int, ...], tuple[int, ...], bool], list[PlannedGraph]] = {}
    for graph in distinct:
        # Compilers need other options for integer graphs, and a context has one set of options.
        whose = graph.spec.layer, graph.spec.group, graph.npu_rows, graph.experts
        place = (*whose, graph.form in INTEGER_FORMS)
        slices.setdefault(place, []).append(graph)
    contexts: list[list[PlannedGraph]] = []
    last: dict[bool, tuple[list[PlannedGraph], int]] = {}
    for (layer, *_, integer), own in sorted(slices.items(), key=lambda item: (item[0][0] < 0, item[0][0])):
        own.sort(key=lambda graph: (graph.length, graph.form or ""))
        size_bytes = sum({graph.form: graph.weight_bytes for graph in own}.values())
        context, used_bytes = last.get(integer, ([], 0))
        begin = context[0].spec.layer if context else -1
        if begin < 0 or not begin <= layer < begin + layers or used_bytes + size_bytes > most_bytes:
            context, used_bytes = [], 0
            contexts.append(context)
        context += own
        last[integer] = context, used_bytes + size_bytes
    return list(map(tuple, contexts))


def context_graphs(
    contexts: Iterable[Iterable[PlannedGraph]], shard: Callable[[PlannedGraph], WeightShard]
) -> list[tuple[ContextGraph, ...]]:
    """Return contexts as an NPU takes them.

    Args:
        contexts: The graphs of each context.
        shard: Returns the shard of a graph.
    """
    return [
        tuple(
            ContextGraph(
                *(graph.spec.layer, graph.spec.group, graph.npu_rows, graph.length, graph.form),
                functools.partial(shard, graph),
                graph.experts,
            )
            for graph in context
        )
        for context in contexts
    ]


def planned_shard(
    weights: ModelWeights, ranges: Mapping[tuple[int, Group], StaticRanges], graph: PlannedGraph
) -> WeightShard:
    """Return the shard of a planned graph, with calibrated ranges if it computes in integers."""
    if graph.experts:
        return experts_shard(weights, graph.spec, graph.experts)
    own = None
    if graph.form in INTEGER_FORMS:
        own = shard_ranges(ranges, graph.spec, graph.npu_rows, shadow=graph.shadow)
    return npu_shard(weights, graph.spec, graph.npu_rows, own)


def npu_shard(
    weights: ModelWeights, spec: OpSpec, npu_rows: tuple[int, ...], ranges: StaticRanges | None = None
) -> NpuShard:
    """Return the NPU's shard of an operator.

    Args:
        weights: The model's weights.
        spec: A group of linears, or an ffn operator.
        npu_rows: Leading rows of each member, not all of them 0; equal ones for the members of an ffn, whose
            intermediate width is split at a multiple of two scale blocks.
        ranges: Calibrated ranges of the shard, which integer forms need: those of :func:`shard_ranges`.
    """
    *_, group = (spec.group, *spec.parts) if spec.then is None else ("gate_up",)
    row_ranges = tuple((0, rows) for rows in npu_rows)
    members = zip(weights.linear(spec.layer, group), row_ranges, strict=True)
    stacked = concatenate_rows([take_rows(member, [rows]) for member, rows in members if rows[1]])
    key, rounded = weights.content_key, spec.integer_inputs
    if spec.then is None:
        linear = ranges if isinstance(ranges, LinearRanges) else None
        norm = _stream_norm(weights, spec.layer, group) if spec.fused else None
        return LinearShard(stacked, spec.layer, spec.group, row_ranges, key, rounded, linear, norm)
    (down,) = weights.linear(spec.then.layer, "down")
    width = npu_rows[0]
    biases = weights.bias(spec.layer, group)
    bias = np.concatenate([part[:width] for part in biases]) if biases else None
    columns = take_columns(down, 0, width)
    own = ranges if isinstance(ranges, FfnRanges) else None
    kind = weights.config.activation, bias, spec.layer, key, (0, width), rounded, own
    fused = None
    if spec.first is not None:
        (o,) = weights.linear(spec.layer, spec.first.group)
        fused = FusedOutput(o, _stream_norm(weights, spec.layer, group), npu_rows == spec.member_rows)
    return FfnShard(stacked, columns, *kind, weights.slopes(spec.layer), fused)


def _stream_norm(weights: ModelWeights, layer: int, group: Group) -> StreamNorm:
    """Return the norm before a group."""
    config = weights.config
    factors = weights.norm(layer, norm_before(config, layer, group)) + np.float32(config.norm_offset)
    return StreamNorm(factors, config.rms_norm_eps)


def experts_shard(weights: ModelWeights, spec: OpSpec, experts: tuple[int, ...]) -> ExpertsShard:
    """Return a group of a layer's experts.

    Args:
        weights: The model's weights.
        spec: The experts of the layer.
        experts: The experts of the group, in order.
    """
    layer, size = spec.layer, spec.member_rows[0]
    gates = weights.expert_members(layer, ("gate", "up"))
    downs = weights.expert_members(layer, ("down",))

    def part(expert: int) -> FfnShard:
        gate_up = concatenate_rows([gates[2 * expert], gates[2 * expert + 1]])
        kind = weights.config.activation, None, layer, weights.content_key, (0, size), spec.integer_inputs
        return FfnShard(gate_up, downs[expert], *kind)

    return ExpertsShard(experts, tuple(map(part, experts)))
