"""A piece of profiling work: what it will have measured, and the call that measures it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from heterollm.profiler.records import Key, Record

__all__ = ["Task"]


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """One piece of work, small enough that losing it to an interruption does not matter.

    Args:
        stage: What to call the work in a progress bar; tasks of a stage follow one another.
        keys: What it records. A task whose keys are all known is not run again.
        run: Measures and returns the records, of ``keys`` and perhaps of more. An error that it raises is
            recorded under each of ``keys``.
        estimate_s: About how long it takes without builds of NPU graphs, for the time left and the budget.
        essential: Whether it runs even where the budget is spent: plans need it.
        graphs: NPU graphs that it builds.
        build_s: About how long these take to build, before a run has built any.
    """

    stage: str
    keys: tuple[Key, ...]
    run: Callable[[], Iterable[Record]]
    estimate_s: float
    essential: bool = False
    graphs: int = 0
    build_s: float = 0.0
