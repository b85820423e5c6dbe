"""Finds and loads an OpenCL library, and types the functions that the ctypes binding calls.

A library is a loader of drivers (``libOpenCL.so.1``, ``OpenCL.dll``), a driver that exports the functions of
OpenCL itself (Adreno's on Android), or a driver for loaders alone (``cl_khr_icd``), which exports none: its
objects begin with a pointer to a table of all functions, in the order of Khronos' ``cl_icd.h``.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any, Final, NamedTuple

from heterollm.base import DeviceError, see

LIBRARY_VARIABLE: Final = "HETEROLLM_OPENCL_LIBRARY"
"""Environment variable with the path of the OpenCL library, which the ctypes binding then loads."""

LOADERS: Final = ("libOpenCL.so.1", "libOpenCL.so")
VENDORS: Final = ("libOpenCL_adreno.so.1", "libOpenCL_adreno.so")
ANDROID: Final = ("/vendor/lib64/libOpenCL.so", "/system/vendor/lib64/libOpenCL.so")
LIBRARIES: Final[Mapping[str, tuple[str, ...]]] = {
    "Windows": ("OpenCL.dll",),
    "Darwin": ("/System/Library/Frameworks/OpenCL.framework/OpenCL",),
    # A loader cannot load Adreno's library, which has no cl_khr_icd there.
    "Android": (*ANDROID, *LOADERS),
    # Python before 3.13 calls Android Linux.
    "Linux": (*LOADERS, *VENDORS, *ANDROID),
}
"""Names and paths of loaders and of vendors' libraries, by system, in the order of the search."""

POCL_PACKAGE: Final = "pocl-binary-distribution"

PLATFORMS_OF_ICD: Final = b"clIcdGetPlatformIDsKHR"

POINTER: Final = ctypes.c_void_p
UINT: Final = ctypes.c_uint32
SIZE: Final = ctypes.c_size_t
FLAGS: Final = ctypes.c_uint64
QUERY: Final = (UINT, SIZE, POINTER, POINTER)
"""Arguments behind the object in all queries: name, bytes, address of the value, address of its size."""

WAITS: Final = (UINT, POINTER, POINTER)
"""Arguments at the end of all commands: events to wait for, and the address of the command's own."""


class Function(NamedTuple):
    """A function of OpenCL.

    Attributes:
        place: Its place in the table of functions.
        arguments: Types of its arguments; none where the caller passes objects of ctypes, which is quicker.
        result: Type of its result: a status, or an object.
        quick: Whether Python's lock is kept during the call: another thread could take it from a call of a
            microsecond for milliseconds.
    """

    place: int
    arguments: tuple[Any, ...]
    result: Any = ctypes.c_int32
    quick: bool = False


FUNCTIONS: Final[Mapping[str, Function]] = {
    "clGetPlatformIDs": Function(0, (UINT, POINTER, POINTER)),
    "clGetPlatformInfo": Function(1, (POINTER, *QUERY)),
    "clGetDeviceIDs": Function(2, (POINTER, FLAGS, UINT, POINTER, POINTER)),
    "clGetDeviceInfo": Function(3, (POINTER, *QUERY)),
    "clCreateContext": Function(4, (POINTER, UINT, POINTER, POINTER, POINTER, POINTER), POINTER),
    "clRetainContext": Function(6, (POINTER,)),
    "clReleaseContext": Function(7, (POINTER,)),
    "clGetContextInfo": Function(8, (POINTER, *QUERY)),
    "clCreateCommandQueue": Function(9, (POINTER, POINTER, FLAGS, POINTER), POINTER),
    "clReleaseCommandQueue": Function(11, (POINTER,)),
    "clCreateBuffer": Function(14, (POINTER, FLAGS, SIZE, POINTER, POINTER), POINTER),
    "clReleaseMemObject": Function(18, (POINTER,)),
    "clGetMemObjectInfo": Function(20, (POINTER, *QUERY)),
    "clCreateProgramWithSource": Function(26, (POINTER, UINT, POINTER, POINTER, POINTER), POINTER),
    "clCreateProgramWithBinary": Function(
        27, (POINTER, UINT, POINTER, POINTER, POINTER, POINTER, POINTER), POINTER
    ),
    "clReleaseProgram": Function(29, (POINTER,)),
    "clBuildProgram": Function(30, (POINTER, UINT, POINTER, POINTER, POINTER, POINTER)),
    "clGetProgramInfo": Function(32, (POINTER, *QUERY)),
    "clGetProgramBuildInfo": Function(33, (POINTER, POINTER, *QUERY)),
    "clCreateKernel": Function(34, (POINTER, POINTER, POINTER), POINTER),
    "clReleaseKernel": Function(37, (POINTER,)),
    "clSetKernelArg": Function(38, (POINTER, UINT, SIZE, POINTER), quick=True),
    "clGetKernelInfo": Function(39, (POINTER, *QUERY)),
    "clWaitForEvents": Function(41, (UINT, POINTER)),
    "clGetEventInfo": Function(42, (), quick=True),
    "clReleaseEvent": Function(44, (), quick=True),
    "clGetEventProfilingInfo": Function(45, (POINTER, *QUERY)),
    "clFlush": Function(46, (POINTER,), quick=True),
    "clFinish": Function(47, (POINTER,)),
    "clEnqueueReadBuffer": Function(48, (POINTER, POINTER, UINT, SIZE, SIZE, POINTER, *WAITS)),
    "clEnqueueWriteBuffer": Function(49, (POINTER, POINTER, UINT, SIZE, SIZE, POINTER, *WAITS)),
    "clEnqueueCopyBuffer": Function(50, (POINTER, POINTER, POINTER, SIZE, SIZE, SIZE, *WAITS)),
    "clEnqueueMapBuffer": Function(56, (POINTER, POINTER, UINT, FLAGS, SIZE, SIZE, *WAITS, POINTER), POINTER),
    "clEnqueueUnmapMemObject": Function(58, (POINTER, POINTER, POINTER, *WAITS)),
    "clEnqueueNDRangeKernel": Function(59, (), quick=True),
    "clCreateSubBuffer": Function(82, (POINTER, FLAGS, UINT, POINTER, POINTER), POINTER),
    "clCreateImage": Function(96, (POINTER, FLAGS, POINTER, POINTER, POINTER, POINTER), POINTER),
    "clGetKernelArgInfo": Function(101, (POINTER, UINT, *QUERY)),
    "clEnqueueFillBuffer": Function(102, (POINTER, POINTER, POINTER, SIZE, SIZE, SIZE, *WAITS)),
    "clEnqueueMarkerWithWaitList": Function(105, (POINTER, *WAITS), quick=True),
    "clGetExtensionFunctionAddressForPlatform": Function(107, (POINTER, POINTER), POINTER),
    "clSVMAlloc": Function(126, (POINTER, FLAGS, SIZE, UINT), POINTER),
    "clSVMFree": Function(127, (POINTER, POINTER), None),
    "clSetKernelArgSVMPointer": Function(134, (POINTER, UINT, POINTER), quick=True),
    "clCreateBufferWithProperties": Function(146, (POINTER, POINTER, FLAGS, SIZE, POINTER, POINTER), POINTER),
}


