"""A virtual clock: discrete events of the control thread, a GPU queue and an NPU with shared memory.

Only the control thread advances time, by the costs of its calls and by waits. The GPU runs its queue in
order. The NPU runs one graph at a time while the control thread waits for it, as in the engine. While both
run, memory bandwidth limits their rates. Rates are constant between events, so times are exact and
reproducible.

A game can use the GPU for its frames, between kernels.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from heterollm.kernels.sim.game import Game, GpuLoad
from heterollm.kernels.sim.jobs import (
    NEVER,
    ClockCosts,
    SimulatedJob,
    SimulatedProcessor,
    SimulatedSpan,
    SimulatedTotals,
)

MemoryRates: TypeAlias = Callable[[float, float, bool, bool], tuple[float, float]]
"""Maps the GB/s that GPU and NPU use alone, and whether each is compute-bound, to the speed of each beside
the other, as a fraction of its speed alone."""


class SimulatedClock:
    """The time of one simulated SoC.

    Args:
        costs: Costs of calls.
        rates: Rates of GPU and NPU with shared memory.
        load: A game beside the model.

    Attributes:
        now_us: The control thread's time.
        load: The game beside the model.
        totals: Resources used so far.
        spans: Activities since :attr:`recording` is on.
        recording: Whether spans are kept.
    """

    def __init__(self, costs: ClockCosts, rates: MemoryRates, load: GpuLoad | None = None) -> None:
        self.costs = costs
        self.now_us = 0.0
        self.totals = SimulatedTotals()
        self.spans: list[SimulatedSpan] = []
        self.recording = False
        self._rates = rates
        self.load = load
        self._at_us = 0.0
        self._queue: deque[SimulatedJob] = deque()
        self._npu: SimulatedJob | None = None
        self._gpu_free_us = 0.0
        self._asked = False
        self._npu_free_us = 0.0
        self._by_driver = False
        self._copies_back = False
        self._game = None if load is None else Game(load)

    # -- the control thread --------------------------------------------------------------------------

    def work(self, duration_us: float, name: str, overhead: str = "") -> None:
        """Let the control thread compute; a non-empty ``overhead`` adds the time to that overhead."""
        if duration_us <= 0:
            return
        begin_us = self.now_us
        self.now_us += duration_us
        self.totals.busy_us["host"] += duration_us
        self._count(overhead, duration_us)
        self._keep("host", name, begin_us, self.now_us)

    def sleep(self, duration_us: float) -> None:
        """Let the control thread sleep, and return late."""
        begin_us = self.now_us
        self.now_us += duration_us + self.costs.sleep_us
        self._asked = True
        self._keep("host", "sleep", begin_us, self.now_us)

    def submit(self, job: SimulatedJob) -> SimulatedJob:
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

    def last_job(self) -> SimulatedJob | None:
        """Return the last unfinished job of the queue, or None."""
        self._settle()
        return self._queue[-1] if self._queue else None

    def is_done(self, job: SimulatedJob | None) -> bool:
        """Poll whether a job is done; None counts as done."""
        self.work(self.costs.poll_us, "poll", "poll")
        self._settle()
        self._asked |= (done := job is None or job.end_us <= self.now_us)
        return done

    def poll_on(self) -> None:
        """Poll until the GPU's present job ends."""
        self._settle()
        if self._queue:
            begin_us = self.now_us
            self._run(NEVER, self._queue[0])
            self.now_us = max(self.now_us, self._at_us)
            self._asked = True
            self.totals.busy_us["host"] += self.now_us - begin_us
            self._keep("host", "poll", begin_us, self.now_us)

    def wait_for(self, job: SimulatedJob | None) -> None:
        """Block in the driver until a job is done."""
        self._settle()
        if job is None or job.end_us <= self.now_us:
            self.work(self.costs.poll_us, "poll", "poll")
            return
        self._block(job)
        self.work(self.costs.finish_us, "driver", "driver")

    def wait_idle(self) -> None:
        """Block in the driver until the queue is empty."""
        self._take_back()
        self.wait_for(self.last_job())

    def copy(self) -> None:
        """Copy through the driver, behind the queue."""
        last = self.last_job()
        if last is not None:
            self._block(last)
        self.work(self.costs.write_us, "copy", "copy")

    def map(self, duration_us: float, *, waits: bool = True) -> None:
        """Map memory: block until the queue is empty if the map waits, then let the driver work."""
        last = self.last_job() if waits else None
        if last is not None:
            self._block(last)
        self.work(duration_us, "map", "map")

    def unmap(self, duration_us: float) -> None:
        """Enqueue an unmap, behind which kernels see the host's writes."""
        self.work(duration_us, "unmap", "map")

    def hand_over_by_driver(self) -> None:
        """Copy the NPU's input through the driver now, and its output back before the next kernel."""
        self.work(self.costs.write_us, "copy", "copy")
        self._by_driver = True

    def run_npu(self, job: SimulatedJob) -> None:
        """Run a graph on the NPU and wait for it, while the GPU runs its queue."""
        self._settle()
        free_us = self.now_us - self._npu_free_us if self._asked else 0.0
        hidden_us = min(free_us, (job.fixed_us - job.copy_us) * (1.0 - self.costs.npu_start_share))
        job.alone_us -= hidden_us
        job.fixed_us -= hidden_us
        job.queued_us = job.ready_us = self.now_us
        job.start(self._at_us)
        self._npu = job
        self._run(NEVER, job)
        self.now_us = self._npu_free_us = job.end_us
        self._asked = False
        self._keep("host", "wait", job.begin_us, job.end_us)
        self._copies_back |= self._by_driver
        self._by_driver = False

    # -- the devices ---------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Advance the devices to the control thread's time."""
        if self._at_us >= self.now_us:
            return
        if self._queue or self._npu is not None or self.load is not None:
            self._run(self.now_us, None)
        else:
            self._at_us = self.now_us

    def _take_back(self) -> None:
        """Copy the NPU's output back if that is pending, behind the GPU's queue, which is in order."""
        if self._copies_back:
            self._copies_back = False
            last = self.last_job()
            if last is not None:
                self._block(last)
            self.work(self.costs.finish_us, "driver", "driver")
            self.work(self.costs.write_us, "copy", "copy")

    def _block(self, job: SimulatedJob) -> None:
        begin_us = self.now_us
        self._run(NEVER, job)
        self.now_us = max(self.now_us, job.end_us)
        self._asked = True
        self._keep("host", "wait", begin_us, self.now_us)

    def _run(self, until_us: float, stop: SimulatedJob | None) -> None:
        """Run the devices until a time, or until the end of a job."""
        while (stop.end_us > self._at_us) if stop is not None else (self._at_us < until_us):
            self._step(until_us)

    def _step(self, until_us: float) -> None:
        """Advance to the next event. A simulation spends most of its time here."""
        at_us, npu, game = self._at_us, self._npu, self._game
        next_us = until_us
        gpu = self._queue[0] if self._queue else None
        if game is not None and (gpu is None or gpu.begin_us == NEVER):
            # No kernel runs, so a due frame takes precedence, unless it waits for earlier kernels.
            if gpu is None or game.is_drawing or not self._precedes(gpu, game):
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

    def _precedes(self, job: SimulatedJob, game: Game) -> bool:
        """Return whether a queued kernel goes before the game's due frame."""
        return self.costs.frames_wait and job.queued_us <= game.due_us <= self._at_us

    def _end(self, job: SimulatedJob, processor: SimulatedProcessor) -> None:
        job.end_us = self._at_us
        self.totals.dram_bytes += job.dram_bytes
        self.totals.busy_us[processor] += job.end_us - job.begin_us
        if self.recording and job.end_us > job.begin_us:
            times = job.begin_us, job.end_us, job.dram_bytes, job.fixed_us - job.copy_us, job.copy_us
            self.spans.append(SimulatedSpan(processor, job.name, *times))

    def _draw(self, game: Game, elapsed_us: float) -> None:
        """Advance the game's frame."""
        self.totals.busy_us["game"] += elapsed_us
        if self._at_us >= game.end_us:
            self.totals.frame_us.append(game.end_us - game.due_us)
            self._keep("game", "frame", game.begin_us, game.end_us)
            self.totals.frames_due += game.end_frame()

    def _count(self, overhead: str, duration_us: float) -> None:
        if overhead:
            self.totals.overhead_us[overhead] = self.totals.overhead_us.get(overhead, 0.0) + duration_us

    def _keep(self, processor: SimulatedProcessor, name: str, begin_us: float, end_us: float) -> None:
        if self.recording and end_us > begin_us:
            self.spans.append(SimulatedSpan(processor, name, begin_us, end_us))


def _go_on(job: SimulatedJob, done_us: float, ended: bool) -> bool:
    """Advance a job by ``done_us`` of its time alone; return whether it is done.

    ``ended`` marks the end of its fixed or of its other time, which rounded sums could miss.
    """
    if job.fixed_left_us > 0:
        job.fixed_left_us = 0.0 if ended else max(0.0, job.fixed_left_us - done_us)
        return job.fixed_left_us <= 0 and job.left_us <= 0
    job.left_us = 0.0 if ended else max(0.0, job.left_us - done_us)
    return ended
