"""Attention scores of an NPU graph on random codes beside the exact ones, for the doctor and the tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.npu import NpuBackend, ScoresShard

__all__ = ["ScoresCase"]


@dataclass(frozen=True, slots=True)
class ScoresCase:
    """Scores of several heads.

    Args:
        heads: Heads of the graph.
        tokens: Queries of each head.
        keys: Keys of each head.
        head_dim: Elements of a query and of a key.
        range_fraction: Largest score that has a code of its own, over the largest one; others saturate.
        seed: Of the random codes.
    """

    heads: int
    tokens: int
    keys: int
    head_dim: int
    range_fraction: float = 0.8
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
        queries, keys = (codes.astype(np.int64) - 128 for codes in inputs.values())
        products = queries @ keys.swapaxes(1, 2)
        query_step, key_step = 0.011, 0.017
        largest = float(np.abs(products).max()) * query_step * key_step
        score_step = self.range_fraction * largest / 127
        shard = ScoresShard(self.heads, self.keys, self.head_dim, query_step, key_step, score_step)
        exact = np.rint(products * (query_step * key_step / score_step)).astype(np.int64)
        return shard, inputs, np.clip(exact, -128, 127) + 128

    def on_npu(self, npu: NpuBackend) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the codes that an NPU computes, and the exact ones."""
        shard, inputs, exact = self.data()
        scores = np.zeros(exact.shape, np.uint8)
        npu.prepare(shard, self.tokens).bind(inputs, {"scores": scores})()
        return scores, exact
