"""The choice of dense or sparse attention for each layer, length and number of keys, by predicted times.

Attention is sparse where a layer is predicted to gain enough at both ends of a range of lengths and of a
range of keys. Other cases have no entry and stay dense.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol, TypeAlias

from msgspec import structs

from heterollm.solver.attention import (
    FUSED_HEADS,
    AttentionEntry,
    Estimator,
    Pipeline,
    ScoreBuckets,
    SparseAttention,
)
from heterollm.solver.head_pipeline import lanes_us, plan_pipeline
from heterollm.solver.plan import Plan
from heterollm.solver.predict import PredictedPass
from heterollm.solver.sparse_costs import SparseTimes
from heterollm.solver.standard_lengths import LEAST_SCORE_TOKENS, score_keys, score_tokens

__all__ = [
    "AttentionCosts",
    "AttentionHeads",
    "AttentionTimes",
    "BreakEven",
    "break_even",
    "plan_attention",
    "with_attention_time",
]

FUSED_BY: Final[Mapping[Pipeline, tuple[int, ...]]] = {
    "heads": FUSED_HEADS[-1:],
    "fused": FUSED_HEADS[:1],
    "ordered": FUSED_HEADS,
}
"""Limits of fused heads that are tried."""


GAIN_FRACTION: Final = 0.1
"""Least gain of sparse attention, as predictions of different kernels have different errors."""

LENGTH_PARTS: Final = 4
"""Ranges of lengths for each size of graphs."""


class AttentionCosts(Protocol):
    """Times of one layer's attention in passes of prefill.

    ``keys`` are the tokens of the session after the pass.
    """

    @property
    def hand_over_us(self) -> float:
        """Time from the end of the kernel that writes codes to the first graph that reads them."""
        ...

    @property
    def follows_graphs(self) -> bool:
        """Whether the GPU takes up each unit behind its graph; else it begins when all graphs have run."""
        ...

    def dense_us(self, tokens: int, keys: int) -> float:
        """Return the GPU's time of attention to all visible keys."""
        ...

    def sparse(self, tokens: int, keys: int) -> SparseTimes:
        """Return the times of sparse attention; graphs of scores have standard sizes."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """The heads of a model, as a calibration says, or as a simulation assumes.

    Args:
        keep: Share of the keys that each query head keeps, by layer; layers that keep all are dense.
        exponents: Exponent of each key head's graph, by layer.
        windows: Sliding window of each layer; 0 for none. A layer whose window ends before its keys is dense.
    """

    keep: tuple[tuple[float, ...], ...]
    exponents: tuple[tuple[int, ...], ...]
    windows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """The predicted time of one layer's attention.

    Args:
        time_us: From the first kernel to the last.
        npu_us: Time of the NPU's launches.
    """

    time_us: float
    npu_us: float = 0.0


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Attention of all layers in passes of one length that end at a number of keys.

    Args:
        tokens: Tokens of the pass.
        keys: Tokens of the session after it.
        sparse_layers: Layers with sparse attention.
        dense_us: Time if all layers were dense.
        planned_us: Time as planned.
    """

    tokens: int
    keys: int
    sparse_layers: int
    dense_us: float
    planned_us: float


def plan_attention(
    heads: AttentionHeads,
    costs: AttentionCosts,
    *,
    context: int,
    chunk_length: int,
    estimator: Estimator = "npu",
    buckets: ScoreBuckets = 1,
    pipeline: Pipeline = "ordered",
) -> tuple[AttentionEntry, ...]:
    """Return the entries of sparse attention.

    Args:
        heads: The heads of the model.
        costs: Times of attention.
        context: Positions of a session.
        chunk_length: Longest pass.
        estimator: The processor that estimates scores.
        buckets: Scale factors to choose among.
        pipeline: Whether key heads are fused, and units put into the best order.
    """
    standard = score_keys(context)
    least = min(LEAST_SCORE_TOKENS, chunk_length)
    lengths, keys = list(_ranges(_length_tops(chunk_length), least)), list(_ranges(_key_tops(standard), 1))
    found: dict[tuple[object, ...], SparseAttention | None] = {}
    entries = []
    layers = zip(heads.keep, heads.exponents, heads.windows, strict=True)
    for layer, (keep, exponents, window) in enumerate(layers):
        if min(keep) >= 1.0:
            continue
        rows = []
        for length in lengths:
            row = []
            for key_range in keys:
                key = keep, exponents, length, key_range
                seen = 0 < window < key_range[1]
                if not seen and key not in found:
                    sparse = SparseAttention(keep, (), (), estimator, buckets)
                    found[key] = _placed(sparse, exponents, costs, length, key_range, standard, pipeline)
                row.append((key_range, None if seen else found[key]))
            rows.append((length, tuple(_joined(row))))
        entries += [
            AttentionEntry(length, key_range, (layer, layer), placement)
            for length, row in _joined_rows(rows)
            for key_range, placement in row
        ]
    return tuple(_joined_layers(entries))


