"""A binding of OpenCL by ctypes, where pyopencl has no wheel: the names of pyopencl that this room uses.

Classes, functions and arguments mean what they mean in pyopencl. An object is its own handle, and releases it
when it is collected. Like OpenCL, kernels do not keep their arguments alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterollm.kernels.gpu.opencl_library import Error as Error
from heterollm.kernels.gpu.opencl_library import Functions

functions: Final = Functions()
"""The functions of the loaded library."""


def _statuses(first: int, prefix: str, names: str) -> dict[int, str]:
    return {first - place: prefix + name for place, name in enumerate(names.split())}


STATUSES: Final = _statuses(
    -1,
    "",
    "DEVICE_NOT_FOUND DEVICE_NOT_AVAILABLE COMPILER_NOT_AVAILABLE MEM_OBJECT_ALLOCATION_FAILURE "
    "OUT_OF_RESOURCES OUT_OF_HOST_MEMORY PROFILING_INFO_NOT_AVAILABLE MEM_COPY_OVERLAP IMAGE_FORMAT_MISMATCH "
    "IMAGE_FORMAT_NOT_SUPPORTED BUILD_PROGRAM_FAILURE MAP_FAILURE MISALIGNED_SUB_BUFFER_OFFSET "
    "EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST COMPILE_PROGRAM_FAILURE LINKER_NOT_AVAILABLE "
    "LINK_PROGRAM_FAILURE DEVICE_PARTITION_FAILED KERNEL_ARG_INFO_NOT_AVAILABLE",
) | _statuses(
    -30,
    "INVALID_",
    "VALUE DEVICE_TYPE PLATFORM DEVICE CONTEXT QUEUE_PROPERTIES COMMAND_QUEUE HOST_PTR MEM_OBJECT "
    "IMAGE_FORMAT_DESCRIPTOR IMAGE_SIZE SAMPLER BINARY BUILD_OPTIONS PROGRAM PROGRAM_EXECUTABLE KERNEL_NAME "
    "KERNEL_DEFINITION KERNEL ARG_INDEX ARG_VALUE ARG_SIZE KERNEL_ARGS WORK_DIMENSION WORK_GROUP_SIZE "
    "WORK_ITEM_SIZE GLOBAL_OFFSET EVENT_WAIT_LIST EVENT OPERATION GL_OBJECT BUFFER_SIZE MIP_LEVEL "
    "GLOBAL_WORK_SIZE PROPERTY IMAGE_DESCRIPTOR COMPILER_OPTIONS LINKER_OPTIONS DEVICE_PARTITION_COUNT",
)
"""Names of OpenCL's error statuses."""

DEVICE_NOT_FOUND: Final = -1
ALLOCATION_FAILURE: Final = -4

# -- constants: names of OpenCL, as attributes of pyopencl's names ---------------------------------------

device_type = SimpleNamespace(CPU=2, GPU=4, ALL=0xFFFFFFFF)
device_svm_capabilities = SimpleNamespace(FINE_GRAIN_BUFFER=2, ATOMICS=8)
command_queue_properties = SimpleNamespace(PROFILING_ENABLE=2)
command_execution_status = SimpleNamespace(COMPLETE=0)
mem_flags = SimpleNamespace(READ_WRITE=1, READ_ONLY=4, USE_HOST_PTR=8, COPY_HOST_PTR=32)
svm_mem_flags = SimpleNamespace(READ_WRITE=1, SVM_FINE_GRAIN_BUFFER=1 << 10, SVM_ATOMICS=1 << 11)
map_flags = SimpleNamespace(READ=1, WRITE=2)
channel_order = SimpleNamespace(R=0x10B0)
channel_type = SimpleNamespace(UNSIGNED_INT32=0x10DC)
program_info = SimpleNamespace(BINARIES=0x1166)
kernel_arg_info = SimpleNamespace(ADDRESS_QUALIFIER=0x1196, TYPE_QUALIFIER=0x1199)
kernel_arg_address_qualifier = SimpleNamespace(GLOBAL=0x119B)
kernel_arg_type_qualifier = SimpleNamespace(CONST=1)

