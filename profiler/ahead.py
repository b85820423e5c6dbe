"""The work that waits in a run of the profiler."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from heterollm.profiler.measure import Task


@dataclass(frozen=True, slots=True)
class Ahead:
    """Time of waiting tasks without builds, and of their builds by the prior."""

    task_s: float = 0.0
    build_s: float = 0.0

    @classmethod
    def of(cls, tasks: Iterable[Task]) -> Ahead:
        """Return the time of some tasks."""
        tasks = list(tasks)
        return cls(sum(task.estimate_s for task in tasks), sum(task.build_s for task in tasks))

    def without(self, task: Task) -> Ahead:
        """Return the time without one of the tasks."""
        return Ahead(max(0.0, self.task_s - task.estimate_s), max(0.0, self.build_s - task.build_s))
