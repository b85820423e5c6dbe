"""A binding of OpenCL by ctypes, where pyopencl has no wheel: the names of pyopencl that this room uses.

Classes, functions and arguments mean what they mean in pyopencl. An object is its own handle, and releases it
when it is collected. Like OpenCL, kernels do not keep their arguments alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterollm.kernels.gpu.ctypes_devices import CommandQueue as CommandQueue
from heterollm.kernels.gpu.ctypes_devices import Context as Context
from heterollm.kernels.gpu.ctypes_devices import Device as Device
from heterollm.kernels.gpu.ctypes_devices import Platform as Platform
from heterollm.kernels.gpu.ctypes_devices import device_type as device_type
from heterollm.kernels.gpu.ctypes_devices import get_platforms as get_platforms
from heterollm.kernels.gpu.ctypes_handles import (
    Handle,
    address_of,
    as_number,
    as_pointers,
    as_text,
    check,
    handle_array,
    query,
)
from heterollm.kernels.gpu.ctypes_handles import functions as functions
from heterollm.kernels.gpu.ctypes_memory import SVM as SVM
from heterollm.kernels.gpu.ctypes_memory import Buffer as Buffer
from heterollm.kernels.gpu.ctypes_memory import Image as Image
from heterollm.kernels.gpu.ctypes_memory import ImageFormat as ImageFormat
from heterollm.kernels.gpu.ctypes_memory import LocalMemory as LocalMemory
from heterollm.kernels.gpu.ctypes_memory import Memory
from heterollm.kernels.gpu.ctypes_memory import create_image as create_image
from heterollm.kernels.gpu.ctypes_memory import mem_flags as mem_flags
from heterollm.kernels.gpu.ctypes_memory import svm_empty as svm_empty
from heterollm.kernels.gpu.opencl_library import Error as Error

device_svm_capabilities = SimpleNamespace(FINE_GRAIN_BUFFER=2, ATOMICS=8)
command_queue_properties = SimpleNamespace(PROFILING_ENABLE=2)
command_execution_status = SimpleNamespace(COMPLETE=0)
svm_mem_flags = SimpleNamespace(READ_WRITE=1, SVM_FINE_GRAIN_BUFFER=1 << 10, SVM_ATOMICS=1 << 11)
map_flags = SimpleNamespace(READ=1, WRITE=2)
channel_order = SimpleNamespace(R=0x10B0)
channel_type = SimpleNamespace(UNSIGNED_INT32=0x10DC)
program_info = SimpleNamespace(BINARIES=0x1166)
kernel_arg_info = SimpleNamespace(ADDRESS_QUALIFIER=0x1196, TYPE_QUALIFIER=0x1199)
kernel_arg_address_qualifier = SimpleNamespace(GLOBAL=0x119B)
kernel_arg_type_qualifier = SimpleNamespace(CONST=1)

PROGRAM_BINARY_SIZES: Final = 0x1165
PROGRAM_BUILD_LOG: Final = 0x1183
KERNEL_NUM_ARGS: Final = 0x1191
EVENT_STATUS: Final = ctypes.c_uint32(0x11D3)
STATUS_SIZE: Final = ctypes.c_size_t(4)
NO_EVENTS: Final = ctypes.c_uint32(0)
EVENT_TIMES: Final = {"queued": 0x1280, "submit": 0x1281, "start": 0x1282, "end": 0x1283}


class CompilerWarning(UserWarning):
    """The warning of pyopencl about a compiler's log; this binding gives none."""


