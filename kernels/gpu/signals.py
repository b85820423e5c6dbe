"""Signals from the queue to the host: markers, event states, flags in shared memory, blocking copies.

The calls beneath :mod:`heterollm.kernels.sync.handover`; like all of OpenCL they stay in these modules.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from heterollm.base import KernelError
from heterollm.kernels.gpu.binding import cl
from heterollm.kernels.gpu.flags import FlagWord
from heterollm.kernels.gpu.launch import Launch
from heterollm.kernels.gpu.protocol import GpuRuntime
from heterollm.kernels.gpu.sources import read_sources

__all__ = [
    "SOURCES",
    "FlagSignal",
    "KernelTimes",
    "MarkerSignal",
    "block_on",
    "copy_to_device",
    "copy_to_host",
    "has_fine_grained_atomics",
    "is_complete",
    "kernel_times_ns",
    "opencl_flag",
]

SOURCES: Final = ("hand_over.cl",)

FLAG_WORDS: Final = 64
"""The flag has its cache lines to itself."""


def has_fine_grained_atomics(context: cl.Context) -> bool:
    """Whether the device reports fine-grained shared virtual memory with atomics (OpenCL 2.0, optional)."""
    try:
        found = int(context.devices[0].svm_capabilities)
    except (cl.Error, AttributeError):  # the query is younger than OpenCL 1.2
        return False
    kinds = cl.device_svm_capabilities
    return bool(found & kinds.FINE_GRAIN_BUFFER) and bool(found & kinds.ATOMICS)


def is_complete(event: Any) -> bool:  # noqa: ANN401 - an OpenCL event, which pyopencl does not type
    """Whether what an event stands for is done.

    Raises:
        KernelError: It failed.
    """
    status = int(event.command_execution_status)
    if status < 0:
        raise KernelError(f"A kernel failed with OpenCL's error {status}.")
    return status == 0  # CL_COMPLETE


def block_on(event: Any) -> None:  # noqa: ANN401
    """Block in the driver until an event is complete.

    Raises:
        KernelError: What it stands for failed.
    """
    try:
        event.wait()
    except cl.Error as error:
        raise KernelError(f"A kernel failed: {error}.") from error


class MarkerSignal:
    """Tells by a marker's event that the queue got so far."""

    __slots__ = ("_enqueue", "_flush", "event")

    def __init__(self, runtime: GpuRuntime) -> None:
        self._flush = runtime.flush
        self._enqueue = runtime.enqueue_marker
        self.event: Any = None

    def send(self) -> None:
        """Enqueue the marker and start what is enqueued."""
        self.event = self._enqueue()
        self._flush()

    def seen(self) -> bool:
        """Whether the queue got to the latest marker.

        Raises:
            KernelError: A kernel failed.
        """
        return self.event is None or is_complete(self.event)

    def lost(self) -> bool:
        """Whether the signal cannot come any more: never, as the event is the driver's own word."""
        return False


def opencl_flag(runtime: GpuRuntime, queue: cl.CommandQueue) -> FlagWord | None:
    """Return a flag in memory of an OpenCL device; None where host and device have no memory for one.

    Args:
        runtime: The device.
        queue: Its queue.
    """
    context = queue.context
    if not has_fine_grained_atomics(context):
        if not runtime.traits.coherent:
            return None
        shared = runtime.shared((FLAG_WORDS,), np.uint32)
        kernel = runtime.kernel(SOURCES, "raise_flag")
        launch = runtime.launch(kernel, (shared,), (1,), (1,), "flag")
        return FlagWord(queue.flush, shared.array, launch, promised=False)
    kinds = cl.svm_mem_flags
    flags = kinds.READ_WRITE | kinds.SVM_FINE_GRAIN_BUFFER | kinds.SVM_ATOMICS
    array = cl.svm_empty(context, flags, (FLAG_WORDS,), np.uint32)
    array[...] = 0
    promising = None if runtime.traits.is_cpu else _promising_kernel(context)
    kernel = runtime.kernel(SOURCES, "raise_flag") if promising is None else promising
    launch = runtime.launch(kernel, (cl.SVM(array),), (1,), (1,), "flag")
    return FlagWord(queue.flush, array, launch, promised=promising is not None)


