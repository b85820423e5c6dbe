"""The slots of attention on the NPU, and its graphs.

Graphs exist for few numbers of tokens and keys, so that a pass is padded to the next ones.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from heterollm.engine.lanes import Lane
from heterollm.engine.techniques.slots import EngineSizes, TechniqueSlots
from heterollm.kernels.npu import AttentionShard
from heterollm.kernels.operators import AttentionInputs, input_bytes
from heterollm.model import ModelConfig
from heterollm.solver import Plan, PlannedAttention, score_keys, score_tokens

ATTENTION_QUERIES, ATTENTION_KEYS = "attention_queries", "attention_keys"
ATTENTION_VALUES, ATTENTION_LIMITS = "attention_values", "attention_limits"
INPUTS = (ATTENTION_QUERIES, ATTENTION_KEYS, ATTENTION_VALUES, ATTENTION_LIMITS)


def attention_graph(config: ModelConfig, context: int, tokens: int, keys: int) -> tuple[AttentionShard, int]:
    """Return the graph of a pass, and its tokens.

    Args:
        config: The model.
        context: Positions of a session.
        tokens: Tokens of the pass.
        keys: Most keys that it sees.
    """
    own, standard = config.attention, score_keys(context)
    padded = standard[bisect.bisect_left(standard, keys)]
    return AttentionShard(own.heads, own.kv_heads, padded, own.head_dim), score_tokens(tokens)


def attention_graphs(config: ModelConfig, plan: Plan, context: int) -> tuple[tuple[AttentionShard, int], ...]:
    """Return all graphs that some pass may run, once each, with their tokens.

    Args:
        config: The model.
        plan: The plan.
        context: Positions of a session.
    """
    sizes = plan.technique(PlannedAttention).npu_graphs(context, plan.chunk_length)
    return tuple(attention_graph(config, context, tokens, keys) for tokens, keys in sizes)


def attention_inputs(lane: Lane) -> AttentionInputs:
    """Return the slots of a lane as the kernel takes them."""
    return AttentionInputs(*(lane.shared[slot] for slot in INPUTS))


class NpuAttentionSlots(TechniqueSlots):
    """The slots of attention on the NPU, which all layers share: the inputs of its graphs."""

    APART: ClassVar[tuple[str, ...]] = INPUTS

    def sizes(self, of: EngineSizes, /) -> Iterator[tuple[str, int]]:
        """Yield the inputs of all graphs, and the output of padded passes."""
        for shard, tokens in attention_graphs(of.config, of.plan, of.context):
            yield "attention_output", tokens * shard.heads * shard.head_dim * of.item_bytes
            yield from zip(INPUTS, input_bytes(shard, tokens, of.item_bytes).values(), strict=True)

    def memory(
        self, _of: EngineSizes, slots: Mapping[str, int], _given: Mapping[str, Any], /
    ) -> dict[str, int]:
        """Return the sum of the slots; the plan counts the graphs."""
        return {"inputs of attention on the NPU": sum(slots.get(slot, 0) for slot in self.APART)}
