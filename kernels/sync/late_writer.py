"""Kernels of a given duration, for the profiler and the check of slots.

The delay lies inside the kernel, so that the data really comes late; a delay in Python would prove nothing
about waits.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np

from heterollm.kernels.gpu import SOURCES, GpuRuntime, GpuWork, Launch, SharedArray

PROBE_TURNS: Final = 100_000
PROBES: Final = 8
TURN_FLOPS: Final = 1000
"""Operations of one turn of the loop on a simulated device: some nanoseconds."""


class LateWriter:
    """Makes kernels that compute for about a given time and then fill ``data`` with the number of their run.

    Args:
        runtime: The device.
        words: Elements of ``data``.

    Attributes:
        data: ``[words]`` uint32, complete only at the end of a run.
    """

    def __init__(self, runtime: GpuRuntime, words: int = 64) -> None:
        self._runtime = runtime
        self.data: SharedArray = runtime.shared((words,), np.uint32)
        self._rounds = runtime.shared((1,), np.uint32)
        self.runs = 0
        self.turns_per_us = self._calibrate()

    def launch(self, duration_us: float) -> Launch:
        """Return a kernel that takes about ``duration_us`` at the machine's present speed."""
        return self._launch(max(1, int(duration_us * self.turns_per_us)))

    def number(self) -> int:
        """Return the number of runs; the queue must be finished."""
        return int(self._rounds.read()[0])

    def _launch(self, turns: int) -> Launch:
        kernel = self._runtime.kernel(SOURCES, "late_write")
        words = np.int32(self.data.array.size)
        arguments = (self.data, words, self._rounds, np.int32(min(turns, 2**31 - 1)))
        work = functools.partial(_late_work, turns, self.data.array.nbytes)
        return self._runtime.launch(kernel, arguments, (1,), (1,), "late write", work=work)

    def _calibrate(self) -> float:
        """Return loop turns per microsecond by the minimum times of two lengths: launch costs cancel."""
        times_us = []
        for turns in (PROBE_TURNS, 3 * PROBE_TURNS):
            launch = self._launch(turns)
            samples = []
            for _ in range(PROBES + 1):
                begin = self._runtime.now_ns()
                launch()
                self._runtime.finish()
                samples.append((self._runtime.now_ns() - begin) / 1e3)
            times_us.append(min(samples[1:]))
        return 2 * PROBE_TURNS / max(times_us[1] - times_us[0], 1.0)


def _late_work(turns: int, written_bytes: int) -> GpuWork:
    return GpuWork("elementwise", TURN_FLOPS * turns, 0, written_bytes)
