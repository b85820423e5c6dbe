"""The operators of a mixture of experts that the profiler measures: their keys and sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from heterollm.kernels.npu import ExpertsShape, FfnShape, NpuBackend
from heterollm.kernels.ops import OpSpec, Routing
from heterollm.model import ModelShape
from heterollm.profiler.measure.linears import code_of
from heterollm.profiler.records import ExpertsKey, ExpertsOperator
from heterollm.profiler.work import FFN_ACTIVATION

ROWS: Final = (1, 2, 4, 8, 16, 20, 32, 64, 128, 256)
QUICK_ROWS: Final = (1, 4, 32, 128)
TOKENS: Final = (1, 32, 256, 512)
QUICK_TOKENS: Final = (1, 256)

CHUNK_TOKENS: Final = 1024
"""The largest measured capacity is about twice the mean load of an expert in a chunk of so many tokens."""

SHORTEST_CAPACITY: Final = 32
"""The NPU computes whole tiles of so many tokens."""

GRAPH_WEIGHTS: Final = 48_000_000
"""About the weights of the largest measured graph, unless that would be a graph of one expert: times are
linear in the experts of a graph, and building takes time by weights."""


@dataclass(frozen=True, slots=True)
class ExpertCase:
    """One operator of a layer's experts at one size; the essential ones are enough for predictions.

    Args:
        spec: The experts of a layer.
        key: Key of the measurement.
        essential: Whether a quick run measures it, too.
    """

    spec: OpSpec
    key: ExpertsKey
    essential: bool


def routing_of(spec: OpSpec) -> Routing:
    """Return the routing of a layer's experts."""
    assert spec.experts is not None  # of an ``experts`` group
    return spec.experts


def expert_cases(
    shape: ModelShape, npu: NpuBackend | None, cache_bytes: int, *, quick: bool
) -> Iterator[ExpertCase]:
    """Yield every operator of a model's experts at the sizes to measure; nothing for a model without.

    The networks are measured for two numbers of experts, so that the time of one more is known apart from
    that of the launches.

    Args:
        shape: The model.
        npu: The NPU, whose graphs are measured too; None to leave them out.
        cache_bytes: Size of the last cache before memory.
        quick: Whether to yield as few sizes as predictions need.
    """
    spec = shape.experts
    if spec is None:
        return
    routing, streamed = routing_of(spec), shape.streamed(cache_bytes)

    def case(operator: ExpertsOperator, experts: int, tokens: int, few: bool, form: str = "") -> ExpertCase:
        weight = spec.weight
        key = ExpertsKey(
            operator,
            experts,
            tokens,
            chosen=routing.chosen if operator == "moves" else 0,
            columns=spec.columns,
            width=spec.member_rows[0],
            bits=weight.bits,
            block=weight.block,
            symmetric=weight.symmetric,
            integer_inputs=spec.integer_inputs,
            form=form,
            streamed=streamed,
            code=code_of("npu" if operator == "graph" else "gpu"),
            minimum=weight.minimum,
            gated=len(spec.members) > 1,
        )
        return ExpertCase(spec, key, essential=few)

    for tokens in QUICK_TOKENS if quick else TOKENS:
        yield case("moves", routing.experts, tokens, tokens in QUICK_TOKENS)
    more = min(routing.experts, max(2, routing.chosen))
    for rows in QUICK_ROWS if quick else ROWS:
        for experts in sorted({max(1, more // 2), more}):
            yield case("products", experts, rows, rows in QUICK_ROWS)
    if npu is None:
        return
    capacities = _capacities(npu, routing)
    few = {capacities[0], capacities[-1]} if capacities else set()
    for experts in sorted({1, _largest_group(npu, spec)} - {0}):
        for capacity in sorted(few) if quick else capacities:
            for form in npu.forms(_graph_shape(spec, experts), capacity):
                yield case("graph", experts, capacity, capacity in few, form)


def _capacities(npu: NpuBackend, routing: Routing) -> list[int]:
    """Return the standard lengths up to the first that holds twice the mean load, one tile at least."""
    tiles = [length for length in npu.standard_lengths if length >= SHORTEST_CAPACITY]
    load = 2 * CHUNK_TOKENS * routing.chosen / routing.experts
    last = next((number for number, length in enumerate(tiles) if length >= load), len(tiles) - 1)
    return tiles[: last + 1]


def _largest_group(npu: NpuBackend, spec: OpSpec) -> int:
    """Return the experts of the largest measured graph; 0 if none fits into a graph."""
    limit, expert_bytes = npu.graph_weight_bytes, spec.slice_bytes(spec.member_rows)
    most = routing_of(spec).experts if limit is None else limit // expert_bytes
    usual = GRAPH_WEIGHTS // (3 * spec.columns * spec.member_rows[0])
    return min(most, routing_of(spec).experts, max(2, usual))


def _graph_shape(spec: OpSpec, experts: int) -> ExpertsShape:
    one = FfnShape.of(spec, spec.member_rows[0], FFN_ACTIVATION)
    return ExpertsShape(one, experts)
