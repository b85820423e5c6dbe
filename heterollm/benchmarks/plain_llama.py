"""What other engines can be given: plain Llama models, which are the same everywhere."""

from __future__ import annotations

from typing import Final

from heterollm.base import UnsupportedModelError
from heterollm.model import ModelConfig

__all__ = ["BLOCK", "check_plain_llama"]

BLOCK: Final = 32
"""Weights that share a scale in the formats of other engines."""


def check_plain_llama(config: ModelConfig, target: str) -> None:
    """Refuse what another engine would compute otherwise: plain Llama models alone are written for it.

    Args:
        config: The model.
        target: What is written, for the message.

    Raises:
        UnsupportedModelError: The model has other features.
    """
    widths = (config.hidden_size, config.intermediate_size, config.heads * config.head_dim)
    plain = config.model_type == "llama" and config.rope.kind == "default" and not config.qkv_bias
    if not plain or config.o_bias or config.mlp_bias or any(width % BLOCK for width in widths):
        raise UnsupportedModelError(
            f"A {config.family} model with these features is not written as {target}.",
            fix="Leave the engine out, or compare a Llama model without biases and RoPE scaling.",
        )
