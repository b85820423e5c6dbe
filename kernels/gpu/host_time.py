"""The time that a device's parts run in: the host's own, or that of a simulated SoC."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from heterollm.kernels.gpu.waiting import HostClock

__all__ = ["HostTime"]


class HostTime:
    """What a runtime says of time: here that of the host, on which real devices run.

    Attributes:
        is_simulated: Whether the device's time is virtual: modelled, and moved on by what it is asked to do.
        computes: Whether kernels and graphs compute anything; without it only shapes and times are right.
    """

    is_simulated: ClassVar[bool] = False
    computes: bool = True
    now_ns: Callable[[], int] = staticmethod(time.perf_counter_ns)
    """Nanoseconds from any fixed moment."""

    def host_clock(self) -> HostClock:
        """Return what the calling thread waits by."""
        return HostClock.of_this_thread()

    def processor_ns(self) -> tuple[int, int]:
        """Return the processor time of the calling thread and of the process so far."""
        return time.thread_time_ns(), time.process_time_ns()
