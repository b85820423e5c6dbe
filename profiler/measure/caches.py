"""Caches between the processors and memory, and how to empty them.

In a model that is larger than the caches every pass reads its weights from memory. A shard that is timed
repeatedly would find them in a cache, so the timed processor reads other memory before each run.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from heterollm.base import MIB
from heterollm.kernels.gpu import GpuLinear, GpuRuntime, Launch

LEAST_EVICTION_BYTES: Final = 64 * MIB
MOST_EVICTION_BYTES: Final = 512 * MIB
"""Virtual machines report the cache of the whole processor, of which they have a share."""

COLD_TOKENS: Final = 32
"""Up to so many tokens reading weights, or the KV cache, is a large part of the time."""

COLUMNS: Final = 8192


def eviction_bytes(cache_bytes: int) -> int:
    """Return how much must be read to be sure that nothing else is left in a cache of that size."""
    return min(max(2 * cache_bytes, LEAST_EVICTION_BYTES), MOST_EVICTION_BYTES)


def reading_bytes(runtime: GpuRuntime, size_bytes: int) -> int:
    """Return what :func:`reading_launch` reads when asked for ``size_bytes``."""
    rows = min(size_bytes, runtime.traits.max_buffer_bytes) // (2 * COLUMNS) // 64 * 64
    return max(64, rows) * 2 * COLUMNS


def reading_launch(runtime: GpuRuntime, size_bytes: int) -> Launch:
    """Return a launch that reads about ``size_bytes`` of memory on the GPU.

    It is a linear layer of one token with FP16 weights, which every device that runs models can run.

    Raises:
        KernelError: There is too little memory.
    """
    rows = reading_bytes(runtime, size_bytes) // (2 * COLUMNS)
    weight = np.broadcast_to(np.linspace(-1, 1, COLUMNS, dtype=np.float16), (rows, COLUMNS))
    linear = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32)
    x, y = runtime.shared((1, COLUMNS), np.float32), runtime.shared((1, rows), np.float32)
    return linear.launch(x, y, tokens=1, label="eviction")


class HostReader:
    """Reads memory on the calling thread.

    Args:
        size_bytes: How much.
    """

    def __init__(self, size_bytes: int) -> None:
        # Written once: pages that never were are all the same page.
        self._memory = np.full(size_bytes // 8, 1, np.uint64)

    def __call__(self) -> None:
        """Read it all."""
        self._memory.max()
