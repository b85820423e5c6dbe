"""Attention scores of several heads as one NPU graph without weights: queries and keys are its inputs.

All codes are uint8 with zero point 128. The steps of queries and keys are 1 here: only the product of both
over the score step matters, which is a power of two. An output of 16 bits would take 8 to 11 times as long
(measured on the emulator, which rounds products between two codes either way).
"""

from __future__ import annotations

import numpy as np

from heterollm.kernels.formats import zero_code
from heterollm.kernels.npu.linear_graphs import GraphBody
from heterollm.kernels.npu.shards import ScoresShard
from heterollm.kernels.npu.tensors import KEYS, QUERIES, SCORES


def build_scores(shard: ScoresShard, body: GraphBody) -> None:
    """Append the nodes of a scores shard from :data:`QUERIES` and :data:`KEYS` to :data:`SCORES`."""
    steps = {"one": 1.0, "score_step": 2.0**shard.exponent}
    body.tensors |= {name: np.array(step, np.float32) for name, step in steps.items()}
    body.tensors["zero"] = np.array(zero_code(8), np.uint8)
    body.add("DequantizeLinear", [QUERIES, "one", "zero"], "query_values")
    body.add("DequantizeLinear", [KEYS, "one", "zero"], "key_values")
    body.add("Transpose", ["key_values"], "key_columns", perm=[0, 1, 3, 2])
    body.add("MatMul", ["query_values", "key_columns"], "products")
    body.add("QuantizeLinear", ["products", "score_step", "zero"], SCORES)
