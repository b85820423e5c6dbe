"""The choice of dense or sparse attention for each layer, length and number of keys, by predicted times.

Attention is sparse where a layer is predicted to gain enough at both ends of a range of lengths and of a
range of keys. Other cases have no entry and stay dense.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import structs

from heterollm.kernels.formats import BucketCount
from heterollm.solver.sparse.attention import (
    FUSED_HEADS,
    AttentionEntry,
    Estimator,
    KeyHeads,
    Pipeline,
    SparseAttention,
)
from heterollm.solver.sparse.attention_times import AttentionCosts, attention_times, graph_times, mean_keeps
from heterollm.solver.sparse.head_pipeline import fused_heads, plan_pipeline
from heterollm.solver.sparse.ranges import (
    joined,
    joined_layers,
    joined_rows,
    key_tops,
    length_tops,
    ranges_to,
)
from heterollm.solver.standard_lengths import LEAST_SCORE_TOKENS, score_keys

FUSED_BY: Final[Mapping[Pipeline, tuple[int, ...]]] = {
    "heads": FUSED_HEADS[-1:],
    "fused": FUSED_HEADS[:1],
    "ordered": FUSED_HEADS,
}
"""Limits of fused heads that are tried."""


GAIN_FRACTION: Final = 0.1
"""Least gain of sparse attention, as predictions of different kernels have different errors."""


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


def plan_attention(
    heads: AttentionHeads,
    costs: AttentionCosts,
    *,
    context: int,
    chunk_length: int,
    estimators: Sequence[Estimator] = ("npu", "gpu"),
    buckets: BucketCount = 1,
    pipeline: Pipeline = "ordered",
) -> tuple[AttentionEntry, ...]:
    """Return the entries of sparse attention.

    Args:
        heads: The heads of the model.
        costs: Times of attention.
        context: Positions of a session.
        chunk_length: Longest pass.
        estimators: Processors that may estimate scores; the faster one does.
        buckets: Scale factors to choose among.
        pipeline: Whether key heads are fused, and units put into the best order.
    """
    standard = score_keys(context)
    least = min(LEAST_SCORE_TOKENS, chunk_length)
    lengths, keys = list(ranges_to(length_tops(chunk_length), least)), list(ranges_to(key_tops(standard), 1))
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
                    sparse = [SparseAttention(keep, (), (), one, buckets) for one in estimators]
                    placed = (
                        _placed(one, exponents, costs, length, key_range, standard, pipeline)
                        for one in sparse
                    )
                    found[key] = min(filter(None, placed), key=_predicted_us, default=None)
                row.append((key_range, None if seen else found[key]))
            rows.append((length, tuple(joined(row))))
        entries += [
            AttentionEntry(length, key_range, (layer, layer), placement)
            for length, row in joined_rows(rows)
            for key_range, placement in row
        ]
    return tuple(joined_layers(entries))


# -- helpers -----------------------------------------------------------------------------------------


def _placed(
    sparse: SparseAttention,
    exponents: tuple[int, ...],
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
    if sparse.estimator == "gpu":
        units: Sequence[KeyHeads] = fused_heads(exponents)  # nothing overlaps
    else:
        units = _ordered(sparse, exponents, costs, (tokens, keys), standard, pipeline)
        if not units:
            return None
    placement = structs.replace(
        sparse, units=tuple(units), exponents=tuple(exponents[unit[0]] for unit in units)
    )
    longest_us = math.inf
    for few, seen in itertools.product((length[0], tokens), key_range):
        longest_us = attention_times(placement, costs, few, max(few, seen), standard).time_us
        if longest_us >= (1.0 - GAIN_FRACTION) * costs.dense_us(few, max(few, seen)):
            return None
    return structs.replace(placement, predicted_us=round(longest_us, 3))


def _ordered(
    sparse: SparseAttention,
    exponents: tuple[int, ...],
    costs: AttentionCosts,
    sizes: tuple[int, int],
    standard: Sequence[int],
    pipeline: Pipeline,
) -> list[KeyHeads]:
    """Return the units of the NPU's estimates in order, for a pass of so many tokens and keys.

    There are none where even the busier processor alone takes too long.
    """
    times, graphs = costs.sparse(*sizes), graph_times(costs, *sizes, standard)
    means = mean_keeps(sparse.keep, len(exponents))
    attend_us = [times.attention_us(keep) for keep in means]
    heads_us = (launch_us / count for count, launch_us in graphs.scores_us.items())
    least_us = max(sum(attend_us), len(means) * min(heads_us, default=math.inf))
    if least_us >= (1.0 - GAIN_FRACTION) * costs.dense_us(*sizes):
        return []
    found = plan_pipeline(
        exponents,
        lambda count: graphs.scores_us.get(count, math.inf),
        [times.select_us] * len(means),
        attend_us,
        most_fused=FUSED_BY[pipeline],
        ordered=pipeline == "ordered",
        slowdown=costs.slowdown,
    )
    return [unit.heads for unit in found.units]


def _predicted_us(placement: SparseAttention) -> float:
    return math.inf if placement.predicted_us is None else placement.predicted_us
