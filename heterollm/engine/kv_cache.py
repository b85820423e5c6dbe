"""Keys and values of one session, in the GPU's memory: only its kernels read them."""

from __future__ import annotations

from heterollm.kernels.device import Device
from heterollm.kernels.gpu import DeviceMemory, KvMemory, head_stride, position_bytes, scales_start
from heterollm.model import ModelConfig


class KvCache:
    """``[layer][k|v][kv_head][position][head_dim]`` of the device's cache type, each head page-aligned.

    In 8 bits the scales of a head's positions lie behind its codes. Layers that exceed the GPU's largest
    buffer together are in several memories.
    """

    __slots__ = ("__weakref__", "_gpu", "_position_parts", "_stride_bytes", "memory")

    def __init__(self, device: Device, config: ModelConfig, context: int) -> None:
        own, dtype = config.attention, device.cache_dtype
        code_bytes = own.head_dim * dtype.itemsize
        # Where the parts of a head's positions begin, and their bytes: elements, and scales of codes.
        self._position_parts = [(0, code_bytes)]
        if scale_bytes := position_bytes(own.head_dim, dtype) - code_bytes:
            self._position_parts.append((scales_start(context, own.head_dim), scale_bytes))
        self._stride_bytes = head_stride(context, own.head_dim, dtype) * dtype.itemsize
        self._gpu = gpu = device.gpu
        layer_bytes = 2 * own.kv_heads * self._stride_bytes
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
            for start_bytes, each_bytes in self._position_parts:
                self._gpu.copy_rows(
                    target,
                    source,
                    rows=target.size_bytes // self._stride_bytes,
                    row_bytes=positions * each_bytes,
                    stride_bytes=self._stride_bytes,
                    start_bytes=start_bytes,
                )
