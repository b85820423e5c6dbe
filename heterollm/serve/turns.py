"""Turns of requests on the engine thread: tiers, fair shares, limits, and pauses of slow readers."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Literal, Protocol, TypeAlias, get_args

from heterollm.base import HeteroLLMError

ServiceTier: TypeAlias = Literal["priority", "default", "flex"]
TIERS: Final[tuple[ServiceTier, ...]] = get_args(ServiceTier)
"""From the most to the least urgent, named as OpenAI's service tiers."""

TURN_S: Final = 0.05
"""Time that a prompt may take before another request of its tier has a turn."""

SHORT_TOKENS: Final = 64
"""Tokens of a prompt that no request of its tier interrupts: it ends soon."""

RESTART_S: Final = 10
"""Seconds after which a client may look for a server that has stopped."""

SLICE_S: Final = 0.25
"""Time after which other calls to the engine thread have a turn."""


class BusyError(HeteroLLMError):
    """Too many requests wait, or the server stops.

    Args:
        message: The number of requests.
        retry_s: Seconds after which a place is likely.
        code: A word for programs.
    """

    def __init__(self, message: str, *, retry_s: int, code: str = "queue_full") -> None:
        super().__init__(message, fix=f"Try again in {retry_s} s.")
        self.retry_s = retry_s
        self.code = code


class Sink(Protocol):
    """Takes the events of a job, from the engine thread."""

    @property
    def full(self) -> bool:
        """Whether the reader is so slow that the job has to wait."""

    def put(self, event: Any, /) -> None:  # noqa: ANN401 - steps, results, errors
        """Take one event."""


class PromptJob:
    """The work of one prompt.

    Args:
        tier: Its urgency.
        places: Sessions that it needs.
        work: Returns an iterator whose every step is a turn; called and iterated on the engine thread.
        sink: Takes an error that ends the work, and tells whether the reader is slow.
    """

    def __init__(
        self, tier: ServiceTier, places: int, work: Callable[[], Iterator[None]], sink: Sink
    ) -> None:
        self.tier = tier
        self.places = places
        self.cancelled = threading.Event()
        self.submitted_s = time.monotonic()
        self.started_s: float | None = None
        self._make = work
        self._work: Iterator[None] | None = None
        self._sink = sink

    @property
    def ready(self) -> bool:
        """Whether a turn makes sense now."""
        return self.cancelled.is_set() or not self._sink.full

    def turn(self) -> bool:
        """Run one turn on the engine thread; return whether the job has ended."""
        try:
            if self._work is None:
                self.started_s = time.monotonic()
                self._work = self._make()
            if self.cancelled.is_set():
                self.close()
                return True
            next(self._work)
        except StopIteration:
            return True
        except Exception as error:  # noqa: BLE001 - the reader gets it
            self._sink.put(error)
            return True
        except BaseException as error:  # noqa: BLE001 - a library's panic, which would end the reader's loop
            self._sink.put(RuntimeError(f"{type(error).__name__}: {error}"))
            return True
        return False

    def fail(self, error: Exception) -> None:
        """Tell the reader an error, and end the work at its next turn."""
        self.cancelled.set()
        self._sink.put(error)

    def close(self) -> None:
        """End the work early, on the engine thread."""
        close = getattr(self._work, "close", None)
        if close is not None:
            close()


