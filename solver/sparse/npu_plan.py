"""The choice of attention on the NPU for each length and number of keys, by predicted times.

The NPU attends where it is predicted to gain enough at both ends of a range of lengths, and of keys. Other
cases have no entry: the GPU attends there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from heterollm.solver.sparse.attention import AttentionEntry, NpuAttention
from heterollm.solver.sparse.attention_times import AttentionCosts, npu_attention_us
from heterollm.solver.sparse.plan import GAIN_FRACTION
from heterollm.solver.sparse.ranges import (
    joined,
    joined_layers,
    joined_rows,
    key_tops,
    length_tops,
    ranges_to,
)
from heterollm.solver.standard_lengths import LEAST_SCORE_TOKENS, score_keys


def plan_npu_attention(
    limits: Sequence[int | None], costs: AttentionCosts, *, context: int, chunk_length: int, least: int = 1
) -> tuple[AttentionEntry, ...]:
    """Return the entries of attention on the NPU.

    Args:
        limits: Of each layer the most keys of which it sees all; 0 where the NPU cannot attend, None for any.
        costs: Times of attention.
        context: Positions of a session.
        chunk_length: Longest pass.
        least: Fewest tokens of a pass to place.
    """
    standard = score_keys(context)
    tops = [top for top in length_tops(chunk_length) if top >= least]
    lengths = list(ranges_to(tops, max(least, min(LEAST_SCORE_TOKENS, chunk_length))))
    rows = []
    for length in lengths:
        cells = [(keys, _placed(costs, length, keys, standard)) for keys in ranges_to(key_tops(standard), 1)]
        rows.append((length, cells))
    entries = []
    for layer, limit in enumerate(limits):
        seen = [
            (length, tuple(joined([(keys, own if _holds(limit, keys) else None) for keys, own in cells])))
            for length, cells in rows
        ]
        entries += [
            AttentionEntry(length, keys, (layer, layer), placement)
            for length, row in joined_rows(seen)
            for keys, placement in row
        ]
    return tuple(joined_layers(entries))


def _holds(limit: int | None, keys: tuple[int, int]) -> bool:
    """Return whether a layer sees all of so many keys."""
    return limit is None or keys[1] <= limit


def _placed(
    costs: AttentionCosts, length: tuple[int, int], keys: tuple[int, int], standard: Sequence[int]
) -> NpuAttention | None:
    """Return attention on the NPU if it gains at each end of both ranges."""
    tokens = min(length[1], keys[1])  # a session is at least as long as its last pass
    if tokens < length[0]:
        return None
    longest_us = -math.inf
    for few, seen in itertools.product((length[0], tokens), keys):
        own_us = npu_attention_us(costs, few, max(few, seen), standard)
        if own_us >= (1.0 - GAIN_FRACTION) * costs.dense_us(few, max(few, seen)):
            return None
        longest_us = max(longest_us, own_us)
    return NpuAttention(round(longest_us, 3))