CONTEXT_DEVICES: Final = 0x1081
MEMORY_SIZE: Final = 0x1102
BUFFER_REGION: Final = 0x1220
PROGRAM_BINARY_SIZES: Final = 0x1165
PROGRAM_BUILD_LOG: Final = 0x1183
KERNEL_NUM_ARGS: Final = 0x1191
IMAGE1D_BUFFER: Final = 0x10F6
EVENT_STATUS: Final = ctypes.c_uint32(0x11D3)
STATUS_SIZE: Final = ctypes.c_size_t(4)
NO_EVENTS: Final = ctypes.c_uint32(0)
PLATFORM_FACTS: Final = {"version": 0x0901, "name": 0x0902, "vendor": 0x0903}
EVENT_TIMES: Final = {"queued": 0x1280, "submit": 0x1281, "start": 0x1282, "end": 0x1283}
DEVICE_TEXTS: Final = {
    "name": 0x102B,
    "vendor": 0x102C,
    "driver_version": 0x102D,
    "version": 0x102F,
    "extensions": 0x1030,
    "opencl_c_version": 0x103D,
}
DEVICE_NUMBERS: Final = {
    "type": 0x1000,
    "max_compute_units": 0x1002,
    "max_work_group_size": 0x1004,
    "max_mem_alloc_size": 0x1010,
    "image_support": 0x1016,
    "global_mem_cache_size": 0x101E,
    "global_mem_size": 0x101F,
    "local_mem_size": 0x1023,
    "host_unified_memory": 0x1035,
    "image_max_buffer_size": 0x1040,
    "svm_capabilities": 0x1053,
    "ext_mem_padding_in_bytes_qcom": 0x40A0,
}
DEVICE_PLATFORM: Final = 0x1031


class CompilerWarning(UserWarning):
    """The warning of pyopencl about a compiler's log; this binding gives none."""


def _check(routine: str, status: int, log: str = "") -> None:
    if status:
        raise Error(f"{routine} failed: {STATUSES.get(status, f'status {status}')}{log}", status)


def _query(routine: str, *arguments: Any) -> bytes:  # noqa: ANN401 - objects and numbers
    """Return the bytes of an answer to a query."""
    ask, size = getattr(functions, routine), ctypes.c_size_t()
    _check(routine, ask(*arguments, 0, None, ctypes.byref(size)))
    answer = ctypes.create_string_buffer(max(1, size.value))
    _check(routine, ask(*arguments, size.value, answer, None))
    return answer.raw[: size.value]


def _text(answer: bytes) -> str:
    return answer.rstrip(b"\0").decode("utf-8", "replace")


def _number(answer: bytes) -> int:
    return int.from_bytes(answer, "little")


def _pointers(answer: bytes) -> list[int]:
    return [_number(answer[at : at + 8]) for at in range(0, len(answer), 8)]


class Handle(ctypes.c_void_p):
    """An OpenCL object, given back when it is collected.

    The collector finalizes the objects of a cycle in any order: one that was given back is null, and no
    finalizer relies on another object. The driver counts its own references between them.
    """

    # At the end of the interpreter a class still has what its module has lost.
    functions: ClassVar[Functions] = functions
    release: ClassVar[str] = ""

    @property
    def int_ptr(self) -> int:
        """The object's address."""
        return self.value or 0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Handle) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __del__(self) -> None:
        address, self.value = self.value, None
        if address and self.release:
            getattr(self.functions, self.release)(address)

    def _create(self, routine: str, *arguments: Any) -> None:  # noqa: ANN401 - objects, numbers, addresses
        """Take the object that a function makes."""
        status = ctypes.c_int32()
        self.value = getattr(functions, routine)(*arguments, ctypes.byref(status))
        _check(routine, status.value)


class Platform(Handle):
    """A platform; see ``PLATFORM_FACTS`` for its attributes."""

    def __getattr__(self, name: str) -> str:
        if name not in PLATFORM_FACTS:
            raise AttributeError(name)
        return _text(_query("clGetPlatformInfo", self, PLATFORM_FACTS[name]))

    def get_devices(self, kind: int = device_type.ALL) -> list[Device]:
        """Return the devices of a type."""
        count = ctypes.c_uint32()
        status = functions.clGetDeviceIDs(self, kind, 0, None, ctypes.byref(count))
        if status == DEVICE_NOT_FOUND:
            return []
        _check("clGetDeviceIDs", status)
        found = (ctypes.c_void_p * count.value)()
        _check("clGetDeviceIDs", functions.clGetDeviceIDs(self, kind, count.value, found, None))
        return [Device(address) for address in found]


class Device(Handle):
    """A device; see ``DEVICE_TEXTS`` and ``DEVICE_NUMBERS`` for its attributes."""

    @property
    def platform(self) -> Platform:
        """Its platform."""
        return Platform(_number(_query("clGetDeviceInfo", self, DEVICE_PLATFORM)))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a text or a number
        if name in DEVICE_TEXTS:
            return _text(_query("clGetDeviceInfo", self, DEVICE_TEXTS[name]))
        if name in DEVICE_NUMBERS:
            return _number(_query("clGetDeviceInfo", self, DEVICE_NUMBERS[name]))
        raise AttributeError(name)


