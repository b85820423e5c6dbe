"""Memory of the OpenCL device, and memory that it shares with host and NPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from heterollm.base import PAGE_BYTES, KernelError, round_up
from heterollm.kernels.gpu.binding import cl

MemoryKind: TypeAlias = Literal["svm", "mapped", "host"]
"""Kinds of memory that host, NPU and OpenCL device share.

``svm`` is fine-grained shared virtual memory with atomics: each side sees the other's writes without a call.
``mapped`` is the host's memory, which the driver may copy: the host maps it before each access. ``host`` is
the same memory on a CPU, where both sides see it as it is.
"""

MEMORY_KINDS: Final[tuple[MemoryKind, ...]] = get_args(MemoryKind)


class DeviceMemory:
    """Memory that only kernels read and write.

    Args:
        buffer: The runtime's buffer.
        size_bytes: Its size.
    """

    __slots__ = ("__weakref__", "buffer", "size_bytes")

    def __init__(self, buffer: Any, size_bytes: int) -> None:  # noqa: ANN401 - the runtime's
        self.buffer = buffer
        self.size_bytes = size_bytes

    def require(self, size_bytes: int, what: str) -> None:
        """Refuse memory that is too small.

        Raises:
            KernelError: It has fewer bytes.
        """
        if self.size_bytes < size_bytes:
            raise KernelError(f"The {what} slot has {self.size_bytes} bytes, {size_bytes} are needed.")


class SharedArray(DeviceMemory):
    """Page-aligned memory that host, NPU and OpenCL device address.

    ``array`` is the host's view. In coherent memory both sides see each other's writes once the queue is
    finished. Elsewhere the host must :meth:`acquire` the memory before it reads or writes, and
    :meth:`release` it before the device does. Its address stays the same, because NPU graphs are bound to it:
    a map of memory that the driver allocated may return another address each time.

    Args:
        array: The host's view.
        buffer: The runtime's buffer.
        queue: The queue of the kernels, which also unmaps: kernels behind see the host's writes.
        coherent: Whether both sides see each other's writes.
        map_queue: A queue for maps, which then do not wait for kernels: the host must have waited for those
            that write the memory. None maps in the queue of the kernels, behind all of them.
    """

    __slots__ = ("_map_queue", "_mapped", "_queue", "_unmapped", "array", "coherent")

    def __init__(
        self,
        array: NDArray[Any],
        buffer: Any,  # noqa: ANN401 - the runtime's
        queue: cl.CommandQueue,
        coherent: bool,
        map_queue: cl.CommandQueue | None = None,
    ) -> None:
        super().__init__(buffer, array.nbytes)
        self.array = array
        self.coherent = coherent
        self._queue = queue
        self._map_queue = map_queue
        self._mapped: Any = None
        self._unmapped: list[Any] = []

    @property
    def queue(self) -> cl.CommandQueue:
        """The queue that maps it."""
        return self._queue

    def acquire(self, size_bytes: int | None = None) -> None:
        """Wait for the device, and let the host read and write.

        Args:
            size_bytes: First bytes to acquire; None for all. Kernels may write the others meanwhile.
        """
        self._map(cl.map_flags.READ | cl.map_flags.WRITE, size_bytes)

    def acquire_to_read(self, size_bytes: int | None = None) -> None:
        """Wait for the device, and let the host read; kernels may read at the same time."""
        self._map(cl.map_flags.READ, size_bytes)

    def release(self) -> None:
        """Make the host's writes visible to the device."""
        if self._mapped is not None:
            event = self._mapped.release(self._queue)
            self._mapped = None
            if self._map_queue is not None:
                self._unmapped = [event]

    def write(self, values: ArrayLike) -> None:
        """Replace the content; launches behind see it."""
        self.acquire()
        self.array[...] = values
        self.release()

    def read(self) -> NDArray[Any]:
        """Return a copy of the content; kernels that write it must have ended."""
        self.acquire_to_read()
        content = self.array.copy()
        self.release()
        return content

    def _map(self, flags: int, size_bytes: int | None) -> None:
        if self.coherent or self._mapped is not None:
            return
        size = self.size_bytes if size_bytes is None else size_bytes
        queue = self._queue if self._map_queue is None else self._map_queue
        view, _ = cl.enqueue_map_buffer(
            queue, self.buffer, flags, 0, (size,), np.uint8, wait_for=self._unmapped
        )
        self._mapped = view.base
        self._unmapped = []

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


def svm_zeros(context: cl.Context, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return zeroed page-aligned memory in fine-grained SVM with atomics."""
    kinds = cl.svm_mem_flags
    flags = kinds.READ_WRITE | kinds.SVM_FINE_GRAIN_BUFFER | kinds.SVM_ATOMICS

    def allocate(size_bytes: int, kind: DTypeLike) -> NDArray[np.uint8]:
        # OpenCL aligns SVM to its largest type at most, so that the alignment to pages is the caller's.
        array: NDArray[np.uint8] = cl.svm_empty(context, flags, (size_bytes,), np.dtype(kind))
        return array

    array = _aligned(shape, dtype, allocate)
    array[...] = 0
    return array


def _aligned(
    shape: tuple[int, ...], dtype: DTypeLike, make: Callable[..., NDArray[np.uint8]]
) -> NDArray[Any]:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = make(round_up(max(size, 1), PAGE_BYTES) + PAGE_BYTES, np.uint8)
    start = -raw.ctypes.data % PAGE_BYTES
    return raw[start : start + size].view(dtype).reshape(shape)
