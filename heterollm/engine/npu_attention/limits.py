"""The layers whose attention the NPU's graphs can compute."""

from __future__ import annotations

from heterollm.base import PlanError
from heterollm.model import AttentionBlock, LatentAttentionBlock, ModelConfig
from heterollm.solver import NpuAttention, Plan, PlannedAttention


def attention_obstacle(config: ModelConfig, layer: int) -> str:
    """Return why the NPU cannot attend in a layer, in words about it; empty if it can.

    Windows are no obstacle while they hold all keys: a graph computes every key, so that with more the GPU,
    which skips those before a window, is the better place.
    """
    block = config.blocks(AttentionBlock).get(layer)
    if block is None:
        return "has no attention"
    if isinstance(block, LatentAttentionBlock):
        return "has heads that share latent vectors"
    if not config.has_alike_heads:
        return "has other heads than other layers, or their keys"
    if block.sinks:
        return "has sinks, which the graph lacks"
    if block.soft_cap:
        return "caps its scores, which loses precision in float16"
    return "attends to chunks of positions" if block.chunked else ""


def keys_limit(config: ModelConfig, layer: int) -> int | None:
    """Return the most keys of a session for which the NPU can attend in a layer; None for any."""
    return config.blocks(AttentionBlock)[layer].window or None


def check_attention(config: ModelConfig, plan: Plan) -> None:
    """Refuse attention on the NPU of layers that its graphs cannot compute.

    Raises:
        PlanError: There is such a layer; the message names it.
    """
    last = max(config.blocks(AttentionBlock), default=-1)
    for entry in plan.technique(PlannedAttention).entries:
        if not isinstance(entry.placement, NpuAttention):
            continue
        for layer in range(entry.layers[0], min(entry.layers[1], last) + 1):
            reason = attention_obstacle(config, layer)
            if not reason and entry.keys[1] > (keys_limit(config, layer) or entry.keys[1]):
                reason = f"has a window of {keys_limit(config, layer)} positions"
            if reason:
                raise PlanError(
                    f"The plan has attention of layer {layer} on the NPU in sessions of {entry.keys[0]} to "
                    f"{entry.keys[1]} tokens, and the layer {reason}.",
                    fix="Take the layer or these lengths out of the plan's attention: the GPU attends there.",
                )
