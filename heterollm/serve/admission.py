"""Admission of requests to the engine: places for sessions, queues of each tier, and refusals."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from heterollm.base import EngineError, HeteroLLMError
from heterollm.engine import TIERS, PromptTask, Scheduler, ServiceTier
from heterollm.text import TokenSequence

RESTART_S: Final = 10
"""Seconds after which a client may look for a server that has stopped."""


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


class Admission:
    """Lets tasks run whose sessions fit beside those of the running ones, the most urgent first.

    Args:
        scheduler: Runs them.
        places: Sessions at once. The last one is for the tier ``priority`` alone, if there are several.
        queue: Tasks of a tier that wait at most.
        need: Returns how many of the places the answers to a prompt take; answers share parts of a session.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        places: int,
        queue: int,
        need: Callable[[Sequence[TokenSequence]], float] = len,
    ) -> None:
        self._scheduler = scheduler
        self._need = need
        self._places = places
        self._queue = queue
        self._lock = threading.Lock()
        self._waiting: dict[ServiceTier, deque[PromptTask]] = {tier: deque() for tier in TIERS}
        self._running: dict[PromptTask, float] = {}
        """The tasks of the scheduler, with the time of their start."""
        self._mean_s = 1.0
        self._closed = False

    def room(self, tier: ServiceTier) -> int:
        """Return the most sessions that a task of a tier may need."""
        return self._places if tier == "priority" or self._places == 1 else self._places - 1

    def submit(self, tasks: Sequence[PromptTask]) -> None:
        """Queue tasks, all of them or none.

        Raises:
            BusyError: Too many wait, or the server stops.
        """
        with self._lock:
            if self._closed:
                raise stops()
            waiting = self._waiting[tasks[0].tier]
            if waiting and len(waiting) + len(tasks) > self._queue:
                retry_s = min(60, max(1, math.ceil(self._mean_s * len(waiting) / self._places)))
                raise BusyError(f"{len(waiting)} requests wait, and no more may.", retry_s=retry_s)
            waiting += tasks
            self._start()

    def cancel(self, tasks: Iterable[PromptTask]) -> None:
        """End tasks early; those that have ended stay as they are."""
        with self._lock:
            for task in tasks:
                task.cancelled = True
                if task in self._waiting[task.tier]:
                    self._waiting[task.tier].remove(task)
            self._start()
        self._scheduler.wake()

    def ended(self, task: PromptTask) -> None:
        """Give the places of a task to others."""
        with self._lock:
            self._mean_s += 0.1 * (time.monotonic() - self._running.pop(task) - self._mean_s)
            self._start()

    def counts(self) -> tuple[int, int]:
        """Return the numbers of tasks that run and that wait."""
        with self._lock:
            return len(self._running), sum(map(len, self._waiting.values()))

    @property
    def places(self) -> int:
        """Sessions at once."""
        return self._places

    @property
    def taken(self) -> float:
        """Places of the tasks that run."""
        with self._lock:
            return self._taken()

    def stop(self) -> None:
        """Tell the readers of all tasks that the server stops, and take no others."""
        with self._lock:
            self._closed = True
            waiting = [task for tasks in self._waiting.values() for task in tasks]
            for tasks in self._waiting.values():
                tasks.clear()
            for task in (*self._running, *waiting):
                task.cancelled = True
                task.fail(stops())
        self._scheduler.wake()

    def close(self) -> None:
        """End all tasks early with an error. May be called twice."""
        self.stop()
        self._scheduler.close()

    def _start(self) -> None:
        """Let waiting tasks run whose sessions fit."""
        taken = self._taken()
        for tier, waiting in self._waiting.items():
            while waiting:
                needed = self._need(waiting[0].answers)
                if taken + needed > self.room(tier):
                    return
                task = waiting.popleft()
                try:
                    self._scheduler.add(task)
                except EngineError as error:  # the model is closed
                    task.fail(error)
                else:
                    taken += needed
                    self._running[task] = time.monotonic()

    def _taken(self) -> float:
        return sum(self._need(task.answers) for task in self._running)


def stops() -> BusyError:
    """Return the error of requests to a server that stops."""
    return BusyError("The server stops.", retry_s=RESTART_S, code="server_stops")
