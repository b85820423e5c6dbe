"""Handles of OpenCL's objects, and the checks and queries that all of their classes share."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from numpy.typing import NDArray

from heterollm.kernels.gpu.opencl_library import Error, Functions

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


def check(routine: str, status: int, log: str = "") -> None:
    """Raise the error of a status, with a compiler's log, unless it is success."""
    if status:
        raise Error(f"{routine} failed: {STATUSES.get(status, f'status {status}')}{log}", status)


def query(routine: str, *arguments: Any) -> bytes:  # noqa: ANN401 - objects and numbers
    """Return the bytes of an answer to a query."""
    ask, size = getattr(functions, routine), ctypes.c_size_t()
    check(routine, ask(*arguments, 0, None, ctypes.byref(size)))
    answer = ctypes.create_string_buffer(max(1, size.value))
    check(routine, ask(*arguments, size.value, answer, None))
    return answer.raw[: size.value]


def as_text(answer: bytes) -> str:
    """Return the text of an answer."""
    return answer.rstrip(b"\0").decode("utf-8", "replace")


def as_number(answer: bytes) -> int:
    """Return the number of an answer."""
    return int.from_bytes(answer, "little")


def as_pointers(answer: bytes) -> list[int]:
    """Return the addresses or sizes of an answer, 8 bytes each."""
    return [as_number(answer[at : at + 8]) for at in range(0, len(answer), 8)]


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
        check(routine, status.value)


def handle_array(objects: Sequence[Handle]) -> ctypes.Array[ctypes.c_void_p]:
    """Return the objects as the array that OpenCL takes."""
    return (ctypes.c_void_p * len(objects))(*(entry.value for entry in objects))


def address_of(array: NDArray[Any]) -> int:
    """Return the address of a contiguous array."""
    if not array.flags.forc:
        raise ValueError("OpenCL takes contiguous arrays only")
    return int(array.ctypes.data)