def get_platforms() -> list[Platform]:
    """Return all platforms of the library."""
    count = ctypes.c_uint32()
    _check("clGetPlatformIDs", functions.clGetPlatformIDs(0, None, ctypes.byref(count)))
    found = (ctypes.c_void_p * count.value)()
    _check("clGetPlatformIDs", functions.clGetPlatformIDs(count.value, found, None))
    return [Platform(address) for address in found]


class Context(Handle):
    """A context of devices, and the addresses of its queues."""

    release = "clReleaseContext"

    def __init__(self, devices: Sequence[Device]) -> None:
        super().__init__()
        self.devices = list(devices)
        self.queues: set[int] = set()
        self._create("clCreateContext", None, len(devices), _array(devices), None, None)

    @classmethod
    def from_int_ptr(cls, address: int, *, retain: bool) -> Context:
        """Return the context at an address, whose reference it takes over."""
        assert not retain
        context = cls.__new__(cls)
        context.value = address
        context.queues = set()
        context.devices = [
            Device(device) for device in _pointers(_query("clGetContextInfo", context, CONTEXT_DEVICES))
        ]
        return context


class CommandQueue(Handle):
    """A queue of a device."""

    release = "clReleaseCommandQueue"

    def __init__(self, context: Context, device: Device, properties: int = 0) -> None:
        super().__init__()
        self.context = context
        self.device = device
        self.properties = properties
        self._queues = context.queues
        self._create("clCreateCommandQueue", context, device, properties)
        self._queues.add(self.int_ptr)

    def __del__(self) -> None:
        # Memory of the commands may go next.
        if address := self.value:
            self._queues.discard(address)
            self.functions.clFinish(address)
        super().__del__()

    def flush(self) -> None:
        """Submit the commands."""
        _check("clFlush", functions.clFlush(self))

    def finish(self) -> None:
        """Wait until all commands are done, as they are in a queue that was given back."""
        if self.value:
            _check("clFinish", functions.clFinish(self))


# -- memory ----------------------------------------------------------------------------------------------


class Buffer(Handle):
    """Device memory: new, or the memory or a copy of an array."""

    release = "clReleaseMemObject"

    def __init__(
        self, context: Context, flags: int, size: int = 0, hostbuf: NDArray[Any] | None = None
    ) -> None:
        super().__init__()
        self.size = size if hostbuf is None else hostbuf.nbytes
        self._array = hostbuf if flags & mem_flags.USE_HOST_PTR else None
        address = None if hostbuf is None else _address(hostbuf)
        self._create("clCreateBuffer", context, flags, self.size, address)

    @classmethod
    def from_int_ptr(cls, address: int, *, retain: bool) -> Self:
        """Return the buffer at an address, whose reference it takes over."""
        assert not retain
        buffer = cls._empty(0)
        buffer.value = address
        buffer.size = _number(_query("clGetMemObjectInfo", buffer, MEMORY_SIZE))
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


class _Memory:
    """Memory behind NumPy arrays: ``np.asarray`` of it is a view whose base it is."""

    def __init__(self, address: int, shape: tuple[int, ...], dtype: DTypeLike) -> None:
        self.address = address
        self.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "typestr": np.dtype(dtype).str,
            "version": 3,
        }


