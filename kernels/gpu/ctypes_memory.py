"""Buffers, images and shared virtual memory of the binding by ctypes."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterollm.kernels.gpu.ctypes_devices import Context
from heterollm.kernels.gpu.ctypes_handles import Handle, address_of, as_number, check, functions, query
from heterollm.kernels.gpu.opencl_library import Error as Error
from heterollm.kernels.gpu.opencl_library import Functions

ALLOCATION_FAILURE: Final = -4


mem_flags = SimpleNamespace(READ_WRITE=1, READ_ONLY=4, USE_HOST_PTR=8, COPY_HOST_PTR=32)


MEMORY_SIZE: Final = 0x1102


BUFFER_REGION: Final = 0x1220


IMAGE1D_BUFFER: Final = 0x10F6


class Buffer(Handle):
    """Device memory: new, or the memory or a copy of an array."""

    release = "clReleaseMemObject"

    def __init__(
        self, context: Context, flags: int, size: int = 0, hostbuf: NDArray[Any] | None = None
    ) -> None:
        super().__init__()
        self.size = size if hostbuf is None else hostbuf.nbytes
        self._array = hostbuf if flags & mem_flags.USE_HOST_PTR else None
        address = None if hostbuf is None else address_of(hostbuf)
        self._create("clCreateBuffer", context, flags, self.size, address)

    @classmethod
    def from_int_ptr(cls, address: int, *, retain: bool) -> Self:
        """Return the buffer at an address, whose reference it takes over."""
        assert not retain
        buffer = cls._empty(0)
        buffer.value = address
        buffer.size = as_number(query("clGetMemObjectInfo", buffer, MEMORY_SIZE))
        return buffer

    def get_sub_region(self, origin: int, size: int) -> Self:
        """Return a range of the buffer's bytes as a buffer."""
        part = self._empty(size)
        part._create("clCreateSubBuffer", self, 0, BUFFER_REGION, (ctypes.c_size_t * 2)(origin, size))  # noqa: SLF001
        return part

    @classmethod
    def _empty(cls, size: int) -> Self:
        buffer = cls.__new__(cls)
        buffer._array, buffer.size = None, size  # noqa: SLF001
        return buffer

    def get_host_array(self, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """Return the start of the host's memory that the buffer uses."""
        assert self._array is not None
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return self._array.reshape(-1).view(np.uint8)[:count].view(dtype).reshape(shape)


class ImageFormat(ctypes.Structure):
    """``cl_image_format``."""

    _fields_ = (("order", ctypes.c_uint32), ("kind", ctypes.c_uint32))


class _ImageDescription(ctypes.Structure):
    """``cl_image_desc``."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        *((name, ctypes.c_size_t) for name in ("width", "height", "depth", "images", "row_pitch", "pitch")),
        *((name, ctypes.c_uint32) for name in ("levels", "samples")),
        ("memory", ctypes.c_void_p),
    )


class Image(Handle):
    """An image of one dimension over a buffer."""

    release = "clReleaseMemObject"

    def __init__(
        self, context: Context, flags: int, texel: ImageFormat, shape: tuple[int, ...], buffer: Buffer
    ) -> None:
        super().__init__()
        self.buffer = buffer
        description = _ImageDescription(IMAGE1D_BUFFER, shape[0], memory=buffer.value)
        self._create("clCreateImage", context, flags, ctypes.byref(texel), ctypes.byref(description), None)


create_image = Image
"""Return a buffer as an image."""


class Memory:
    """Memory behind NumPy arrays: ``np.asarray`` of it is a view whose base it is."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self.address = address
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": np.dtype(dtype).str,
            "version": 3,
        }


class _SvmMemory(Memory):
    """Shared virtual memory, freed with its last view, behind all commands that may use it."""

    functions: ClassVar[Functions] = functions

    def __init__(self, context: Context, flags: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        address = functions.clSVMAlloc(context, flags, int(np.prod(shape)) * dtype.itemsize, 0)
        if not address:
            check("clSVMAlloc", ALLOCATION_FAILURE)
        super().__init__(address, shape, dtype)
        self._context, self._queues = context.int_ptr, context.queues
        functions.clRetainContext(context)

    def __del__(self) -> None:
        if hasattr(self, "_context"):
            for queue in self._queues:
                self.functions.clFinish(queue)
            self.functions.clSVMFree(self._context, self.address)
            self.functions.clReleaseContext(self._context)


def svm_empty(context: Context, flags: int, shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an array in shared virtual memory."""
    return np.asarray(_SvmMemory(context, flags, shape, np.dtype(dtype)))


class SVM:
    """Shared virtual memory as a kernel argument."""

    def __init__(self, mem: NDArray[Any]) -> None:
        self.mem = mem


class LocalMemory:
    """Memory of a work-group as a kernel argument."""

    def __init__(self, size: int) -> None:
        self.size = size
