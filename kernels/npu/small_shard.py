"""A small linear layer with random 4-bit weights, by which self-tests run graphs."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.formats import QuantizedTensor
from heterollm.kernels.npu.shards import LinearShard

BLOCK = 32


def small_shard(name: str, rows: int = 64, columns: int = 256) -> LinearShard:
    """Return the layer; equal names and sizes have equal weights."""
    generator = np.random.default_rng(0)
    weight = QuantizedTensor(
        generator.integers(0, 256, (rows, columns // BLOCK, BLOCK // 2), np.uint8),
        generator.uniform(0.01, 0.02, (rows, columns // BLOCK)).astype(np.float16),
        None,
        4,
        BLOCK,
    )
    return LinearShard(weight, 0, name, ((0, rows),), name)


def exact_product(shard: LinearShard, x: NDArray[Any]) -> NDArray[np.float64]:
    """Return the layer's output in float64."""
    assert isinstance(shard.weight, QuantizedTensor)
    return x.astype(np.float64) @ shard.weight.dequantize().astype(np.float64).T
