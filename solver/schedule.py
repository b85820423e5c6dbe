"""The order in which the chunks of a prompt run through the layers (llm.npu, section 3.4).

A chunk is a sequence of stages, each on one processor. A processor that would wait for one chunk can run a
stage of another: :func:`schedule_chunks` chooses which, from predicted times. A stage needs others of its own
chunk, equation (3), and attention also needs the keys and values of all chunks before it, equation (2). A
processor runs one stage at a time, equation (4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, Literal, TypeAlias

from heterollm.base import PlanError
from heterollm.profiler.records import Processor

__all__ = ["EXACT_STAGES", "POLICIES", "Schedule", "SchedulePolicy", "Stage", "schedule_chunks"]

SchedulePolicy: TypeAlias = Literal["in_order", "out_of_order", "exact"]
"""``in_order`` runs chunk after chunk. ``out_of_order`` takes the shortest schedule of some priority rules,
equation (5) among them. ``exact`` searches all schedules; it suits small cases only."""

POLICIES: Final[tuple[SchedulePolicy, ...]] = ("in_order", "out_of_order", "exact")

EXACT_STAGES: Final = 24
"""Stages of all chunks together up to which the exact search ends within seconds."""

LAGS: Final = (2, 3)
"""Stages between chunks that are kept apart: of 0 to 26 these left the shortest bubbles. Without a lag chunks
meet at the same stage, and with a long one there are too few at once."""

_Rule: TypeAlias = Callable[[Sequence[int], Sequence[int]], int]
"""Returns which of the ready stages, of one processor, runs next, from the unmet needs of every stage."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive steps of one chunk on one processor.

    Args:
        processor: The processor that runs it.
        time_us: Predicted time.
        needs: Chunk and index of the stages that must end first: earlier ones of this chunk or of
            chunks before.
    """

    processor: Processor
    time_us: float
    needs: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """Stages in the order of their beginnings.

    Args:
        order: Chunk and index of each stage.
        begins_us: Predicted beginning of each stage.
        elapsed_us: Predicted end of the last stage.
        busy_us: Predicted time that each processor computes.
    """

    order: tuple[tuple[int, int], ...]
    begins_us: tuple[float, ...]
    elapsed_us: float
    busy_us: dict[Processor, float]

    def bubble_fraction(self, processor: Processor) -> float:
        """Return the fraction of the time during which a processor has nothing to do."""
        return 1.0 - self.busy_us[processor] / self.elapsed_us if self.elapsed_us else 0.0


def schedule_chunks(chunks: Sequence[Sequence[Stage]], policy: SchedulePolicy = "out_of_order") -> Schedule:
    """Return when each stage of each chunk runs.

    Args:
        chunks: The stages of each chunk in order.
        policy: How to decide.

    Raises:
        PlanError: A stage needs a later one, or there are too many stages for the exact search.
    """
    graph = _Graph(chunks)
    in_order = graph.in_order()
    if policy == "in_order":
        return graph.schedule(in_order)
    rules = (graph.stall_relief, graph.longest_rest, *(graph.staggered(lag) for lag in LAGS))
    found = graph.schedule(min((in_order, *map(graph.run, rules)), key=graph.elapsed_us))
    return graph.search(found) if policy == "exact" else found


class _Graph:
    """Stages with their dependencies, numbered chunk after chunk."""

    def __init__(self, chunks: Sequence[Sequence[Stage]]) -> None:
        self.places = [(chunk, index) for chunk, stages in enumerate(chunks) for index in range(len(stages))]
        self.stages = [stage for stages in chunks for stage in stages]
        numbers = {place: number for number, place in enumerate(self.places)}
        self.times_us = [stage.time_us for stage in self.stages]
        self.processors = [stage.processor for stage in self.stages]
        self.needs = [[numbers.get(need, len(numbers)) for need in stage.needs] for stage in self.stages]
        self.dependents: list[list[int]] = [[] for _ in self.stages]
        for number, needs in enumerate(self.needs):
            if needs and max(needs) >= number:
                raise PlanError(
                    f"Stage {self.places[number]} of the schedule needs {self.stages[number].needs}, "
                    "which are not all before it."
                )
            for need in needs:
                self.dependents[need].append(number)
        # Longest path from the beginning of each stage to the end of the prompt.
        self.tail_us = [0.0] * len(self.stages)
        for number in reversed(range(len(self.stages))):
            after = max((self.tail_us[one] for one in self.dependents[number]), default=0.0)
            self.tail_us[number] = self.stages[number].time_us + after

    # -- priority rules ---------------------------------------------------------------------------------

    def longest_rest(self, ready: Sequence[int], _: Sequence[int]) -> int:
        """Prefer the stage with the longest chain behind it."""
        return _preferred(ready, self.tail_us)

    def staggered(self, lag: int) -> _Rule:
        """Prefer the chunk that is furthest behind, if each is due so many stages behind the one before."""
        priorities = [-index - lag * chunk for chunk, index in self.places]
        return lambda ready, _: _preferred(ready, priorities)

    def stall_relief(self, ready: Sequence[int], missing: Sequence[int]) -> int:
        """Prefer the stage that gives the NPU the most work, or the GPU the least: equation (5)."""
        sign = 1.0 if self.processors[ready[0]] == "gpu" else -1.0
        released_us = {
            number: sign * sum([self.times_us[one] for one in self.dependents[number] if missing[one] == 1])
            for number in ready
        }
        return _preferred(ready, released_us)

    # -- beginnings of all stages, by number ------------------------------------------------------------

    def run(self, rule: _Rule) -> dict[int, float]:
        """Return when stages begin if an idle processor takes the ready stage that a rule prefers."""
        missing = [len(needs) for needs in self.needs]
        ready: dict[Processor, list[int]] = {"npu": [], "gpu": []}
        for one, processor in enumerate(self.processors):
            if not missing[one]:
                ready[processor].append(one)
        running: list[tuple[float, int]] = []
        idle: set[Processor] = {"gpu", "npu"}
        begins_us: dict[int, float] = {}
        now_us = 0.0
        for _ in self.stages:
            for processor, waiting in ready.items():
                if waiting and processor in idle:
                    best = rule(waiting, missing) if len(waiting) > 1 else waiting[0]
                    waiting.remove(best)
                    idle.remove(processor)
                    begins_us[best] = now_us
                    heappush(running, (now_us + self.times_us[best], best))
            now_us, ended = heappop(running)
            idle.add(self.processors[ended])
            for one in self.dependents[ended]:
                missing[one] -= 1
                if not missing[one]:
                    ready[self.processors[one]].append(one)
        return begins_us

    def in_order(self) -> dict[int, float]:
        """Return when stages begin if each processor finishes a chunk before it begins the next."""
        free_us: dict[Processor, float] = {"gpu": 0.0, "npu": 0.0}
        ends_us: list[float] = []
        begins_us: dict[int, float] = {}
        for number, processor in enumerate(self.processors):
            needed_us = [ends_us[need] for need in self.needs[number]]
            begins_us[number] = max([free_us[processor], *needed_us])
            free_us[processor] = begins_us[number] + self.times_us[number]
            ends_us.append(free_us[processor])
        return begins_us

    # -- schedules --------------------------------------------------------------------------------------

    def elapsed_us(self, begins_us: dict[int, float]) -> float:
        """Return the end of the last stage."""
        return max((begin + self.times_us[one] for one, begin in begins_us.items()), default=0.0)

    def search(self, best: Schedule) -> Schedule:
        """Return a shortest schedule, by branch and bound from the given one.

        Branches are those of Giffler and Thompson (1960): the processor of the stage that could end first
        runs one of the stages that could begin before that end.
        """
        if len(self.stages) > EXACT_STAGES:
            raise PlanError(
                f"{len(self.stages)} stages are too many for the exact search.",
                fix=f"Use at most {EXACT_STAGES}, or the policy out_of_order.",
            )
        seen: dict[frozenset[int], list[list[float]]] = {}
        ends: dict[int, float] = {}
        free_us: dict[Processor, float] = {"gpu": 0.0, "npu": 0.0}
        bound = best

        def dominated() -> bool:
            """Return whether an equal set of stages ended no later before, as far as later stages see."""
            done = frozenset(ends)
            needed = (one for one in sorted(done) if not done.issuperset(self.dependents[one]))
            now = [free_us["gpu"], free_us["npu"], *(ends[one] for one in needed)]
            known = seen.setdefault(done, [])
            if any(all(a <= b for a, b in zip(one, now, strict=True)) for one in known):
                return True
            known.append(now)
            return False

        def visit() -> None:
            nonlocal bound
            if len(ends) == len(self.stages):
                begins_us = {one: end - self.stages[one].time_us for one, end in ends.items()}
                bound = min(bound, self.schedule(begins_us), key=lambda one: one.elapsed_us)
                return
            begin_us = {
                one: max([free_us[stage.processor], *(ends[need] for need in self.needs[one])])
                for one, stage in enumerate(self.stages)
                if one not in ends and all(need in ends for need in self.needs[one])
            }
            rest_us = {
                processor: sum(
                    stage.time_us
                    for one, stage in enumerate(self.stages)
                    if one not in ends and stage.processor == processor
                )
                for processor in free_us
            }
            least_us = max(
                max(begin + self.tail_us[one] for one, begin in begin_us.items()),
                max(free_us[processor] + rest for processor, rest in rest_us.items()),
            )
            if least_us >= bound.elapsed_us or dominated():
                return
            first = min(begin_us, key=lambda one: begin_us[one] + self.stages[one].time_us)
            processor, limit_us = self.stages[first].processor, begin_us[first] + self.stages[first].time_us
            options = [
                one
                for one, begin in begin_us.items()
                if self.stages[one].processor == processor and (begin < limit_us or one == first)
            ]
            before_us = free_us[processor]
            for one in sorted(options, key=lambda one: -self.tail_us[one]):
                ends[one] = free_us[processor] = begin_us[one] + self.stages[one].time_us
                visit()
                del ends[one]
                free_us[processor] = before_us

        visit()
        return bound

    def schedule(self, begins_us: dict[int, float]) -> Schedule:
        """Return the schedule of these beginnings."""
        order = sorted(begins_us, key=lambda one: (begins_us[one], one))
        busy_us: dict[Processor, float] = {"gpu": 0.0, "npu": 0.0}
        for stage in self.stages:
            busy_us[stage.processor] += stage.time_us
        return Schedule(
            tuple(self.places[one] for one in order),
            tuple(begins_us[one] for one in order),
            self.elapsed_us(begins_us),
            busy_us,
        )


def _preferred(ready: Sequence[int], priorities: Sequence[float] | Mapping[int, float]) -> int:
    """Return the stage of highest priority; of equal ones the first."""
    return max(sorted(ready), key=priorities.__getitem__)
