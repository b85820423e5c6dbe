"""The slots of sparse attention, and the sizes of its passes.

Graphs of scores exist for few numbers of tokens and keys, so that a pass is padded to the next ones.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from typing import Final

from heterollm.engine.lanes import Lane
from heterollm.kernels.formats import code_dtype
from heterollm.kernels.gpu import HeadShape, ScoreMemory, Selection, SparseShape
from heterollm.kernels.npu import ScoresShard, graph_tensors
from heterollm.model import ModelConfig
from heterollm.solver import Plan, SparseAttention, score_keys, score_tokens

SCORE_QUERIES, SCORE_KEYS, SCORES = "score_queries", "score_keys", "scores"
SCORE_STEPS, SCORE_RANGES = "score_steps", "score_ranges"
SELECTION, SELECTION_COUNTS = "selection", "selection_counts"

PRIVATE_SCORE_SLOTS: Final = (SCORE_STEPS, SCORE_RANGES, SELECTION, SELECTION_COUNTS)
"""Slots of sparse attention that neither the host nor the NPU reads or writes."""

SCORE_SLOTS: Final = (SCORE_QUERIES, SCORE_KEYS, SCORES, *PRIVATE_SCORE_SLOTS)
"""All of them, which all layers share."""


def key_borders(plan: Plan, context: int) -> tuple[int, ...]:
    """Return the numbers of keys up to which passes of prefill are alike, ascending; none for dense plans.

    Passes between two borders have the same attention in each layer, and the same standard number of keys.

    Args:
        plan: The plan.
        context: Positions of a session.
    """
    if not plan.sparse_attention:
        return ()
    changes = {border for entry in plan.attention for border in (entry.keys[0] - 1, entry.keys[1])}
    borders = {min(border, context) for border in (*changes, *score_keys(context), context)}
    return tuple(sorted(borders - {0}))


def sparse_shape(heads: HeadShape, tokens: int, keys: int) -> SparseShape:
    """Return the sizes of a pass, padded to those of graphs.

    Args:
        heads: Sizes of the heads.
        tokens: Tokens of the pass.
        keys: Most keys that it sees.
    """
    standard = score_keys(heads.capacity)
    return SparseShape(heads, score_tokens(tokens), standard[bisect.bisect_left(standard, keys)])


def longest_scored_pass(plan: Plan) -> int:
    """Return the most tokens of a pass with sparse attention, padded; 0 without any."""
    longest = (tokens for tokens, _ in _longest(plan))
    return max(map(score_tokens, longest), default=0)


def score_sizes(config: ModelConfig, plan: Plan, context: int) -> Iterator[tuple[str, int]]:
    """Yield slots of sparse attention with the sizes that entries of a plan need.

    Args:
        config: The model.
        plan: The plan.
        context: Positions of a session.
    """
    own = config.attention
    heads = HeadShape(own.heads, own.kv_heads, own.head_dim, context)
    for tokens, keys in _longest(plan):
        shape = sparse_shape(heads, tokens, min(keys, context))
        yield SCORE_QUERIES, shape.query_bytes
        yield SCORE_KEYS, shape.key_bytes
        yield SCORES, shape.score_bytes
        yield SCORE_STEPS, 4 * heads.heads
        yield SCORE_RANGES, 4 * heads.kv_heads * shape.runs
        yield SELECTION, shape.position_bytes
        yield SELECTION_COUNTS, 4 * heads.heads * shape.blocks


def score_graphs(config: ModelConfig, plan: Plan, context: int) -> tuple[tuple[ScoresShard, int], ...]:
    """Return all graphs of scores that some pass may run, once each, with their rows.

    Args:
        config: The model.
        plan: The plan.
        context: Positions of a session.
    """
    own = config.attention
    heads = HeadShape(own.heads, own.kv_heads, own.head_dim, context)
    graphs: dict[tuple[ScoresShard, int], None] = {}
    for entry in plan.attention:
        placement, most = entry.placement, min(entry.lengths[1], plan.chunk_length)
        if not isinstance(placement, SparseAttention) or placement.estimator != "npu":
            continue
        seen = range(entry.keys[0], min(entry.keys[1], context) + 1)
        ends = {min(keys, seen[-1]) for keys in (*score_keys(context), context) if seen and keys >= seen[0]}
        least, largest = score_tokens(entry.lengths[0]), score_tokens(most)
        lengths = [least << power for power in range((largest // least).bit_length())]
        for keys, tokens in itertools.product(sorted(ends), lengths):
            shape = sparse_shape(heads, tokens, keys)
            for unit, exponent in zip(placement.units, placement.exponents, strict=True):
                graphs[ScoresShard(len(unit), shape.keys, own.head_dim, exponent), shape.rows] = None
    return tuple(graphs)


def score_graph_bytes(config: ModelConfig, plan: Plan, context: int) -> int:
    """Return the bytes of all graphs of scores that some pass may run, with their inputs and outputs."""
    return sum(
        graph_tensors(shard, rows, code_dtype(8)).size_bytes + shard.weight_bytes
        for shard, rows in score_graphs(config, plan, context)
    )


def score_memory(lane: Lane) -> tuple[ScoreMemory, Selection]:
    """Return the slots of a lane as the kernels take them."""
    shared, private = lane.shared, lane.private
    memory = ScoreMemory(
        *(shared[SCORE_QUERIES], shared[SCORE_KEYS], shared[SCORES]),
        *(private[SCORE_STEPS], private[SCORE_RANGES]),
    )
    return memory, Selection(private[SELECTION], private[SELECTION_COUNTS])


def _longest(plan: Plan) -> Iterator[tuple[int, int]]:
    """Yield the most tokens and keys of passes of each entry with sparse attention."""
    for entry in plan.attention:
        tokens = min(entry.lengths[1], plan.chunk_length)
        if isinstance(entry.placement, SparseAttention) and entry.lengths[0] <= tokens:
            yield tokens, entry.keys[1]
