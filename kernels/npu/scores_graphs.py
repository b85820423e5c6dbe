"""Attention scores of several heads as one NPU graph without weights: queries and keys are its inputs.

All codes are uint8 with zero point 128. An output of 16 bits would take 8 to 11 times as long (measured on
the emulator, whose codes lie within one of the exact ones).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from heterollm.kernels.npu.linear_graphs import GraphBody
from heterollm.kernels.npu.shards import ScoresShard
from heterollm.kernels.npu.tensors import KEYS, QUERIES, SCORES

__all__ = ["SCORE_ZERO", "build_scores"]

SCORE_ZERO: Final = 128
"""Code of the value 0."""


def build_scores(shard: ScoresShard, body: GraphBody) -> None:
    """Append the nodes of a scores shard from :data:`QUERIES` and :data:`KEYS` to :data:`SCORES`."""
    steps = {"query_step": shard.query_step, "key_step": shard.key_step, "score_step": shard.score_step}
    body.tensors |= {name: np.array(step, np.float32) for name, step in steps.items()}
    body.tensors["zero"] = np.array(SCORE_ZERO, np.uint8)
    body.add("DequantizeLinear", [QUERIES, "query_step", "zero"], "query_values")
    body.add("DequantizeLinear", [KEYS, "key_step", "zero"], "key_values")
    body.add("Transpose", ["key_values"], "key_columns", perm=[0, 1, 3, 2])
    body.add("MatMul", ["query_values", "key_columns"], "products")
    body.add("QuantizeLinear", ["products", "score_step", "zero"], SCORES)