class Error(Exception):
    """Error of an OpenCL call.

    Args:
        message: The function and the name of its status.
        code: The status.
    """

    def __init__(self, message: str, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class Functions:
    """The functions of an OpenCL library as attributes; the first use of one finds and loads the library.

    Attributes:
        path: Name or path of the loaded library.
    """

    path: str

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a ctypes function
        if name != "path" and name not in FUNCTIONS:
            raise AttributeError(name)
        self.path, found = _find()
        vars(self).update(found)
        return getattr(self, name)


def _find() -> tuple[str, dict[str, Callable[..., Any]]]:
    """Return the first library that offers a platform, and its functions.

    Raises:
        DeviceError: The library that the environment names cannot be used.
        Error: No library offers a platform.
    """
    if named := os.environ.get(LIBRARY_VARIABLE):
        try:
            return named, _load(named)
        except (OSError, Error) as error:
            raise DeviceError(
                f"{LIBRARY_VARIABLE} names {named!r:.300}, which cannot be used: {error}.",
                fix="Name the OpenCL library of a driver or a loader of drivers, or unset the variable. "
                + see("opencl-without-pyopencl"),
            ) from error
    failed = []
    for path in _candidates():
        try:
            return path, _load(path)
        except (OSError, Error) as error:
            failed.append(str(error) if path in str(error) else f"{path}: {error}")
    raise Error("; ".join(failed))


def _candidates() -> Iterator[str]:
    yield from LIBRARIES.get(platform.system(), LOADERS)
    try:
        files = metadata.files(POCL_PACKAGE) or ()
    except metadata.PackageNotFoundError:
        return
    yield from (str(file.locate()) for file in files if file.name.startswith("libpocl"))


def _load(path: str) -> dict[str, Callable[..., Any]]:
    """Return the functions of a library.

    Raises:
        OSError: It cannot be loaded.
        Error: It is no OpenCL library, or offers no platform.
    """
    library = ctypes.CDLL(path)
    exports = _exported(library, "clGetPlatformIDs")
    address = exports or _icd_platforms(library)
    if not address:
        raise Error("it is no OpenCL library")
    ask = _typed("clGetPlatformIDs", address)
    count, first = UINT(), POINTER()
    if ask(1, ctypes.byref(first), ctypes.byref(count)) or not count.value or not first.value:
        raise Error("it offers no platform")
    table = None if exports else POINTER.from_address(first.value).value
    found = {}
    for name, function in FUNCTIONS.items():
        own = POINTER.from_address(table + 8 * function.place).value if table else _exported(library, name)
        found[name] = _typed(name, own) if own else _missing(name)
    return found | {"clGetPlatformIDs": ask}


def _icd_platforms(library: ctypes.CDLL) -> int | None:
    """Return the address of the function by which loaders ask a driver for its platforms."""
    try:
        lookup = library.clGetExtensionFunctionAddress
    except AttributeError:
        return None
    lookup.restype = POINTER
    address: int | None = lookup(PLATFORMS_OF_ICD)
    return address


def _exported(library: ctypes.CDLL, name: str) -> int | None:
    return ctypes.cast(getattr(library, name), POINTER).value if hasattr(library, name) else None


def _typed(name: str, address: int) -> Callable[..., Any]:
    function = FUNCTIONS[name]
    make = ctypes.PYFUNCTYPE if function.quick else ctypes.CFUNCTYPE
    return make(function.result, *function.arguments)(address)


def _missing(name: str) -> Callable[..., Any]:
    def refuse(*_arguments: object) -> None:
        raise Error(f"the OpenCL library has no {name}")

    return refuse