def with_attention_time(found: PredictedPass, plan: Plan, costs: AttentionCosts, keys: int) -> PredictedPass:
    """Return a predicted pass of prefill, in which all layers are dense, with its planned attention.

    Args:
        found: The pass.
        plan: The plan.
        costs: Times of attention.
        keys: Tokens of the session after the pass.
    """
    layers = range(max((entry.layers[1] for entry in plan.attention), default=-1) + 1)
    times = _planned_times(plan, costs, found.tokens, keys, layers)
    if not times:
        return found
    dense_us = costs.dense_us(found.tokens, keys)
    return replace(
        found,
        time_us=found.time_us + sum(own.time_us - dense_us for own in times),
        scores_us=sum(own.npu_us for own in times),
    )


def break_even(plan: Plan, costs: AttentionCosts, layers: int, context: int) -> list[BreakEven]:
    """Return the attention of the longest passes at each standard number of keys.

    Args:
        plan: The plan.
        costs: Times of attention.
        layers: Layers of the model.
        context: Positions of a session.
    """
    found = []
    for keys in score_keys(context):
        tokens = min(plan.chunk_length, keys)
        times = _planned_times(plan, costs, tokens, keys, range(layers))
        dense_us = costs.dense_us(tokens, keys)
        planned_us = (layers - len(times)) * dense_us + sum(own.time_us for own in times)
        found.append(BreakEven(tokens, keys, len(times), layers * dense_us, planned_us))
    return found


def attention_times(
    placement: SparseAttention, costs: AttentionCosts, tokens: int, keys: int, standard: Sequence[int]
) -> AttentionTimes:
    """Return the time of one layer's sparse attention.

    Args:
        placement: The placement.
        costs: Times of attention.
        tokens: Tokens of the pass.
        keys: Tokens of the session after it.
        standard: Numbers of keys of graphs, ascending.
    """
    own, graphs = costs.sparse(tokens, keys), _graph_times(costs, tokens, keys, standard)
    attend_us = [own.attention_us(keep) for keep in _means(placement.keep, sum(map(len, placement.units)))]
    gpu_us = [sum(own.select_us + attend_us[head] for head in unit) for unit in placement.units]
    if placement.estimator == "gpu":
        return AttentionTimes(own.quantise_us + len(attend_us) * graphs.estimate_us + sum(gpu_us))
    scores_us = [graphs.scores_us.get(len(unit), math.inf) for unit in placement.units]
    if costs.follows_graphs:
        time_us = lanes_us(zip(scores_us, gpu_us, strict=True))
    else:
        time_us = sum(scores_us) + sum(gpu_us)
    return AttentionTimes(own.quantise_us + costs.hand_over_us + time_us, sum(scores_us))


# -- helpers -----------------------------------------------------------------------------------------


def _planned_times(
    plan: Plan, costs: AttentionCosts, tokens: int, keys: int, layers: Iterable[int]
) -> list[AttentionTimes]:
    """Return the times of those layers that are sparse in a pass."""
    placed = (plan.attention_of(tokens, keys, layer) for layer in layers)
    # The last standard number of keys depends on the context, which a plan's file need not name.
    standard = score_keys(max((entry.keys[1] for entry in plan.attention), default=keys))
    known: dict[SparseAttention, AttentionTimes] = {}
    found = []
    for own in placed:
        if isinstance(own, SparseAttention):
            if own not in known:
                known[own] = attention_times(own, costs, tokens, keys, standard)
            found.append(known[own])
    return found


