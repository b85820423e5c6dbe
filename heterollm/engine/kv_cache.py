"""Keys and values of one session, in the GPU's memory: only its kernels read them."""

from __future__ import annotations

from heterollm.kernels.device import Device
from heterollm.kernels.gpu import DeviceMemory, KvMemory, head_stride
from heterollm.model import ModelConfig

__all__ = ["KvCache"]


class KvCache:
    """``[layer][k|v][kv_head][position][head_dim]`` of the device's cache type, each head page-aligned.

    Layers that exceed the GPU's largest buffer together are in several memories.
    """

    __slots__ = ("__weakref__", "_gpu", "_position_bytes", "_stride_bytes", "memory")

    def __init__(self, device: Device, config: ModelConfig, context: int) -> None:
        item = device.cache_dtype.itemsize
        self._position_bytes = config.head_dim * item
        self._stride_bytes = head_stride(context, config.head_dim, device.cache_dtype) * item
        self._gpu = gpu = device.gpu
        layer_bytes = 2 * config.kv_heads * self._stride_bytes
        each = min(config.layers, max(1, gpu.traits.max_buffer_bytes // layer_bytes))
        sizes = [min(each, config.layers - first) * layer_bytes for first in range(0, config.layers, each)]
        self.memory = KvMemory(tuple(DeviceMemory(gpu.scratch(size), size) for size in sizes), each)

    @property
    def size_bytes(self) -> int:
        """Size of all memories."""
        return sum(memory.size_bytes for memory in self.memory.memories)

    def stand_in(self) -> KvMemory:
        """Return memory of no use, to bind to kernels in place of this cache's."""
        memories = tuple(DeviceMemory(self._gpu.scratch(1), 1) for _ in self.memory.memories)
        return KvMemory(memories, self.memory.layers_each)

    def copy_from(self, other: KvCache, positions: int) -> None:
        """Copy the first ``positions`` positions of a cache of the same shape."""
        for target, source in zip(self.memory.memories, other.memory.memories, strict=True):
            self._gpu.copy_rows(
                target,
                source,
                rows=target.size_bytes // self._stride_bytes,
                row_bytes=positions * self._position_bytes,
                stride_bytes=self._stride_bytes,
            )
