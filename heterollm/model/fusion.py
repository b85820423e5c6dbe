"""Layers whose groups one NPU graph can have together with what lies between them."""

from __future__ import annotations

import itertools

from heterollm.kernels.ops import Group
from heterollm.model.attention_blocks import AttentionBlock
from heterollm.model.block import Norm
from heterollm.model.blocks import FfnBlock
from heterollm.model.config import ModelConfig
from heterollm.model.layers import LayerStage


def fusion_obstacle(config: ModelConfig, layer: int) -> str:
    """Return what keeps a layer's fused groups from being one NPU graph each, in words; empty for nothing.

    The graphs have RMS norms of the residual stream and plain sums with it. What follows q, k and v, and what
    lies between attention and ``o``, stays on the GPU and may be anything.

    Args:
        config: The model.
        layer: Decoder layer.
    """
    own = config.per_layer[layer]
    stages = [stage for stage in own.stages if any(block.GROUPS for block in stage.blocks)]
    pairs = itertools.pairwise(stages)
    found = next((two for two in pairs if _is(two[0], AttentionBlock) and _is(two[1], FfnBlock)), None)
    if found is None:
        return "no network of its own follows its attention"
    attention, network = (stage.blocks[0] for stage in found)
    assert isinstance(attention, AttentionBlock)
    assert isinstance(network, FfnBlock)
    obstacles = {
        "its norms are no RMS norms": config.centered_norms or config.norm_biases,
        "it has several residual streams": own.streams is not None,
        "outputs have norms of their own": any(stage.output_norm or stage.own_norms for stage in found),
        "a block reads the stream without a norm": any(stage.norm is None for stage in found),
        "the stream is multiplied between o and the network": found[0].gain != 1.0,
        "o has a bias": attention.o_bias,
        "the network has a gate of tokens": network.token_gated,
    }
    return next((words for words, holds in obstacles.items() if holds), "")


def norm_before(config: ModelConfig, layer: int, group: Group) -> Norm:
    """Return the norm before the block that has a group, of a layer without :func:`fusion_obstacle`."""
    stages = config.per_layer[layer].stages
    norm = next(one.norm for one in stages if any(group in block.GROUPS for block in one.blocks))
    assert norm is not None
    return norm


def _is(stage: LayerStage, kind: type[AttentionBlock | FfnBlock]) -> bool:
    return len(stage.blocks) == 1 and type(stage.blocks[0]) is kind