class Turns:
    """Runs jobs in turns on the engine thread.

    A job runs while no job of a more urgent tier can. Jobs of one tier take turns: a token each, or some time
    of a prompt. A job starts when its sessions fit beside those of the running ones.

    Args:
        on_engine_thread: Runs a call on the engine thread and returns when it has ended.
        places: Sessions at once. The last one is for the tier ``priority`` alone, if there are several.
        queue: Jobs of a tier that wait at most.
    """

    def __init__(
        self, on_engine_thread: Callable[[Callable[[], None]], object], *, places: int, queue: int
    ) -> None:
        self._on_engine_thread = on_engine_thread
        self._places = places
        self._queue = queue
        self._changed = threading.Condition()
        self._waiting: dict[ServiceTier, deque[PromptJob]] = {tier: deque() for tier in TIERS}
        self._active: dict[ServiceTier, deque[PromptJob]] = {tier: deque() for tier in TIERS}
        self._current: PromptJob | None = None
        self._turn_ends_s = 0.0
        self._mean_s = 1.0
        self._closed = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="heterollm-turns", daemon=True)
        self._thread.start()

    # -- any thread ----------------------------------------------------------------------------------

    def room(self, tier: ServiceTier) -> int:
        """Return the most sessions that a job of a tier may need."""
        return self._places if tier == "priority" or self._places == 1 else self._places - 1

    def submit(self, jobs: Sequence[PromptJob]) -> None:
        """Queue jobs, all of them or none.

        Raises:
            BusyError: Too many wait, or the server stops.
        """
        with self._changed:
            if self._closed:
                raise _stops()
            self._start_jobs()
            waiting = self._waiting[jobs[0].tier]
            if waiting and len(waiting) + len(jobs) > self._queue:
                self._refuse(len(waiting))
            waiting += jobs
            self._start_jobs()
            self._changed.notify()

    def _refuse(self, waiting: int) -> None:
        retry_s = min(60, max(1, math.ceil(self._mean_s * waiting / self._places)))
        raise BusyError(f"{waiting} requests wait, and no more may.", retry_s=retry_s)

    def cancel(self, jobs: Iterable[PromptJob]) -> None:
        """End jobs early; those that have ended stay as they are."""
        with self._changed:
            for job in jobs:
                job.cancelled.set()
                if job in self._waiting[job.tier]:
                    self._waiting[job.tier].remove(job)
            self._changed.notify()

    def wake(self) -> None:
        """Look again for jobs that are ready."""
        with self._changed:
            self._changed.notify()

    def counts(self) -> tuple[int, int]:
        """Return the numbers of jobs that run and that wait."""
        with self._changed:
            return sum(map(len, self._active.values())), sum(map(len, self._waiting.values()))

    @property
    def failure(self) -> Exception | None:
        """The error after which the engine thread takes no more jobs."""
        return self._failure

    def close(self) -> None:
        """End all jobs early with an error, and then the thread. May be called twice."""
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        """Tell the readers of all jobs that the server stops, and take no others."""
        self._stop(_stops())

    def _stop(self, error: Exception) -> None:
        with self._changed:
            self._closed = True
            for jobs in self._active.values():
                for job in jobs:
                    job.fail(error)
            for waiting in self._waiting.values():
                while waiting:
                    waiting.popleft().fail(error)
            self._changed.notify()

    # -- the engine thread ---------------------------------------------------------------------------

    def wanted(self, tokens: int) -> bool:
        """Whether the job whose turn it is, in a prompt of so many tokens, should let others have theirs."""
        current = self._current
        assert current is not None  # a job asks during its turn
        if current.cancelled.is_set():
            return True
        with self._changed:
            self._start_jobs()
            for tier in TIERS[: TIERS.index(current.tier)]:
                if any(job.ready for job in self._active[tier]):
                    return True
            if tokens <= SHORT_TOKENS or time.monotonic() < self._turn_ends_s:
                return False
            return any(job.ready for job in self._active[current.tier] if job is not current)

    def _slice(self) -> None:
        """Run turns until no job is ready, or other calls should have a turn."""
        ends_s = time.monotonic() + SLICE_S
        while time.monotonic() < ends_s and (job := self._next()) is not None:
            self._current = job
            self._turn_ends_s = time.monotonic() + TURN_S
            if job.turn():
                self._end(job)

    def _next(self) -> PromptJob | None:
        """Return the job whose turn it is, and put it behind the others of its tier."""
        with self._changed:
            self._start_jobs()
            for jobs in self._active.values():
                for _ in range(len(jobs)):
                    jobs.rotate(-1)
                    if jobs[-1].ready:
                        return jobs[-1]
        return None

    def _start_jobs(self) -> None:
        """Let waiting jobs run whose sessions fit, the most urgent first."""
        taken = sum(job.places for jobs in self._active.values() for job in jobs)
        for tier, waiting in self._waiting.items():
            while waiting:
                if taken + waiting[0].places > self.room(tier):
                    return
                job = waiting.popleft()
                taken += job.places
                self._active[tier].append(job)

    def _end(self, job: PromptJob) -> None:
        with self._changed:
            self._active[job.tier].remove(job)
            if job.started_s is not None:
                self._mean_s += 0.1 * (time.monotonic() - job.started_s - self._mean_s)

    # -- the thread that hands slices to the engine thread -------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._any_ready())
                if self._closed and not any(self._active.values()):
                    return
            try:
                self._on_engine_thread(self._slice)
            except Exception as error:  # noqa: BLE001 - of the closed model; readers must not wait for ever
                self._failure = error
                self._stop(error)
                return

    def _any_ready(self) -> bool:
        self._start_jobs()
        return any(job.ready for jobs in self._active.values() for job in jobs)


def _stops() -> BusyError:
    return BusyError("The server stops.", retry_s=RESTART_S, code="server_stops")