def _promising_kernel(context: cl.Context) -> Any | None:  # noqa: ANN401
    """Return the flag's kernel with atomics of OpenCL C 2.0; None where the compiler lacks them.

    On a CPU, host and kernels are threads of one processor, and the plain form passes the litmus test; PoCL
    3.0 reports the atomics and does not compile them.
    """
    for standard in ("CL3.0", "CL2.0"):
        try:
            program = cl.Program(context, read_sources(SOURCES))
            program.build(options=[f"-cl-std={standard}", "-DSVM_ATOMICS"], cache_dir=False)
            return cl.Kernel(program, "raise_flag")
        except cl.Error:
            continue
    return None


class FlagSignal:
    """Tells by the runtime's flag that the queue got so far."""

    __slots__ = ("_flag", "_runtime", "event", "number")

    def __init__(self, runtime: GpuRuntime, flag: FlagWord) -> None:
        self._runtime = runtime
        self._flag = flag
        self.number = flag.sent
        self.event: Any = None

    def send(self) -> None:
        """Enqueue the kernel and start what is enqueued."""
        self.event = self._flag.send()
        self.number = self._flag.sent

    @property
    def launch(self) -> Launch:
        """The kernel that raises the flag."""
        return self._flag.launch

    def sent(self) -> None:
        """Note that the kernel was enqueued within another launch, of which no event is kept."""
        self._flag.count()
        self.event = None
        self.number = self._flag.sent

    def seen(self) -> bool:
        """Whether the flag was raised."""
        return self._flag.reached(self.number)

    def lost(self) -> bool:
        """Whether the kernel is done, or has failed, and its flag is not there.

        The flag alone cannot say that a kernel failed: after one has been seen, errors come up at the
        ``finish`` that ends every pass, which costs 1 to 3 us then. A wait that takes long asks the event.
        """
        if self.event is None or not is_complete(self.event) or self.seen():
            return False
        self._runtime.finish()
        if self.seen():
            return False
        self._flag.resynchronise()
        return True


# -- for the profiler --------------------------------------------------------------------------------


class KernelTimes(NamedTuple):
    """Moments of a kernel's life in nanoseconds of the device's clock.

    Attributes:
        queued: When the host enqueued it.
        start: When it started.
        end: When it ended.
    """

    queued: int
    start: int
    end: int


def kernel_times_ns(event: Any) -> KernelTimes:  # noqa: ANN401
    """Return when a kernel that is done was queued, started and ended; its queue must stamp events.

    Raises:
        KernelError: It does not, or the kernel failed.
    """
    try:
        profile = event.profile
        return KernelTimes(int(profile.queued), int(profile.start), int(profile.end))
    except cl.Error as error:
        raise KernelError(f"The device keeps no times of its kernels: {error}.") from error


def copy_to_device(runtime: GpuRuntime, buffer: Any, array: NDArray[Any]) -> None:  # noqa: ANN401
    """Copy host memory into a buffer and wait for it.

    Raises:
        KernelError: The driver refuses.
    """
    try:
        runtime.copy(buffer, array)
    except cl.Error as error:
        raise KernelError(f"Copying {array.nbytes} bytes to the device failed: {error}.") from error


def copy_to_host(runtime: GpuRuntime, array: NDArray[Any], buffer: Any) -> None:  # noqa: ANN401
    """Copy a buffer into host memory and wait for it.

    Raises:
        KernelError: The driver refuses.
    """
    try:
        runtime.copy(array, buffer)
    except cl.Error as error:
        raise KernelError(f"Copying {array.nbytes} bytes from the device failed: {error}.") from error
