"""Memory that host, NPU and OpenCL device share without copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterollm.base import PAGE_BYTES, KernelError, round_up
from heterollm.kernels.gpu.binding import cl

__all__ = ["SharedArray", "aligned_empty", "aligned_zeros"]


class SharedArray:
    """Page-aligned memory that host, NPU and OpenCL device address.

    ``array`` is the host's view. On a coherent device (a CPU) both sides see each other's writes once the
    queue is finished. Elsewhere the host must :meth:`acquire` the memory before it reads or writes, and
    :meth:`release` it before the device does.
    """

    __slots__ = ("_mapped", "_queue", "array", "buffer", "coherent")

    def __init__(
        self, array: NDArray[Any], buffer: cl.Buffer, queue: cl.CommandQueue, coherent: bool
    ) -> None:
        self.array = array
        self.buffer = buffer
        self.coherent = coherent
        self._queue = queue
        self._mapped: Any = None

    def acquire(self) -> None:
        """Wait for the device, and let the host read and write."""
        self._map(cl.map_flags.READ | cl.map_flags.WRITE)

    def acquire_to_read(self) -> None:
        """Wait for the device, and let the host read; kernels may read at the same time."""
        self._map(cl.map_flags.READ)

    def release(self) -> None:
        """Make the host's writes visible to the device."""
        if self._mapped is not None:
            self._mapped.release(self._queue)
            self._mapped = None

    def _map(self, flags: int) -> None:
        if self.coherent or self._mapped is not None:
            return
        view, _ = cl.enqueue_map_buffer(
            self._queue, self.buffer, flags, 0, self.array.shape, self.array.dtype
        )
        self._mapped = view.base

    def require(self, size_bytes: int, what: str) -> None:
        """Refuse a slot that is too small.

        Raises:
            KernelError: It has fewer bytes.
        """
        if self.array.nbytes < size_bytes:
            raise KernelError(f"The {what} slot has {self.array.nbytes} bytes, {size_bytes} are needed.")

    def view(self, dtype: DTypeLike, shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the start of the memory as an array of another type and shape."""
        count = int(np.prod(shape))
        flat = self.array.reshape(-1).view(np.uint8)
        size = count * np.dtype(dtype).itemsize
        if size > flat.nbytes:
            raise KernelError(f"A view of {shape} {np.dtype(dtype)} exceeds a slot of {flat.nbytes} bytes.")
        return flat[:size].view(dtype).reshape(shape)


def aligned_empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return uninitialised page-aligned memory, padded to whole pages."""
    return _aligned(shape, dtype, np.empty)


def aligned_zeros(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return zeroed page-aligned memory, padded to whole pages; unused pages take no memory."""
    return _aligned(shape, dtype, np.zeros)


def _aligned(
    shape: tuple[int, ...], dtype: DTypeLike, make: Callable[..., NDArray[np.uint8]]
) -> NDArray[Any]:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = make(round_up(max(size, 1), PAGE_BYTES) + PAGE_BYTES, np.uint8)
    start = -raw.ctypes.data % PAGE_BYTES
    return raw[start : start + size].view(dtype).reshape(shape)
