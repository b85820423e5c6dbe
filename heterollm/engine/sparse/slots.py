"""The slots of sparse attention, and the sizes of its passes.

Graphs of scores exist for few numbers of tokens and keys, so that a pass is padded to the next ones.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from heterollm.engine.lanes import Lane
from heterollm.engine.techniques.slots import EngineSizes, TechniqueSlots
from heterollm.kernels.formats import code_dtype
from heterollm.kernels.gpu import HeadShape, ScoreMemory, Selection, SparseShape, code_bytes
from heterollm.kernels.npu import ScoresShard, graph_tensors
from heterollm.model import AttentionBlock, ModelConfig
from heterollm.solver import Plan, PlannedAttention, SparseAttention, score_keys, score_tokens

SCORE_QUERIES, SCORE_KEYS, SCORES = "score_queries", "score_keys", "scores"
SCORE_STEPS, SCORE_RANGES = "score_steps", "score_ranges"
SELECTION, SELECTION_COUNTS = "selection", "selection_counts"


def sparse_shape(heads: HeadShape, tokens: int, keys: int) -> SparseShape:
    """Return the sizes of a pass, padded to those of graphs.

    Args:
        heads: Sizes of the heads.
        tokens: Tokens of the pass.
        keys: Most keys that it sees.
    """
    standard = score_keys(heads.capacity)
    return SparseShape(heads, score_tokens(tokens), standard[bisect.bisect_left(standard, keys)])


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
    for entry in plan.technique(PlannedAttention).entries:
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
    for entry in plan.technique(PlannedAttention).entries:
        tokens = min(entry.lengths[1], plan.chunk_length)
        if isinstance(entry.placement, SparseAttention) and entry.lengths[0] <= tokens:
            yield tokens, entry.keys[1]


class SparseSlots(TechniqueSlots):
    """The slots of sparse attention, which all layers share: codes, estimated scores, selected positions."""

    PRIVATE: ClassVar[tuple[str, ...]] = (SCORE_STEPS, SCORE_RANGES, SELECTION, SELECTION_COUNTS)
    APART: ClassVar[tuple[str, ...]] = (SCORE_QUERIES, SCORE_KEYS, SCORES, *PRIVATE)

    def sizes(self, of: EngineSizes, /) -> Iterator[tuple[str, int]]:
        """Yield what entries of a plan need, and slots of the core for padded passes."""
        config, plan = of.config, of.plan
        widest = max(block.heads * block.head_dim for block in config.blocks(AttentionBlock).values())
        for tokens in {score_tokens(tokens) for tokens, _ in _longest(plan)}:
            yield "query", tokens * widest * 4
            yield "attention_output", tokens * widest * of.item_bytes
            for spec in of.specs:
                if spec.integer_inputs and spec.group != "head":
                    codes, blocks = code_bytes(tokens, spec.columns, spec.weight.block)
                    yield f"{spec.source}_codes", codes
                    yield f"{spec.source}_blocks", blocks
        own = config.attention
        heads = HeadShape(own.heads, own.kv_heads, own.head_dim, of.context)
        for tokens, keys in _longest(plan):
            shape = sparse_shape(heads, tokens, min(keys, of.context))
            yield SCORE_QUERIES, shape.query_bytes
            yield SCORE_KEYS, shape.key_bytes
            yield SCORES, shape.score_bytes
            yield SCORE_STEPS, 4 * heads.heads
            yield SCORE_RANGES, 4 * heads.kv_heads * shape.runs
            yield SELECTION, shape.position_bytes
            yield SELECTION_COUNTS, 4 * heads.heads * shape.blocks

    def memory(
        self, _of: EngineSizes, slots: Mapping[str, int], _given: Mapping[str, Any], /
    ) -> dict[str, int]:
        """Return the sum of the slots."""
        return {"scores of attention": sum(slots.get(slot, 0) for slot in self.APART)}

    def graph_bytes(self, of: EngineSizes, /) -> int:
        """Return the bytes of all graphs of scores that some pass may run."""
        return sum(
            graph_tensors(shard, rows, code_dtype(8)).size_bytes + shard.weight_bytes
            for shard, rows in score_graphs(of.config, of.plan, of.context)
        )
