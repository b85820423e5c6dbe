"""Memory that another processor's driver allocated, imported into OpenCL once, and slots in it."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from heterollm.base import KernelError
from heterollm.kernels.gpu.binding import OpenClError, cl, opencl_library
from heterollm.kernels.gpu.memory import SharedArray

if TYPE_CHECKING:
    from heterollm.kernels.gpu.runtime import OpenClRuntime

EXT_HOST_PTR: Final = 1 << 29
"""CL_MEM_EXT_HOST_PTR_QCOM of cl_qcom_ext_host_ptr."""

HOST_PTR_TYPES: Final = {"cl_qcom_dmabuf_host_ptr": 0x411D, "cl_qcom_ion_host_ptr": 0x40A8}
"""Types of external host memory. Drivers have taken the first one without naming it."""

POLICIES: Final = {"cl_qcom_ext_host_ptr_iocoherent": 0x40A9, "cl_qcom_ext_host_ptr": 0x40A5}
"""Policies of cached memory: I/O-coherent, whose maps clean no caches, and write-back."""

DMA_BUF: Final = "cl_khr_external_memory_dma_buf"
DMA_BUF_HANDLE: Final = 0x2067
ACQUIRE: Final = b"clEnqueueAcquireExternalMemObjectsKHR"


class Pages(Protocol):
    """Page-aligned memory with a file descriptor; ``np.asarray`` of it is a view that keeps it."""

    address: int
    size_bytes: int
    descriptor: int


class _HostPointer(ctypes.Structure):
    """``cl_mem_dmabuf_host_ptr``, which ``cl_mem_ion_host_ptr`` equals."""

    _fields_ = (
        ("kind", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("descriptor", ctypes.c_int),
        ("address", ctypes.c_void_p),
    )


class ImportedMemory:
    """External memory as one buffer of a device.

    Args:
        runtime: The device.
        pages: The memory, longer than what slots use by :func:`import_padding_bytes`.

    Attributes:
        source: The extension that imported it.

    Raises:
        KernelError: No extension of the device imports it; the message has the driver's answers.
    """

    def __init__(self, runtime: OpenClRuntime, pages: Pages) -> None:
        self._runtime = runtime
        self._array = np.asarray(pages)
        size_bytes = pages.size_bytes - import_padding_bytes(runtime)
        refusals = []
        for source, make in _ways(runtime, pages, size_bytes):
            try:
                self._buffer = make()
            except OpenClError as error:
                refusals.append(f"{source}: {error}")
            else:
                self.source = source
                return
        reason = "; ".join(refusals) or "no extension for external memory"
        raise KernelError(f"{runtime.traits.name!r} does not import the NPU's memory ({reason}).")

    def slot(self, offset_bytes: int, size_bytes: int, *, coherent: bool = False) -> SharedArray:
        """Return a range of bytes; its offset must be a multiple of a page. Slots may overlap.

        Args:
            offset_bytes: Where it begins.
            size_bytes: Its size.
            coherent: Whether a test has seen that it needs no maps. The extensions want a map around each
                access of the host, even where the driver then cleans no caches.

        Raises:
            KernelError: The driver refuses.
        """
        try:
            own = self._buffer.get_sub_region(offset_bytes, size_bytes)
        except OpenClError as error:
            raise KernelError(f"The driver makes no slot at {offset_bytes} bytes: {error}.") from error
        array = self._array[offset_bytes : offset_bytes + size_bytes]
        return SharedArray(array, own, self._runtime.queue, coherent, self._runtime.map_queue)


def import_padding_bytes(runtime: OpenClRuntime) -> int:
    """Return the bytes that an imported allocation must be longer than its buffer."""
    if "cl_qcom_ext_host_ptr" not in runtime.traits.extensions:
        return 0
    return int(runtime.queue.device.ext_mem_padding_in_bytes_qcom)


def _ways(runtime: OpenClRuntime, pages: Pages, size_bytes: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield extensions that may import memory, each with the call that does."""
    offered = runtime.traits.extensions
    if "cl_qcom_ext_host_ptr" in offered:
        for name, kind in HOST_PTR_TYPES.items():
            for policy, value in POLICIES.items():
                if policy in offered:
                    given = _HostPointer(kind, value, pages.descriptor, pages.address)
                    how = "I/O-coherent" if policy.endswith("iocoherent") else "write-back"
                    yield f"{name}, {how}", functools.partial(_by_host_pointer, runtime, given, size_bytes)
    if DMA_BUF in offered:
        yield DMA_BUF, functools.partial(_by_descriptor, runtime, pages.descriptor, size_bytes)


def _by_host_pointer(runtime: OpenClRuntime, given: _HostPointer, size_bytes: int) -> cl.Buffer:
    # Both bindings pass the address of an array and its size: the array begins with the structure.
    host = np.zeros(size_bytes, np.uint8)
    host[: ctypes.sizeof(given)] = np.frombuffer(bytes(given), np.uint8)
    flags = cl.mem_flags.READ_WRITE | cl.mem_flags.USE_HOST_PTR | EXT_HOST_PTR
    return cl.Buffer(runtime.context, flags, hostbuf=host)


def _by_descriptor(runtime: OpenClRuntime, descriptor: int, size_bytes: int) -> cl.Buffer:
    """Import a dma-buf by Khronos' extension, and acquire it for good."""
    context, queue, platform = (
        ctypes.c_void_p(own.int_ptr)
        for own in (runtime.context, runtime.queue, runtime.queue.device.platform)
    )
    status, properties = ctypes.c_int32(), (ctypes.c_uint64 * 3)(DMA_BUF_HANDLE, descriptor, 0)
    flags, size = ctypes.c_uint64(cl.mem_flags.READ_WRITE), ctypes.c_size_t(size_bytes)
    create = _pointer_function("clCreateBufferWithProperties")
    address = create(context, properties, flags, size, None, ctypes.byref(status))
    if not address:
        raise OpenClError(f"clCreateBufferWithProperties failed: status {status.value}")
    buffer = cl.Buffer.from_int_ptr(address, retain=False)
    found = _pointer_function("clGetExtensionFunctionAddressForPlatform")(platform, ACQUIRE)
    if not found:
        raise OpenClError("the driver has no clEnqueueAcquireExternalMemObjectsKHR")
    memories, count = (ctypes.c_void_p * 1)(address), ctypes.c_uint32
    acquire = ctypes.CFUNCTYPE(ctypes.c_int32)(found)
    if failed := acquire(queue, count(1), memories, count(0), None, None):
        raise OpenClError(f"clEnqueueAcquireExternalMemObjectsKHR failed: status {failed}")
    return buffer


def _pointer_function(name: str) -> Any:  # noqa: ANN401 - a function of ctypes
    """Return a function of the library that returns an address."""
    try:
        function = getattr(opencl_library(), name)
    except AttributeError as error:
        raise OpenClError(f"the OpenCL library has no {name}") from error
    function.restype = ctypes.c_void_p
    return function
