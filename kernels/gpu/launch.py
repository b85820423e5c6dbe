"""Launches: OpenCL kernels with their arguments, set once and enqueued many times."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np

from heterollm.kernels.gpu.binding import OpenClError, cl
from heterollm.kernels.gpu.memory import DeviceMemory, SharedArray

Argument: TypeAlias = "cl.Buffer | cl.Image | cl.SVM | DeviceMemory | np.generic | cl.LocalMemory | None"
"""A kernel argument: memory, an image, a NumPy scalar of the exact type, local memory, or null."""


class Launch(ABC):
    """One kernel with its arguments, to be enqueued many times; made by a runtime.

    Args:
        kernel: The runtime's kernel.
        arguments: Its arguments; the launch keeps their memory alive.
        label: Name for traces and errors.

    Attributes:
        ending: The :class:`heterollm.kernels.gpu.Ending` by which a linear layer before it can compute the
            same; None for none.
        remade: Returns the launch of a linear layer of one token with a
            :class:`heterollm.kernels.gpu.NormedInput` and an ending; None for one that takes none.
    """

    __slots__ = ("arguments", "ending", "kernel", "label", "remade")

    def __init__(self, kernel: Any, arguments: Sequence[Argument], label: str) -> None:  # noqa: ANN401 - the runtime's
        self.kernel = kernel
        self.arguments = tuple(arguments)
        self.label = label
        self.ending: Any = None
        self.remade: Callable[[Any, Any], Launch] | None = None

    @property
    def parts(self) -> tuple[Launch, ...]:
        """The equivalent launches of one kernel each: this one."""
        return (self,)

    @abstractmethod
    def rebind(self) -> None:
        """Set all arguments again: their memory may have got other buffers."""

    @abstractmethod
    def __call__(self) -> Any:  # noqa: ANN401 - an event, which pyopencl does not type
        """Enqueue the kernel without waiting; returns its event."""


class OpenClLaunch(Launch):
    """A launch on an OpenCL queue; it owns its kernel object and keeps its arguments' memory alive."""

    __slots__ = ("_enqueue", "_queue", "global_size", "local_size")

    def __init__(
        self,
        queue: cl.CommandQueue,
        kernel: cl.Kernel,
        arguments: Sequence[Argument],
        global_size: tuple[int, ...],
        local_size: tuple[int, ...],
        label: str,
    ) -> None:
        self._queue = queue
        self._enqueue = cl.enqueue_nd_range_kernel
        super().__init__(kernel, arguments, label)
        self.global_size = global_size
        self.local_size = local_size
        self.rebind()

    def rebind(self) -> None:
        """Set all arguments again: their memory may have got other buffers."""
        self.kernel.set_args(
            *(arg.buffer if isinstance(arg, DeviceMemory) else arg for arg in self.arguments)
        )

    def __call__(self) -> Any:  # noqa: ANN401 - an OpenCL event, which pyopencl does not type
        """Enqueue the kernel without waiting; returns its event."""
        return self._enqueue(self._queue, self.kernel, self.global_size, self.local_size)

    def __del__(self) -> None:
        # The launch may free its memory, which a running kernel must not lose.
        with contextlib.suppress(OpenClError):
            self._queue.finish()


class ChainedLaunch(Launch):
    """A launch that first enqueues another one, which prepares its input."""

    __slots__ = ("before", "last")

    def __init__(self, before: Launch, last: Launch) -> None:
        super().__init__(last.kernel, last.arguments, last.label)
        self.before = before
        self.last = last

    @property
    def parts(self) -> tuple[Launch, ...]:
        """All launches of the chain in order."""
        return *self.before.parts, *self.last.parts

    def rebind(self) -> None:
        """Set all arguments of both launches again."""
        self.before.rebind()
        self.last.rebind()

    def __call__(self) -> Any:  # noqa: ANN401 - an OpenCL event, which pyopencl does not type
        """Enqueue both kernels without waiting; returns the event of the last."""
        self.before()
        return self.last()


def host_address(argument: Argument) -> int:
    """Return the host address of an argument's memory; 0 for a null pointer."""
    if argument is None:
        return 0
    if isinstance(argument, SharedArray):
        return int(argument.array.ctypes.data)
    if isinstance(argument, cl.SVM):
        return int(argument.mem.ctypes.data)
    buffer: Any = argument.buffer if isinstance(argument, DeviceMemory) else argument
    return int(buffer.get_host_array((1,), np.uint8).ctypes.data)
