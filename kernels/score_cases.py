"""Attention scores of an NPU graph on random codes beside the exact ones, for the doctor and the tests."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.formats import largest_code, zero_code
from heterollm.kernels.npu import NpuBackend, ScoresShard


@dataclass(frozen=True, slots=True)
class ScoresCase:
    """Scores of several heads.

    Args:
        heads: Key heads of the graph.
        tokens: Queries of each head.
        keys: Keys of each head.
        head_dim: Elements of a query and of a key.
        seed: Of the random codes.
    """

    heads: int
    tokens: int
    keys: int
    head_dim: int
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.heads} head{'s' * (self.heads > 1)}, {self.tokens} tokens, {self.keys} keys"

    def data(self) -> tuple[ScoresShard, dict[str, NDArray[np.uint8]], NDArray[np.int64]]:
        """Return the shard, the codes of queries and keys, and the exact codes ``[heads, tokens, keys]``."""
        generator = np.random.default_rng(self.seed)
        inputs = {
            name: generator.integers(0, 256, (self.heads, count, self.head_dim), np.uint8)
            for name, count in (("queries", self.tokens), ("keys", self.keys))
        }
        queries, keys = (codes.astype(np.int64) - zero_code(8) for codes in inputs.values())
        products = queries @ keys.swapaxes(1, 2)
        # The largest scores saturate.
        exponent = math.frexp(float(np.abs(products).max()) / largest_code(8))[1] - 1
        shard = ScoresShard(self.heads, self.keys, self.head_dim, max(exponent, 0))
        exact = np.rint(products * 2.0**-shard.exponent).astype(np.int64)
        zero = zero_code(8)
        return shard, inputs, np.clip(exact, -zero, largest_code(8)) + zero

    def on_npu(self, npu: NpuBackend) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the codes that an NPU computes, and the exact ones."""
        shard, inputs, exact = self.data()
        scores = np.zeros(exact.shape, np.uint8)
        npu.prepare(shard, self.tokens).bind(inputs, {"scores": scores})()
        return scores, exact
