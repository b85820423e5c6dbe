"""Jobs of a simulated SoC, the costs of calls, and the resources that they used."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple, TypeAlias

SimulatedProcessor: TypeAlias = Literal["host", "gpu", "npu", "game"]

NEVER: Final = math.inf


@dataclass(frozen=True, slots=True)
class ClockCosts:
    """Costs of the control thread's calls in microseconds.

    Args:
        submit_us: CPU time of an enqueue.
        refill_us: Additional delay of a kernel that is enqueued to an empty queue.
        gap_us: Gap between two kernels of a busy queue.
        finish_us: Return of the driver's blocking wait after the event.
        write_us: A copy through the driver, of any size.
        poll_us: One poll of an event.
        sleep_us: Lateness of a sleep.
        frames_wait: Whether a frame waits for all kernels that were enqueued before it was due.
        npu_start_share: Fraction of an NPU graph's fixed cost that is never hidden. After a wait for the GPU
            the other fraction is hidden as far as the NPU was idle, since a graph is started ahead.
    """

    submit_us: float
    refill_us: float
    gap_us: float
    finish_us: float
    write_us: float
    poll_us: float
    sleep_us: float
    npu_start_share: float
    frames_wait: bool = False


class SimulatedSpan(NamedTuple):
    """One activity of a simulated processor.

    Attributes:
        processor: The processor.
        name: Name of the activity.
        begin_us: Start.
        end_us: End.
        dram_bytes: Memory traffic.
        start_us: Time at the begin in which a graph is started.
        copy_us: Time after that in which the driver copies a graph's inputs and outputs.
    """

    processor: SimulatedProcessor
    name: str
    begin_us: float
    end_us: float
    dram_bytes: float = 0.0
    start_us: float = 0.0
    copy_us: float = 0.0


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """One kernel or one run of a graph.

    Args:
        name: Name of the job.
        alone_us: Time with the memory to itself, ``fixed_us`` included.
        dram_bytes: Memory traffic, spread over the time after ``fixed_us``.
        fixed_us: Time at the start without traffic.
        arithmetic_bound: Whether it is compute-bound rather than memory-bound.
        copy_us: Part of ``fixed_us`` in which the driver copies, which is never hidden.
    """

    name: str
    alone_us: float
    dram_bytes: float = 0.0
    fixed_us: float = 0.0
    arithmetic_bound: bool = False
    copy_us: float = 0.0
    queued_us: float = 0.0
    ready_us: float = 0.0
    begin_us: float = NEVER
    end_us: float = NEVER
    left_us: float = 0.0
    fixed_left_us: float = 0.0

    def start(self, at_us: float) -> None:
        """Start the job."""
        self.begin_us = at_us
        self.fixed_left_us = min(self.fixed_us, self.alone_us)
        self.left_us = self.alone_us - self.fixed_left_us

    @property
    def demand_gbps(self) -> float:
        """Present memory traffic with the memory to itself."""
        if self.fixed_left_us > 0 or self.left_us <= 0:
            return 0.0
        return self.dram_bytes / (self.alone_us - self.fixed_us) / 1e3


@dataclass(slots=True)
class SimulatedTotals:
    """Resources used so far.

    Attributes:
        busy_us: Busy time of each processor; polling counts as busy.
        dram_bytes: Memory traffic of GPU and NPU.
        overhead_us: Synchronisation costs by type: ``poll``, ``driver``, ``copy``, ``map`` and ``sleep`` of
            the control thread, and ``refill`` of the GPU.
        peak_gbps: Highest traffic of GPU and NPU together.
        frame_us: Time of each frame of the game, from its due time to its end.
        frames_due: Number of frames drawn or dropped.
    """

    busy_us: dict[SimulatedProcessor, float] = field(
        default_factory=lambda: {"host": 0.0, "gpu": 0.0, "npu": 0.0, "game": 0.0}
    )
    dram_bytes: float = 0.0
    overhead_us: dict[str, float] = field(default_factory=dict)
    peak_gbps: float = 0.0
    frame_us: list[float] = field(default_factory=list)
    frames_due: int = 0

    def copy(self) -> SimulatedTotals:
        """Return a copy."""
        return replace(
            self, busy_us=dict(self.busy_us), overhead_us=dict(self.overhead_us), frame_us=list(self.frame_us)
        )
