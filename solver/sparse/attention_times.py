"""Predicted times of a layer's attention, dense, sparse or on the NPU, and of all layers as planned."""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, get_args

from heterollm.solver.costs import Slowdown
from heterollm.solver.plan import Plan
from heterollm.solver.predict import PredictedPass
from heterollm.solver.sparse.attention import (
    AttentionPlacement,
    DenseAttention,
    Estimator,
    KeyHeads,
    PlannedAttention,
    SparseAttention,
)
from heterollm.solver.sparse.costs import SparseTimes
from heterollm.solver.sparse.head_pipeline import lanes_us
from heterollm.solver.standard_lengths import score_keys, score_tokens


class AttentionCosts(Protocol):
    """Times of one layer's attention in passes of prefill.

    ``keys`` are the tokens of the session after the pass.
    """

    @property
    def hand_over_us(self) -> float:
        """Time from the end of the kernel that writes codes to the first graph that reads them."""
        ...

    @property
    def slowdown(self) -> Slowdown:
        """Slowdown of both processors while the NPU estimates scores beside the GPU's attention."""
        ...

    @property
    def follows_graphs(self) -> bool:
        """Whether the GPU takes up each unit behind its graph; else it begins when all graphs have run."""
        ...

    def dense_us(self, tokens: int, keys: int) -> float:
        """Return the GPU's time of attention to all visible keys."""
        ...

    def on_npu_us(self, tokens: int, keys: int) -> float:
        """Return the time of attention on the NPU with hand-overs; graphs have standard sizes."""
        ...

    def sparse(self, tokens: int, keys: int) -> SparseTimes:
        """Return the times of sparse attention; graphs of scores have standard sizes."""
        ...


@dataclass(frozen=True, slots=True)
class AttentionTimes:
    """The predicted time of one layer's attention that is sparse or on the NPU.

    Args:
        estimator: The processor that estimates scores; None without an estimate.
        time_us: From the first kernel to the last.
        npu_us: Time of the NPU's launches.
    """

    estimator: Estimator | None
    time_us: float
    npu_us: float = 0.0


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Attention of all layers in passes of one length that end at a number of keys.

    Args:
        tokens: Tokens of the pass.
        keys: Tokens of the session after it.
        sparse_layers: Layers with sparse attention.
        estimators: Processors that estimate their scores.
        npu_layers: Layers with attention on the NPU.
        dense_us: Time if all layers were dense on the GPU.
        planned_us: Time as planned.
    """

    tokens: int
    keys: int
    sparse_layers: int
    estimators: tuple[Estimator, ...]
    npu_layers: int
    dense_us: float
    planned_us: float


def with_attention_time(
    found: PredictedPass, planned: PlannedAttention, costs: AttentionCosts, keys: int
) -> PredictedPass:
    """Return a predicted pass of prefill, so far with dense attention on the GPU, with the planned one.

    Args:
        found: The pass.
        planned: Its attention.
        costs: Times of attention.
        keys: Tokens of the session after the pass.
    """
    layers = range(max((entry.layers[1] for entry in planned.entries), default=-1) + 1)
    times = _planned_times(planned, costs, found.tokens, keys, layers)
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
    found, planned = [], plan.technique(PlannedAttention)
    for keys in score_keys(context):
        tokens = min(plan.chunk_length, keys)
        times = _planned_times(planned, costs, tokens, keys, range(layers))
        dense_us = costs.dense_us(tokens, keys)
        estimators = tuple(one for one in get_args(Estimator) if one in {own.estimator for own in times})
        planned_us = (layers - len(times)) * dense_us + sum(own.time_us for own in times)
        on_npu = sum(own.estimator is None for own in times)
        sparse = len(times) - on_npu
        found.append(BreakEven(tokens, keys, sparse, estimators, on_npu, layers * dense_us, planned_us))
    return found


def npu_attention_us(costs: AttentionCosts, tokens: int, keys: int, standard: Sequence[int]) -> float:
    """Return the time of one layer's attention on the NPU; arguments as for :func:`attention_times`."""
    return costs.on_npu_us(score_tokens(tokens), _padded(keys, standard))


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
    own, graphs = costs.sparse(tokens, keys), graph_times(costs, tokens, keys, standard)
    gpu_us = [
        len(unit) * own.select_us + sum(map(own.attention_us, keeps))
        for unit, keeps in zip(placement.units, _unit_keeps(placement.keep, placement.units), strict=True)
    ]
    if placement.estimator == "gpu":
        heads = sum(map(len, placement.units))
        return AttentionTimes("gpu", own.quantise_us + heads * graphs.estimate_us + sum(gpu_us))
    scores_us = [graphs.scores_us.get(len(unit), math.inf) for unit in placement.units]
    if costs.follows_graphs:
        time_us = lanes_us(zip(scores_us, gpu_us, strict=True), costs.slowdown)
    else:
        time_us = sum(scores_us) + sum(gpu_us)
    return AttentionTimes("npu", own.quantise_us + costs.hand_over_us + time_us, sum(scores_us))


def graph_times(costs: AttentionCosts, tokens: int, keys: int, standard: Sequence[int]) -> SparseTimes:
    """Return the times of the graphs that a pass runs."""
    return costs.sparse(score_tokens(tokens), _padded(keys, standard))


@functools.lru_cache
def mean_keeps(keep: tuple[float, ...], kv_heads: int) -> tuple[float, ...]:
    """Return the mean ratio of the query heads of each key head."""
    group = len(keep) // kv_heads
    return tuple(sum(keep[first : first + group]) / group for first in range(0, len(keep), group))


# -- helpers -----------------------------------------------------------------------------------------


def _padded(keys: int, standard: Sequence[int]) -> int:
    """Return the keys of the graph for so many."""
    return standard[min(bisect.bisect_left(standard, keys), len(standard) - 1)]


@functools.lru_cache
def _unit_keeps(keep: tuple[float, ...], units: tuple[KeyHeads, ...]) -> tuple[tuple[float, ...], ...]:
    """Return the mean ratios of the key heads of each unit."""
    means = mean_keeps(keep, sum(map(len, units)))
    return tuple(tuple(means[head] for head in unit) for unit in units)


def _planned_times(
    planned: PlannedAttention, costs: AttentionCosts, tokens: int, keys: int, layers: Iterable[int]
) -> list[AttentionTimes]:
    """Return the times of those layers that are sparse or on the NPU in a pass."""
    placed = (planned.of(tokens, keys, layer) for layer in layers)
    # The last standard number of keys depends on the context, which a plan's file need not name.
    standard = score_keys(max((entry.keys[1] for entry in planned.entries), default=keys))
    known: dict[AttentionPlacement, AttentionTimes] = {}
    found = []
    for own in placed:
        if isinstance(own, DenseAttention):
            continue
        if own not in known:
            if isinstance(own, SparseAttention):
                known[own] = attention_times(own, costs, tokens, keys, standard)
            else:
                time_us = npu_attention_us(costs, tokens, keys, standard)
                known[own] = AttentionTimes(None, time_us, time_us)
        found.append(known[own])
    return found
