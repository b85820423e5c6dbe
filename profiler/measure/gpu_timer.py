"""The time of kernels inside a busy queue, by the device's own clock.

A host that waits for a kernel sees its own wake-up as well, and an idle device starts more slowly than a
busy one. In a pass neither happens, so both stay out: a kernel is timed between its time stamps, right behind
another one that keeps the queue busy.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Final

from heterollm.base import KernelError, ProfileError
from heterollm.kernels.gpu import (
    GpuRuntime,
    Launch,
    OpenClError,
    kernel_times_ns,
)
from heterollm.profiler.measure.caches import eviction_bytes, reading_launch

PRIMER_BYTES: Final = 1 << 20
"""Size of the read that keeps the queue busy for longer than the host takes to enqueue a kernel."""

CLOCK_SLACK: Final = 1.5
"""Largest ratio of the device's clock to the host's around the same work; beyond it a clock jumped."""


class GpuTimer:
    """Times launches on a device.

    Attributes:
        runtime: The device with time stamps on; timed launches must be made with it.
        evictions: How often the caches were emptied.
    """

    def __init__(self, runtime: GpuRuntime) -> None:
        self.runtime = runtime.profiling_twin()
        self.evictions = 0
        self._primer = reading_launch(self.runtime, PRIMER_BYTES)
        self._eviction: Launch | None = None

    def time_us(self, launches: Sequence[Launch], *, cold: bool = False) -> float:
        """Run launches once, one after the other, and return the time from the first start to the last end.

        Args:
            launches: What to time; a launch that needs another before it counts with it.
            cold: Whether to empty the caches first, on the device and outside the time.

        Raises:
            KernelError: A kernel failed.
            ProfileError: The device's clock is not to be believed.
        """
        before = self._evictor() if cold else self._primer
        self.evictions += cold
        begin_ns = self.runtime.now_ns()
        try:
            before()
            events = [event for launch in launches for event in _enqueue(launch)]
            self.runtime.finish()
        except OpenClError as error:
            raise KernelError(f"{launches[0].label!r} could not be timed: {error}.") from error
        host_us = (self.runtime.now_ns() - begin_ns) / 1e3
        elapsed_us = (kernel_times_ns(events[-1]).end - kernel_times_ns(events[0]).start) / 1e3
        if elapsed_us > CLOCK_SLACK * host_us:
            raise ProfileError(
                f"The clock jumped: the device says {elapsed_us:g} us and the host {host_us:g} us.",
                fix="Run `heterollm profile --update`.",
            )
        return elapsed_us

    def _evictor(self) -> Launch:
        if self._eviction is None:
            self._eviction = reading_launch(self.runtime, eviction_bytes(self.runtime.traits.cache_bytes))
        return self._eviction


def _enqueue(launch: Launch) -> list[object]:
    """Enqueue a launch and return the events of all its kernels."""
    return [kernel() for kernel in launch.parts]


_timers: weakref.WeakKeyDictionary[GpuRuntime, GpuTimer] = weakref.WeakKeyDictionary()


def gpu_timer(runtime: GpuRuntime) -> GpuTimer:
    """Return the timer of an opened device: there is one, since what it reads to empty caches is large."""
    if runtime not in _timers:
        _timers[runtime] = GpuTimer(runtime)
    return _timers[runtime]
