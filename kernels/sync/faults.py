"""Kernels of a given duration, and signals that never come, for the profiler and for tests.

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
        self._rounds.acquire_to_read()
        number = int(self._rounds.array[0])
        self._rounds.release()
        return number

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


class StaleArray(SharedArray):
    """Memory that claims to be coherent, in which neither host nor device sees what the other has written.

    Args:
        memory: The memory that the device sees; the host sees a copy of its present content.
    """

    __slots__ = ("_of_device",)

    def __init__(self, memory: SharedArray) -> None:
        super().__init__(memory.array.copy(), memory.buffer, memory.queue, coherent=True)
        self._of_device = memory


class Gate:
    """A kernel that runs until the host opens the gate: a signal that never comes.

    The device must be coherent, so that a running kernel sees the host's writes. The kernel ends after some
    seconds in any case, so that a failed test leaves no device busy.

    Args:
        runtime: The device.
        turns: Polls of the gate after which the kernel ends.
    """

    def __init__(self, runtime: GpuRuntime, turns: int = 2_000_000_000) -> None:
        self._word = runtime.shared((64,), np.uint32)
        kernel = runtime.kernel(SOURCES, "stand_at_gate")
        self._launch = runtime.launch(kernel, (self._word, np.int32(turns)), (1,), (1,), "gate")

    def close(self) -> None:
        """Enqueue the kernel; later launches wait."""
        self._word.array[0] = 0
        self._launch()

    def open(self) -> None:
        """Let the kernel end."""
        self._word.array[0] = 1
