"""Memory of QNN's shared allocator (rpcmem of ``libcdsprpc``), which a Hexagon uses without a copy.

Only memory that the provider itself allocates is used in place: it refuses any other as such. So a session
allocates, and another processor imports the pages by their file descriptor. The provider registers a
tensor's address when a graph first runs with it, once for each context, and takes the first tensor's size
for all that follow at that address. :class:`ContextHandles` therefore binds one tensor to an address of a
context, and all others by copy.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Collection
from typing import Any, Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from heterollm.base import GraphError, format_bytes
from heterollm.kernels.npu.session import InPlace, runtime_errors, shared_device

logger = logging.getLogger(__name__)

ALLOCATOR_OPTION: Final = {"enable_htp_shared_memory_allocator": "1"}
"""Option of sessions; with it a session does not open where the library is missing."""

RPCMEM_LIBRARIES: Final = ("libcdsprpc.so", "/vendor/lib64/libcdsprpc.so")
"""Libraries of rpcmem on Linux and Android. OpenCL imports no descriptor of that on Windows."""

MOST_BYTES: Final = 2**31 - 1
"""Most bytes of one allocation: rpcmem counts them in an ``int``."""


class SharingEdges(Struct, frozen=True, forbid_unknown_fields=True):
    """Result of the probe of shared memory, edge by edge: empty, or why values are copied there.

    Args:
        arena: One allocation that both processors address, slots at offsets, and two contexts on it.
        inputs: An NPU graph's input that a kernel has written.
        outputs: An NPU graph's output that a kernel reads.
        source: How the GPU imports the memory.
        maps: Why the host must map the memory around its and the NPU's accesses; empty if it need not.
    """

    arena: str = ""
    inputs: str = ""
    outputs: str = ""
    source: str = ""
    maps: str = ""

    @property
    def usable(self) -> bool:
        """Whether any value needs no copy."""
        return not self.arena and not (self.inputs and self.outputs)

    def __str__(self) -> str:
        if not self.usable:
            return f"copied: {self.arena or self.inputs}"
        refused = {"inputs": self.inputs, "outputs": self.outputs}
        copied = [f"{name} are copied: {reason}" for name, reason in refused.items() if reason]
        maps = "mapped" if self.maps else "without maps"
        return "; ".join((f"in place, {maps}, by {self.source}", *copied))


@functools.cache
def rpcmem() -> Any:  # noqa: ANN401 - a library of ctypes
    """Return the library of rpcmem; None where it does not load."""
    for name in RPCMEM_LIBRARIES if os.name == "posix" else ():
        try:
            library = ctypes.CDLL(name)
            library.rpcmem_to_fd.argtypes = [ctypes.c_void_p]
        except (OSError, AttributeError) as error:
            logger.debug("No rpcmem: %s", error)
        else:
            return library
    return None


_serials = itertools.count()


class SharedPages:
    """One allocation of a session; ``np.asarray`` of it is a view that keeps it.

    Args:
        session: A session that was opened with :data:`ALLOCATOR_OPTION`.
        size_bytes: Its size.

    Attributes:
        descriptor: The file descriptor of the pages.
        serial: A number that no other allocation has, at the same address later neither.

    Raises:
        GraphError: The provider does not allocate, or the pages have no descriptor.
    """

    def __init__(self, session: Any, size_bytes: int) -> None:  # noqa: ANN401 - onnxruntime ships no types
        what = f"shared memory of {format_bytes(size_bytes)}"
        if size_bytes > MOST_BYTES:
            raise GraphError(f"QNN allocates no {what} at once.")
        refusals: tuple[type[Exception], ...] = (*runtime_errors(), AttributeError, TypeError)
        try:
            # The public method does not reach this allocator.
            allocate = session._sess.create_ortvalue_from_shape_and_type  # noqa: SLF001
            self._value = allocate([size_bytes], np.uint8, shared_device())
        except refusals as error:
            raise GraphError(f"QNN cannot allocate {what}: {error}") from error
        self.address: int = self._value.data_ptr()
        library = rpcmem()
        self.descriptor: int = -1 if library is None else library.rpcmem_to_fd(self.address)
        if self.descriptor < 0:
            raise GraphError(f"The {what} has no file descriptor ({self.descriptor}).")
        self.size_bytes = size_bytes
        self.serial = next(_serials)
        self.__array_interface__ = {
            "data": (self.address, False),
            "shape": (size_bytes,),
            "typestr": "|u1",
            "version": 3,
        }


class ContextHandles:
    """The tensors by which the graphs of one context know addresses of shared memory.

    Args:
        memory: The memory.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self._memory = memory
        self._tensors: dict[tuple[int, int], tuple[tuple[int, ...], np.dtype[Any]]] = {}

    def count(self, serials: Collection[int]) -> int:
        """Return the number of addresses in some allocations."""
        return sum(serial in serials for serial, _ in self._tensors)

    def in_place(self, array: NDArray[Any], *, is_input: bool) -> InPlace | None:
        """Return an array as it is bound in place; None for one that must be copied."""
        memory = self._memory
        pages = memory.pages_of(array)
        if pages is None:
            return None
        edges = memory.edges
        if not (edges.arena or (edges.inputs if is_input else edges.outputs)):
            tensor = array.shape, array.dtype
            if self._tensors.setdefault((pages.serial, array.ctypes.data), tensor) == tensor:
                return InPlace(array)
        memory.copied += 1
        return None

    def refuse(self, reason: str) -> None:
        """Bind all tensors by copy from now on, in every context; see :class:`Handles`."""
        self._memory.refuse(reason)


class SharedMemory:
    """Allocations of a backend's shared memory, and the handles of all contexts.

    Args:
        edges: The edges at which it needs no copy.
        refused: Called with the remaining edges if a graph refuses the memory in spite of that.

    Attributes:
        edges: As above; without any after a refusal.
        copied: Inputs and outputs in this memory that were bound by copy.
    """

    def __init__(self, edges: SharingEdges, refused: Callable[[SharingEdges], None] | None = None) -> None:
        self.edges = edges
        self.copied = 0
        self._refused = refused
        self._pages: weakref.WeakSet[SharedPages] = weakref.WeakSet()
        self._contexts: weakref.WeakSet[ContextHandles] = weakref.WeakSet()

    @property
    def handles(self) -> int:
        """Addresses that contexts know, or will when their graphs run first."""
        live = {pages.serial for pages in self._pages}
        return sum(context.count(live) for context in self._contexts)

    def allocate(self, session: Any, size_bytes: int) -> SharedPages:  # noqa: ANN401
        """Return new memory of a session.

        Raises:
            GraphError: See :class:`SharedPages`.
        """
        pages = SharedPages(session, size_bytes)
        self._pages.add(pages)
        return pages

    def new_context(self) -> ContextHandles:
        """Return the handles of a context that was opened with :data:`ALLOCATOR_OPTION`."""
        handles = ContextHandles(self)
        self._contexts.add(handles)
        return handles

    def pages_of(self, array: NDArray[Any]) -> SharedPages | None:
        """Return the allocation that holds an array; None for other memory."""
        address = array.ctypes.data
        return next((own for own in self._pages if 0 <= address - own.address < own.size_bytes), None)

    def refuse(self, reason: str) -> None:
        """Bind all tensors by copy from now on, after a graph refused its memory."""
        reason = reason.rpartition("Status Message: ")[2]
        logger.warning("NPU graphs copy their inputs and outputs from now on: %s", reason)
        self.edges = SharingEdges(arena=reason)
        if self._refused is not None:
            self._refused(self.edges)