class Program(Handle):
    """A program, of its source or of binaries of devices."""

    release = "clReleaseProgram"

    def __init__(
        self, context: Context, source_or_devices: str | Sequence[Device], binaries: Sequence[bytes] = ()
    ) -> None:
        super().__init__()
        self.devices = context.devices
        if isinstance(source_or_devices, str):
            source = source_or_devices.encode()
            text, size = ctypes.c_char_p(source), ctypes.c_size_t(len(source))
            self._create("clCreateProgramWithSource", context, 1, ctypes.byref(text), ctypes.byref(size))
        else:
            count = len(binaries)
            sizes = (ctypes.c_size_t * count)(*map(len, binaries))
            texts = (ctypes.c_char_p * count)(*binaries)
            devices = handle_array(source_or_devices)
            self._create("clCreateProgramWithBinary", context, count, devices, sizes, texts, None)

    def build(self, options: Sequence[str] = (), *, cache_dir: bool = False) -> Program:
        """Compile the program for all devices of its context."""
        assert not cache_dir
        text = " ".join(options).encode()
        count = len(self.devices)
        status = functions.clBuildProgram(self, count, handle_array(self.devices), text, None, None)
        check(
            "clBuildProgram", status, "".join(f"\n{self._log(device)}" for device in self.devices if status)
        )
        return self

    def _log(self, device: Device) -> str:
        try:
            return as_text(query("clGetProgramBuildInfo", self, device, PROGRAM_BUILD_LOG))
        except Error as error:
            return str(error)

    def get_info(self, name: int) -> list[bytes]:
        """Return the binaries of all devices; ``name`` is BINARIES."""
        sizes = as_pointers(query("clGetProgramInfo", self, PROGRAM_BINARY_SIZES))
        texts = [ctypes.create_string_buffer(max(1, size)) for size in sizes]
        places = (ctypes.c_void_p * len(sizes))(*map(ctypes.addressof, texts))
        status = functions.clGetProgramInfo(self, name, ctypes.sizeof(places), places, None)
        check("clGetProgramInfo", status)
        return [text.raw[:size] for text, size in zip(texts, sizes, strict=True)]


class Kernel(Handle):
    """A kernel of a built program, with its arguments."""

    release = "clReleaseKernel"

    def __init__(self, program: Program, name: str) -> None:
        super().__init__()
        self.program = program
        self.function_name = name
        self._create("clCreateKernel", program, name.encode())
        self.num_args = as_number(query("clGetKernelInfo", self, KERNEL_NUM_ARGS))
        self.place: object = None
        self.range: tuple[Any, ...] = ()

    def set_args(self, *arguments: Any) -> None:  # noqa: ANN401 - as in pyopencl
        """Set all arguments: memory, NumPy scalars, local memory, or None for a null pointer.

        Raises:
            TypeError: There are too few or too many, or one is none of these.
        """
        if len(arguments) != self.num_args:
            raise TypeError(f"{self.function_name} takes {self.num_args} arguments, not {len(arguments)}")
        for index, argument in enumerate(arguments):
            if isinstance(argument, SVM):
                status = functions.clSetKernelArgSVMPointer(self, index, address_of(argument.mem))
            else:
                status = functions.clSetKernelArg(self, index, *_size_and_value(argument))
            check(f"clSetKernelArg {index} of {self.function_name}", status)

    def get_arg_info(self, index: int, name: int) -> int:
        """Return a qualifier of an argument."""
        return as_number(query("clGetKernelArgInfo", self, index, name))


def _size_and_value(argument: Any) -> tuple[int, Any]:  # noqa: ANN401
    if isinstance(argument, np.generic):
        return argument.nbytes, argument.tobytes()
    if isinstance(argument, (Buffer, Image)):
        return ctypes.sizeof(argument), ctypes.byref(argument)
    if argument is None:
        return ctypes.sizeof(ctypes.c_void_p), ctypes.byref(ctypes.c_void_p())
    if isinstance(argument, LocalMemory):
        return argument.size, None
    raise TypeError(f"{type(argument).__name__} is no kernel argument")


class Event(Handle):
    """The event of a command, which the driver fills in."""

    def __del__(self) -> None:
        # Each launch makes an event: this is the quick way.
        if self.value:
            self.functions.clReleaseEvent(self)

    @property
    def command_execution_status(self) -> int:
        """The status: 0 if complete, negative if failed."""
        status = ctypes.c_int32()
        check(
            "clGetEventInfo",
            functions.clGetEventInfo(self, EVENT_STATUS, STATUS_SIZE, ctypes.byref(status), None),
        )
        return status.value

    @property
    def profile(self) -> SimpleNamespace:
        """The times queued, submit, start and end in nanoseconds of the device."""
        return SimpleNamespace(
            **{
                name: as_number(query("clGetEventProfilingInfo", self, code))
                for name, code in EVENT_TIMES.items()
            }
        )

    def wait(self) -> None:
        """Block until the command is done."""
        check("clWaitForEvents", functions.clWaitForEvents(1, ctypes.byref(self)))


