"""A virtual clock: the control thread, a GPU queue and an NPU that share memory, event by event.

The control thread is the only one that moves time on: by what its calls cost, and by waiting. The GPU runs
its queue in order, the NPU one graph at a time while the control thread waits for it, as the executor does.
While both run, each goes on at the rate that the memory leaves it; rates are constant between events, so the
times are exact and equal runs take equal times.

A game beside the model takes the GPU for its frames, between kernels: none is left half done.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple, TypeAlias

from heterollm.kernels.sim.game import Game, GpuLoad

__all__ = ["ClockCosts", "GpuLoad", "Job", "Rates", "SimulatedClock", "Span", "SpanPart", "Totals"]

SpanPart: TypeAlias = Literal["host", "gpu", "npu", "game"]

Rates: TypeAlias = Callable[[float, float, bool, bool], tuple[float, float]]
"""Takes the GB/s that GPU and NPU would take alone, and whether each computes all the time; returns how fast
each goes on beside the other, as a fraction of its speed alone."""

NEVER: Final = math.inf


@dataclass(frozen=True, slots=True)
class ClockCosts:
    """What the control thread's calls cost, in microseconds.

    Args:
        submit_us: Processor time of enqueueing a kernel.
        refill_us: More until a kernel starts that is submitted to an empty queue.
        gap_us: Between two kernels of a busy queue.
        finish_us: The driver's blocking wait, after what it waits for is done.
        write_us: A copy through the driver, of any size.
        poll_us: One look at the state of an event.
        sleep_us: By how much a sleep comes back late.
        npu_start_share: Part of an NPU graph's fixed cost that is paid in any case. Behind a wait for the GPU
            the rest is hidden as far as the NPU was free for so long: a graph is started ahead.
    """

    submit_us: float
    refill_us: float
    gap_us: float
    finish_us: float
    write_us: float
    poll_us: float
    sleep_us: float
    npu_start_share: float


class Span(NamedTuple):
    """Something that a part did.

    Attributes:
        part: Which part.
        name: What.
        begin_us: When it began.
        end_us: When it ended.
        dram_bytes: What it read and wrote in memory.
    """

    part: SpanPart
    name: str
    begin_us: float
    end_us: float
    dram_bytes: float = 0.0


@dataclass(slots=True, eq=False)
class Job:
    """One kernel or one run of a graph.

    Args:
        name: What to call it.
        alone_us: Time that it takes with the memory to itself.
        dram_bytes: What it reads and writes in memory, spread over that time but for ``fixed_us``.
        fixed_us: At its begin, without any traffic.
        arithmetic_bound: Whether it computes all the time, rather than wait for memory.
    """

    name: str
    alone_us: float
    dram_bytes: float = 0.0
    fixed_us: float = 0.0
    arithmetic_bound: bool = False
    queued_us: float = 0.0
    ready_us: float = 0.0
    begin_us: float = NEVER
    end_us: float = NEVER
    left_us: float = 0.0
    fixed_left_us: float = 0.0

    def start(self, at_us: float) -> None:
        """Note that it starts."""
        self.begin_us = at_us
        self.fixed_left_us = min(self.fixed_us, self.alone_us)
        self.left_us = self.alone_us - self.fixed_left_us

    @property
    def demand_gbps(self) -> float:
        """What it takes of the memory now, if it has it to itself."""
        if self.fixed_left_us > 0 or self.left_us <= 0:
            return 0.0
        return self.dram_bytes / (self.alone_us - self.fixed_us) / 1e3


@dataclass(slots=True)
class Totals:
    """What was used so far, in microseconds and bytes.

    Attributes:
        busy_us: Time that each part worked; the control thread's polling counts as work.
        dram_bytes: Traffic of GPU and NPU.
        overhead_us: What handing over cost, by what it was: ``poll``, ``driver``, ``copy``, ``sleep`` of the
            control thread, and ``refill`` of the GPU.
        peak_gbps: Highest traffic of both.
        frame_us: How long each frame that the game drew took from when it was due.
        frames_due: How many frames were drawn or dropped.
    """

    busy_us: dict[SpanPart, float] = field(
        default_factory=lambda: {"host": 0.0, "gpu": 0.0, "npu": 0.0, "game": 0.0}
    )
    dram_bytes: float = 0.0
    overhead_us: dict[str, float] = field(default_factory=dict)
    peak_gbps: float = 0.0
    frame_us: list[float] = field(default_factory=list)
    frames_due: int = 0

    def copy(self) -> Totals:
        """Return these numbers as they are now."""
        return replace(
            self,
            busy_us=dict(self.busy_us),
            overhead_us=dict(self.overhead_us),
            frame_us=list(self.frame_us),
        )


class SimulatedClock:
    """The time of one simulated SoC.

    Args:
        costs: What calls cost.
        rates: How the parts share the memory.
        load: A game beside it.

    Attributes:
        now_us: The control thread's time.
        load: The game beside the model.
        totals: What was used so far.
        spans: What each part did, where :attr:`recording` is on.
        recording: Whether spans are kept.
    """

    def __init__(self, costs: ClockCosts, rates: Rates, load: GpuLoad | None = None) -> None:
        self.costs = costs
        self.now_us = 0.0
        self.totals = Totals()
        self.spans: list[Span] = []
        self.recording = False
        self._rates = rates
        self.load = load
        self._at_us = 0.0
        self._queue: deque[Job] = deque()
        self._npu: Job | None = None
        self._gpu_free_us = 0.0
        self._asked = False
        self._npu_free_us = 0.0
        self._by_driver = False
        self._copies_back = False
        self._game = None if load is None else Game(load)

    # -- the control thread --------------------------------------------------------------------------

    def work(self, duration_us: float, name: str, overhead: str = "") -> None:
        """Let the control thread compute for some time; ``overhead`` files it under that name too."""
        if duration_us <= 0:
            return
        begin_us = self.now_us
        self.now_us += duration_us
        self.totals.busy_us["host"] += duration_us
        self._count(overhead, duration_us)
        self._keep(Span("host", name, begin_us, self.now_us))

    def sleep(self, duration_us: float) -> None:
        """Let the control thread sleep, and come back late."""
        begin_us = self.now_us
        self.now_us += duration_us + self.costs.sleep_us
        self._asked = True
        self._keep(Span("host", "sleep", begin_us, self.now_us))

    def submit(self, job: Job) -> Job:
        """Enqueue a kernel."""
        self._take_back()
        self._settle()
        job.queued_us = self.now_us
        self.work(self.costs.submit_us, "submit")
        self._settle()
        job.ready_us = self.now_us
        if not self._queue:
            job.ready_us += self.costs.refill_us
            self._count("refill", self.costs.refill_us)
        self._queue.append(job)
        return job

    def last_job(self) -> Job | None:
        """Return the queue's last job that is not done; None where all is."""
        self._settle()
        return self._queue[-1] if self._queue else None

    def is_done(self, job: Job | None) -> bool:
        """Look whether a job is done, which takes the time of a poll; None stands for one that is."""
        self.work(self.costs.poll_us, "poll", "poll")
        self._settle()
        self._asked |= (done := job is None or job.end_us <= self.now_us)
        return done

    def poll_on(self) -> None:
        """Look again and again until the GPU comes to the end of a job."""
        self._settle()
        if self._queue:
            begin_us = self.now_us
            self._run(NEVER, self._queue[0])
            self.now_us = max(self.now_us, self._at_us)
            self._asked = True
            self.totals.busy_us["host"] += self.now_us - begin_us
            self._keep(Span("host", "poll", begin_us, self.now_us))

    def wait_for(self, job: Job | None) -> None:
        """Block in the driver until a job is done."""
        self._settle()
        if job is None or job.end_us <= self.now_us:
            self.work(self.costs.poll_us, "poll", "poll")
            return
        self._block(job)
        self.work(self.costs.finish_us, "driver", "driver")

    def wait_idle(self) -> None:
        """Block in the driver until the queue is done; where it is, this is a mere look."""
        self._take_back()
        self.wait_for(self.last_job())

    def copy(self) -> None:
        """Copy something through the driver, after all that is enqueued."""
        last = self.last_job()
        if last is not None:
            self._block(last)
        self.work(self.costs.write_us, "copy", "copy")

    def hand_over_by_driver(self) -> None:
        """Copy the NPU's input through the driver, and its output back before the next kernel."""
        self.work(self.costs.write_us, "copy", "copy")
        self._by_driver = True

    def run_npu(self, job: Job) -> None:
        """Run a graph on the NPU and wait for it; the GPU goes on with its queue meanwhile."""
        self._settle()
        free_us = self.now_us - self._npu_free_us if self._asked else 0.0
        hidden_us = min(free_us, job.fixed_us * (1.0 - self.costs.npu_start_share))
        job.alone_us -= hidden_us
        job.fixed_us -= hidden_us
        job.queued_us = job.ready_us = self.now_us
        job.start(self._at_us)
        self._npu = job
        self._run(NEVER, job)
        self.now_us = self._npu_free_us = job.end_us
        self._asked = False
        self._keep(Span("host", "wait", job.begin_us, job.end_us))
        self._copies_back |= self._by_driver
        self._by_driver = False

    # -- the devices ---------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Let the devices come up to the control thread's time."""
        if self._at_us >= self.now_us:
            return
        if self._queue or self._npu is not None or self.load is not None:
            self._run(self.now_us, None)
        else:
            self._at_us = self.now_us

    def _take_back(self) -> None:
        """Copy the NPU's output back, if it is owed: the queue is in order, so behind the GPU's own part."""
        if self._copies_back:
            self._copies_back = False
            last = self.last_job()
            if last is not None:
                self._block(last)
            self.work(self.costs.finish_us, "driver", "driver")
            self.work(self.costs.write_us, "copy", "copy")

    def _block(self, job: Job) -> None:
        begin_us = self.now_us
        self._run(NEVER, job)
        self.now_us = max(self.now_us, job.end_us)
        self._asked = True
        self._keep(Span("host", "wait", begin_us, self.now_us))

    def _run(self, until_us: float, stop: Job | None) -> None:
        """Let the devices run until a time, or until a job has ended."""
        while (stop.end_us > self._at_us) if stop is not None else (self._at_us < until_us):
            self._step(until_us)

    def _step(self, until_us: float) -> None:
        """Go on to the next event; this is where a simulation spends its time."""
        at_us, npu, game = self._at_us, self._npu, self._game
        next_us = until_us
        gpu = self._queue[0] if self._queue else None
        if game is not None and (gpu is None or gpu.begin_us == NEVER):
            # No kernel runs: a frame that is due goes before the next one.
            next_us = min(next_us, game.next_us(at_us))
            if game.is_drawing:
                gpu = None
        if gpu is not None and gpu.begin_us == NEVER:
            start_us = max(gpu.ready_us, self._gpu_free_us)
            if start_us <= at_us:
                gpu.start(at_us)
            else:
                next_us, gpu = min(next_us, start_us), None
        gpu_gbps = 0.0 if gpu is None else gpu.demand_gbps
        npu_gbps = 0.0 if npu is None else npu.demand_gbps
        gpu_rate = npu_rate = 1.0
        if gpu is not None and npu is not None and npu.fixed_left_us <= 0:
            gpu_rate, npu_rate = self._rates(gpu_gbps, npu_gbps, gpu.arithmetic_bound, npu.arithmetic_bound)
        gpu_end_us = NEVER if gpu is None else at_us + (gpu.fixed_left_us or gpu.left_us) / gpu_rate
        npu_end_us = NEVER if npu is None else at_us + (npu.fixed_left_us or npu.left_us) / npu_rate
        next_us = min(next_us, gpu_end_us, npu_end_us)
        elapsed_us = max(0.0, next_us - at_us)
        traffic_gbps = gpu_gbps * gpu_rate + npu_gbps * npu_rate
        if traffic_gbps > self.totals.peak_gbps and elapsed_us > 0:
            self.totals.peak_gbps = traffic_gbps
        self._at_us = next_us
        if game is not None and game.is_drawing:
            self._draw(game, elapsed_us)
        if gpu is not None and _go_on(gpu, elapsed_us * gpu_rate, next_us >= gpu_end_us):
            self._queue.popleft()
            self._end(gpu, "gpu")
            self._gpu_free_us = next_us + self.costs.gap_us
        if npu is not None and _go_on(npu, elapsed_us * npu_rate, next_us >= npu_end_us):
            self._npu = None
            self._end(npu, "npu")

    def _end(self, job: Job, part: SpanPart) -> None:
        job.end_us = self._at_us
        self.totals.dram_bytes += job.dram_bytes
        self.totals.busy_us[part] += job.end_us - job.begin_us
        self._keep(Span(part, job.name, job.begin_us, job.end_us, job.dram_bytes))

    def _draw(self, game: Game, elapsed_us: float) -> None:
        """Note that the game has drawn for so long."""
        self.totals.busy_us["game"] += elapsed_us
        if self._at_us >= game.end_us:
            self.totals.frame_us.append(game.end_us - game.due_us)
            self._keep(Span("game", "frame", game.begin_us, game.end_us))
            self.totals.frames_due += game.end_frame()

    def _count(self, overhead: str, duration_us: float) -> None:
        if overhead:
            self.totals.overhead_us[overhead] = self.totals.overhead_us.get(overhead, 0.0) + duration_us

    def _keep(self, span: Span) -> None:
        if self.recording and span.end_us > span.begin_us:
            self.spans.append(span)


def _go_on(job: Job, done_us: float, ended: bool) -> bool:
    """Let a job go on by so much of its time alone; return whether it is done.

    Args:
        job: The job.
        done_us: Of its time alone.
        ended: Whether this is the end of its fixed or of its other part; sums of times do not tell exactly.
    """
    if job.fixed_left_us > 0:
        job.fixed_left_us = 0.0 if ended else max(0.0, job.fixed_left_us - done_us)
        return job.fixed_left_us <= 0 and job.left_us <= 0
    job.left_us = 0.0 if ended else max(0.0, job.left_us - done_us)
    return ended
