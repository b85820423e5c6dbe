"""Keys and values of one session, in memory that both processors can address."""

from __future__ import annotations

from heterollm.kernels.device import Device
from heterollm.kernels.gpu import SharedArray, head_stride
from heterollm.model import ModelConfig

__all__ = ["KvCache"]


class KvCache:
    """``[layer][k|v][kv_head][position][head_dim]`` of the device's cache type, each head page-aligned."""

    __slots__ = ("__weakref__", "_head_dim", "_heads", "memory")

    def __init__(self, device: Device, config: ModelConfig, context: int) -> None:
        self._heads = config.layers * 2 * config.kv_heads
        self._head_dim = config.head_dim
        stride = head_stride(context, config.head_dim, device.cache_dtype)
        self.memory: SharedArray = device.gpu.shared((self._heads * stride,), device.cache_dtype)

    def copy_from(self, other: KvCache, positions: int) -> None:
        """Copy the first ``positions`` positions of a cache of the same shape."""
        used = positions * self._head_dim
        other.memory.acquire()
        self.memory.acquire()
        source = other.memory.array.reshape(self._heads, -1)
        self.memory.array.reshape(self._heads, -1)[:, :used] = source[:, :used]
        other.memory.release()
        self.memory.release()