class MemoryMap(Memory):
    """A mapped range of a buffer, unmapped by :meth:`release` or when it is collected."""

    def __init__(
        self, queue: CommandQueue, buffer: Buffer, address: int, size: int, dtype: DTypeLike
    ) -> None:
        super().__init__(address, (size,), dtype)
        self._queue = queue
        self._buffer: Buffer | None = buffer

    def release(self, queue: CommandQueue | None = None) -> Event | None:
        """Unmap the range in a queue, else in that of the map."""
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return None
        event, queue = Event(), queue or self._queue
        unmap = functions.clEnqueueUnmapMemObject
        check("clEnqueueUnmapMemObject", unmap(queue, buffer, self.address, 0, None, ctypes.byref(event)))
        return event

    def __del__(self) -> None:
        if self._queue.value and self._buffer and self._buffer.value:
            self.release()


def enqueue_nd_range_kernel(
    queue: CommandQueue, kernel: Kernel, global_size: tuple[int, ...], local_size: tuple[int, ...]
) -> Event:
    """Enqueue a kernel; returns its event. A kernel keeps the arguments of this call for the next."""
    place = queue, global_size, local_size
    if kernel.place != place:
        size = ctypes.c_size_t * len(global_size)
        kernel.place = place
        # Plain addresses: the kernel in its own tuple would be a cycle.
        kernel.range = (
            *(ctypes.c_void_p(queue.value), ctypes.c_void_p(kernel.value), ctypes.c_uint32(len(global_size))),
            *(None, size(*global_size), size(*local_size), NO_EVENTS, None),
        )
    event = Event()
    status = functions.clEnqueueNDRangeKernel(*kernel.range, ctypes.byref(event))
    if status:
        check("clEnqueueNDRangeKernel", status)
    return event


def enqueue_marker(queue: CommandQueue) -> Event:
    """Enqueue a marker behind all commands; returns its event."""
    event = Event()
    check(
        "clEnqueueMarkerWithWaitList",
        functions.clEnqueueMarkerWithWaitList(queue, 0, None, ctypes.byref(event)),
    )
    return event


def enqueue_map_buffer(
    queue: CommandQueue,
    buffer: Buffer,
    flags: int,
    offset: int,
    shape: tuple[int],
    dtype: DTypeLike,
    wait_for: Sequence[Event] = (),
) -> tuple[NDArray[Any], Event]:
    """Map a range of a buffer, and wait; returns an array whose base is the :class:`MemoryMap`."""
    event, status, kind = Event(), ctypes.c_int32(), np.dtype(dtype)
    waits = handle_array(wait_for) if wait_for else None
    address = functions.clEnqueueMapBuffer(
        *(queue, buffer, True, flags, offset, shape[0] * kind.itemsize),
        *(len(wait_for), waits, ctypes.byref(event), ctypes.byref(status)),
    )
    check("clEnqueueMapBuffer", status.value)
    return np.asarray(MemoryMap(queue, buffer, address, shape[0], kind)), event


def enqueue_copy(
    queue: CommandQueue,
    target: Buffer | NDArray[Any],
    source: Buffer | NDArray[Any],
    *,
    byte_count: int | None = None,
    src_offset: int = 0,
    dst_offset: int = 0,
) -> None:
    """Copy between an array and a buffer, and wait; or enqueue a copy of bytes between buffers."""
    place: tuple[Any, ...]
    if isinstance(target, np.ndarray):
        routine, place = "clEnqueueReadBuffer", (source, True, src_offset, target.nbytes, address_of(target))
    elif isinstance(source, np.ndarray):
        routine, place = "clEnqueueWriteBuffer", (target, True, dst_offset, source.nbytes, address_of(source))
    else:
        size = min(source.size, target.size) if byte_count is None else byte_count
        routine, place = "clEnqueueCopyBuffer", (source, target, src_offset, dst_offset, size)
    check(routine, getattr(functions, routine)(queue, *place, 0, None, None))


def enqueue_fill_buffer(
    queue: CommandQueue, buffer: Buffer, pattern: np.generic, offset: int, size: int
) -> None:
    """Enqueue a fill of a range with copies of a value."""
    place = (pattern.tobytes(), pattern.nbytes, offset, size)
    check("clEnqueueFillBuffer", functions.clEnqueueFillBuffer(queue, buffer, *place, 0, None, None))