def _placed(
    sparse: SparseAttention,
    exponents: Sequence[int],
    costs: AttentionCosts,
    length: tuple[int, int],
    key_range: tuple[int, int],
    standard: Sequence[int],
    pipeline: Pipeline,
) -> SparseAttention | None:
    """Return sparse attention with its units in order, if it gains at each end of both ranges."""
    keys = key_range[1]
    tokens = min(length[1], keys)  # a session is at least as long as its last pass
    if tokens < length[0]:
        return None
    times, graphs = costs.sparse(tokens, keys), _graph_times(costs, tokens, keys, standard)
    means = _means(sparse.keep, len(exponents))
    select_us, attend_us = times.select_us, [times.attention_us(keep) for keep in means]
    least_us = len(means) * select_us + sum(attend_us)
    if sparse.estimator == "npu":
        heads_us = (launch_us / count for count, launch_us in graphs.scores_us.items())
        least_us = max(least_us, len(means) * min(heads_us, default=math.inf))
    if times.quantise_us + least_us >= costs.dense_us(tokens, keys):
        return None
    # The GPU overlaps with nothing: it fuses as much as it can.
    fused = FUSED_HEADS[:1] if sparse.estimator == "gpu" else FUSED_BY[pipeline]
    found = plan_pipeline(
        exponents,
        lambda count: graphs.scores_us.get(count, math.inf),
        [select_us] * len(means),
        attend_us,
        most_fused=fused,
        ordered=pipeline == "ordered",
    )
    placement = structs.replace(
        sparse,
        units=tuple(unit.heads for unit in found.units),
        exponents=tuple(unit.exponent for unit in found.units),
    )
    for few, seen in itertools.product((length[0], tokens), key_range):
        time_us = attention_times(placement, costs, few, max(few, seen), standard).time_us
        if time_us >= (1.0 - GAIN_FRACTION) * costs.dense_us(few, max(few, seen)):
            return None
    predicted_us = attention_times(placement, costs, tokens, keys, standard).time_us
    return structs.replace(placement, predicted_us=round(predicted_us, 3))


def _graph_times(costs: AttentionCosts, tokens: int, keys: int, standard: Sequence[int]) -> SparseTimes:
    """Return the times of the graphs that a pass runs."""
    place = min(bisect.bisect_left(standard, keys), len(standard) - 1)
    return costs.sparse(score_tokens(tokens), standard[place])


def _means(keep: Sequence[float], kv_heads: int) -> list[float]:
    """Return the mean ratio of the query heads of each key head."""
    group = len(keep) // kv_heads
    return [sum(keep[first : first + group]) / group for first in range(0, len(keep), group)]


def _length_tops(chunk_length: int) -> list[int]:
    """Return the longest passes of ranges of lengths: graphs' sizes and whole chunks, and lengths between.

    Passes are padded to powers of two, so that of lengths with one graph the longest gain most.
    """
    tops = {LEAST_SCORE_TOKENS, chunk_length - 1, chunk_length}
    graph = LEAST_SCORE_TOKENS
    while graph < chunk_length:
        tops |= {graph + graph * part // LENGTH_PARTS for part in range(1, LENGTH_PARTS + 1)}
        graph *= 2
    return sorted(top for top in tops if LEAST_SCORE_TOKENS <= top <= chunk_length) or [chunk_length]


def _key_tops(standard: Sequence[int]) -> list[int]:
    """Return the most keys of ranges of keys: those of graphs, and the middle between two of them."""
    middles = {(low + high) // 2 for low, high in itertools.pairwise(standard)}
    return sorted({*standard, *middles})


def _ranges(tops: Sequence[int], least: int) -> Iterator[tuple[int, int]]:
    """Yield ranges that end at each of some numbers, from ``least`` on."""
    for top in tops:
        if top >= least:
            yield least, top
            least = top + 1


_Cell: TypeAlias = tuple[tuple[int, int], SparseAttention]
_Row: TypeAlias = tuple[_Cell, ...]


def _joined(row: Sequence[tuple[tuple[int, int], SparseAttention | None]]) -> Iterator[_Cell]:
    """Yield neighbouring ranges of keys with one placement as one, with the prediction of the last."""
    for _, run in itertools.groupby(row, lambda cell: None if cell[1] is None else _bare(cell[1])):
        own = list(run)
        if (placement := own[-1][1]) is not None:
            yield (own[0][0][0], own[-1][0][1]), placement


def _joined_rows(rows: Sequence[tuple[tuple[int, int], _Row]]) -> Iterator[tuple[tuple[int, int], _Row]]:
    """Yield neighbouring ranges of lengths with the same ranges of keys and placements as one."""
    for _, run in itertools.groupby(rows, lambda row: [(keys, _bare(own)) for keys, own in row[1]]):
        own = list(run)
        yield (own[0][0][0], own[-1][0][1]), own[-1][1]


def _joined_layers(entries: Sequence[AttentionEntry]) -> Iterator[AttentionEntry]:
    """Yield entries of neighbouring layers that differ in nothing else as one."""
    opened: dict[tuple[object, ...], AttentionEntry] = {}
    for entry in entries:
        key = entry.lengths, entry.keys, entry.placement
        held = opened.get(key)
        if held is not None and held.layers[1] == entry.layers[0] - 1:
            opened[key] = structs.replace(held, layers=(held.layers[0], entry.layers[1]))
            continue
        if held is not None:
            yield held
        opened[key] = entry
    yield from opened.values()


def _bare(placement: SparseAttention) -> SparseAttention:
    return structs.replace(placement, predicted_us=None)
