"""Keys and values of one session, in memory that both processors can address."""

from __future__ import annotations

from typing import Any

import numpy as np

from heterollm.kernels.gpu import GpuRuntime, SharedArray, head_stride

__all__ = ["KvCache"]


class KvCache:
    """``[layer][k|v][kv_head][position][head_dim]`` in float16 or float32, each head page-aligned."""

    __slots__ = ("__weakref__", "_heads", "capacity", "head_dim", "memory")

    def __init__(
        self,
        runtime: GpuRuntime,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        capacity: int,
        dtype: np.dtype[Any],
    ) -> None:
        self._heads = layers * 2 * kv_heads
        self.capacity = capacity
        self.head_dim = head_dim
        self.memory: SharedArray = runtime.shared(
            (self._heads * head_stride(capacity, head_dim, dtype),), dtype
        )

    @property
    def size_bytes(self) -> int:
        """Size of the memory."""
        return int(self.memory.array.nbytes)

    def copy_from(self, other: KvCache, positions: int) -> None:
        """Copy the first ``positions`` positions of a cache of the same shape."""
        used = positions * self.head_dim
        other.memory.acquire()
        self.memory.acquire()
        source = other.memory.array.reshape(self._heads, -1)
        self.memory.array.reshape(self._heads, -1)[:, :used] = source[:, :used]
        other.memory.release()
        self.memory.release()
