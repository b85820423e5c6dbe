"""Signals from the queue to the host: markers, event states, flags in shared memory, blocking copies.

:mod:`heterollm.kernels.sync.fence` builds on them.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from heterollm.base import KernelError
from heterollm.kernels.gpu.binding import build_quietly, cl
from heterollm.kernels.gpu.flags import FlagWord
from heterollm.kernels.gpu.launch import Launch
from heterollm.kernels.gpu.memory import svm_zeros
from heterollm.kernels.gpu.protocol import GpuRuntime
from heterollm.kernels.gpu.sources import read_sources

SOURCES: Final = ("sync.cl",)

FLAG_WORDS: Final = 64
"""Words around the flag, so that it shares no cache line."""


def has_fine_grained_atomics(device: cl.Device) -> bool:
    """Return whether a device reports fine-grained SVM with atomics, an option of OpenCL 2.0."""
    try:
        found = int(device.svm_capabilities)
    except (cl.Error, AttributeError):  # the query is younger than OpenCL 1.2
        return False
    kinds = cl.device_svm_capabilities
    return bool(found & kinds.FINE_GRAIN_BUFFER) and bool(found & kinds.ATOMICS)


def is_complete(event: Any) -> bool:  # noqa: ANN401 - an OpenCL event, which pyopencl does not type
    """Return whether an event is complete.

    Raises:
        KernelError: The event's kernel failed.
    """
    status = int(event.command_execution_status)
    if status < 0:
        raise KernelError(f"A kernel failed with OpenCL's error {status}.")
    return status == 0  # CL_COMPLETE


def block_on(event: Any) -> None:  # noqa: ANN401
    """Block in the driver until an event is complete.

    Raises:
        KernelError: The event's kernel failed.
    """
    try:
        event.wait()
    except cl.Error as error:
        raise KernelError(f"A kernel failed: {error}.") from error


class MarkerSignal:
    """A signal by the event of a marker in the queue."""

    __slots__ = ("_enqueue", "_flush", "event")

    def __init__(self, runtime: GpuRuntime) -> None:
        self._flush = runtime.flush
        self._enqueue = runtime.enqueue_marker
        self.event: Any = None

    def send(self) -> None:
        """Enqueue the marker and flush the queue."""
        self.event = self._enqueue()
        self._flush()

    def seen(self) -> bool:
        """Return whether the queue has reached the latest marker.

        Raises:
            KernelError: A kernel failed.
        """
        return self.event is None or is_complete(self.event)

    def lost(self) -> bool:
        """Return False: the driver reports every event."""
        return False


def opencl_flag(runtime: GpuRuntime, queue: cl.CommandQueue) -> FlagWord | None:
    """Return a flag in memory that host and device share; None if there is no such memory.

    Args:
        runtime: The device.
        queue: Its queue.
    """
    context = queue.context
    if not has_fine_grained_atomics(context.devices[0]):
        if not runtime.traits.coherent:
            return None
        shared = runtime.shared((FLAG_WORDS,), np.uint32)
        kernel = runtime.kernel(SOURCES, "raise_flag")
        launch = runtime.launch(kernel, (shared,), (1,), (1,), "flag")
        return FlagWord(queue.flush, shared.array, launch, promised=False)
    array = svm_zeros(context, (FLAG_WORDS,), np.uint32)
    # On a CPU, host and kernels are threads of one processor, and the plain kernel passes the litmus test;
    # PoCL 3.0 reports the atomics and does not compile them.
    promising = None if runtime.traits.is_cpu else _promising_kernel(context)
    kernel = runtime.kernel(SOURCES, "raise_flag") if promising is None else promising
    launch = runtime.launch(kernel, (cl.SVM(array),), (1,), (1,), "flag")
    return FlagWord(queue.flush, array, launch, promised=promising is not None)


def _promising_kernel(context: cl.Context) -> Any | None:  # noqa: ANN401
    """Return the flag's kernel with atomics of OpenCL C 2.0; None if the compiler lacks them."""
    for standard in ("CL3.0", "CL2.0"):
        try:
            options = [f"-cl-std={standard}", "-DSVM_ATOMICS"]
            program = build_quietly(cl.Program(context, read_sources(SOURCES)), options)
            return cl.Kernel(program, "raise_flag")
        except cl.Error:
            continue
    return None


class FlagSignal:
    """A signal by the runtime's flag in shared memory."""

    __slots__ = ("_flag", "_runtime", "event", "number")

    def __init__(self, runtime: GpuRuntime, flag: FlagWord) -> None:
        self._runtime = runtime
        self._flag = flag
        self.number = flag.sent
        self.event: Any = None

    def send(self) -> None:
        """Enqueue the kernel and flush the queue."""
        self.event = self._flag.send()
        self.number = self._flag.sent

    @property
    def launch(self) -> Launch:
        """The kernel that raises the flag."""
        return self._flag.launch

    def sent(self) -> None:
        """Note that the caller has enqueued the kernel within another launch, whose event is not kept."""
        self._flag.count()
        self.event = None
        self.number = self._flag.sent

    def seen(self) -> bool:
        """Return whether the flag was raised."""
        return self._flag.reached(self.number)

    def lost(self) -> bool:
        """Return whether the kernel has ended without a visible flag.

        The flag alone does not report a failed kernel. Long waits therefore check the event; short ones rely
        on the ``finish`` at the end of every pass, which costs 1 to 3 us.
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
    """Times of a kernel in nanoseconds of the device's clock.

    Attributes:
        queued: When the host enqueued it.
        start: When it started.
        end: When it ended.
    """

    queued: int
    start: int
    end: int


def kernel_times_ns(event: Any) -> KernelTimes:  # noqa: ANN401
    """Return the times of a completed kernel; its queue must stamp events.

    Raises:
        KernelError: The queue does not, or the kernel failed.
    """
    try:
        profile = event.profile
        return KernelTimes(int(profile.queued), int(profile.start), int(profile.end))
    except cl.Error as error:
        raise KernelError(f"The device keeps no times of its kernels: {error}.") from error
