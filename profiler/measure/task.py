"""A task of the profiler: keys, and the call that measures their records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from heterollm.profiler.records import Key, Record


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """Measurements that are run together, few enough that an interruption loses little.

    Args:
        stage: Name in the progress bar; tasks of a stage follow one another.
        keys: Keys of its records. A task whose keys are all known is not run again.
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