class _SvmMemory(_Memory):
    """Shared virtual memory, freed with its last view, behind all commands that may use it."""

    functions: ClassVar[Functions] = functions

    def __init__(self, context: Context, flags: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        address = functions.clSVMAlloc(context, flags, int(np.prod(shape)) * dtype.itemsize, 0)
        if not address:
            _check("clSVMAlloc", ALLOCATION_FAILURE)
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


# -- programs --------------------------------------------------------------------------------------------


class Program(Handle):
    """A program, of its source or of binaries of devices."""

    release = "clReleaseProgram"

    def __init__(
        self,
        context: Context,
        source_or_devices: str | Sequence[Device],
        binaries: Sequence[bytes] = (),
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
            devices = _array(source_or_devices)
            self._create("clCreateProgramWithBinary", context, count, devices, sizes, texts, None)

    def build(self, options: Sequence[str] = (), *, cache_dir: bool = False) -> Program:
        """Compile the program for all devices of its context."""
        assert not cache_dir
        text = " ".join(options).encode()
        count = len(self.devices)
        status = functions.clBuildProgram(self, count, _array(self.devices), text, None, None)
        _check(
            "clBuildProgram", status, "".join(f"\n{self._log(device)}" for device in self.devices if status)
        )
        return self

    def _log(self, device: Device) -> str:
        try:
            return _text(_query("clGetProgramBuildInfo", self, device, PROGRAM_BUILD_LOG))
        except Error as error:
            return str(error)

    def get_info(self, name: int) -> list[bytes]:
        """Return the binaries of all devices; ``name`` is BINARIES."""
        sizes = _pointers(_query("clGetProgramInfo", self, PROGRAM_BINARY_SIZES))
        texts = [ctypes.create_string_buffer(max(1, size)) for size in sizes]
        places = (ctypes.c_void_p * len(sizes))(*map(ctypes.addressof, texts))
        status = functions.clGetProgramInfo(self, name, ctypes.sizeof(places), places, None)
        _check("clGetProgramInfo", status)
        return [text.raw[:size] for text, size in zip(texts, sizes, strict=True)]


class Kernel(Handle):
    """A kernel of a built program, with its arguments."""

    release = "clReleaseKernel"

    def __init__(self, program: Program, name: str) -> None:
        super().__init__()
        self.program = program
        self.function_name = name
        self._create("clCreateKernel", program, name.encode())
        self.num_args = _number(_query("clGetKernelInfo", self, KERNEL_NUM_ARGS))
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
                status = functions.clSetKernelArgSVMPointer(self, index, _address(argument.mem))
            else:
                status = functions.clSetKernelArg(self, index, *_size_and_value(argument))
            _check(f"clSetKernelArg {index} of {self.function_name}", status)

    def get_arg_info(self, index: int, name: int) -> int:
        """Return a qualifier of an argument."""
        return _number(_query("clGetKernelArgInfo", self, index, name))


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


# -- commands --------------------------------------------------------------------------------------------


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
        _check(
            "clGetEventInfo",
            functions.clGetEventInfo(self, EVENT_STATUS, STATUS_SIZE, ctypes.byref(status), None),
        )
        return status.value

    @property
    def profile(self) -> SimpleNamespace:
        """The times queued, submit, start and end in nanoseconds of the device."""
        return SimpleNamespace(
            **{
                name: _number(_query("clGetEventProfilingInfo", self, code))
                for name, code in EVENT_TIMES.items()
            }
        )

    def wait(self) -> None:
        """Block until the command is done."""
        _check("clWaitForEvents", functions.clWaitForEvents(1, ctypes.byref(self)))


class MemoryMap(_Memory):
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
        _check("clEnqueueUnmapMemObject", unmap(queue, buffer, self.address, 0, None, ctypes.byref(event)))
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
        _check("clEnqueueNDRangeKernel", status)
    return event


def enqueue_marker(queue: CommandQueue) -> Event:
    """Enqueue a marker behind all commands; returns its event."""
    event = Event()
    _check(
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
    waits = _array(wait_for) if wait_for else None
    address = functions.clEnqueueMapBuffer(
        *(queue, buffer, True, flags, offset, shape[0] * kind.itemsize),
        *(len(wait_for), waits, ctypes.byref(event), ctypes.byref(status)),
    )
    _check("clEnqueueMapBuffer", status.value)
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
        routine, place = "clEnqueueReadBuffer", (source, True, src_offset, target.nbytes, _address(target))
    elif isinstance(source, np.ndarray):
        routine, place = "clEnqueueWriteBuffer", (target, True, dst_offset, source.nbytes, _address(source))
    else:
        size = min(source.size, target.size) if byte_count is None else byte_count
        routine, place = "clEnqueueCopyBuffer", (source, target, src_offset, dst_offset, size)
    _check(routine, getattr(functions, routine)(queue, *place, 0, None, None))


def enqueue_fill_buffer(
    queue: CommandQueue, buffer: Buffer, pattern: np.generic, offset: int, size: int
) -> None:
    """Enqueue a fill of a range with copies of a value."""
    place = (pattern.tobytes(), pattern.nbytes, offset, size)
    _check("clEnqueueFillBuffer", functions.clEnqueueFillBuffer(queue, buffer, *place, 0, None, None))


def _array(objects: Sequence[Handle]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(objects))(*(entry.value for entry in objects))


def _address(array: NDArray[Any]) -> int:
    if not array.flags.forc:
        raise ValueError("OpenCL takes contiguous arrays only")
    return int(array.ctypes.data)
