"""The order in which the chunks of a prompt run through the layers (llm.npu, section 3.4).

A chunk is a sequence of stages, each on one processor. A processor that would wait for one chunk can run a
stage of another: :func:`schedule_chunks` chooses which, from predicted times. A stage needs others of its own
chunk, equation (3), and attention also needs the keys and values of all chunks before it, equation (2). A
processor runs one stage at a time, equation (4).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from heterollm.base import PlanError
from heterollm.profiler.records import Processor

SchedulePolicy: TypeAlias = Literal["in_order", "out_of_order", "exact"]
"""``in_order`` runs chunk after chunk. ``out_of_order`` takes the shortest schedule of some priority rules,
equation (5) among them. ``exact`` searches all schedules; it suits small cases only."""

POLICIES: Final[tuple[SchedulePolicy, ...]] = ("in_order", "out_of_order", "exact")

EXACT_STAGES: Final = 24
"""Stages of all chunks together up to which the exact search ends within seconds."""

LAGS: Final = (2, 3)
"""Stages between chunks that are kept apart: of 0 to 26 these left the shortest bubbles. Without a lag chunks
meet at the same stage, and with a long one there are too few at once."""

PROCESSORS: Final[tuple[Processor, ...]] = ("npu", "gpu")
"""In the order in which they take stages."""

_Key: TypeAlias = tuple[float, int]
_Rule: TypeAlias = Callable[[Sequence[int]], Callable[[int], _Key]]
"""Returns the function of a stage's number that gives its priority, for the unmet needs of every stage."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Consecutive steps of one chunk on one processor.

    Args:
        processor: The processor that runs it.
        time_us: Predicted time while the other processor is idle.
        needs: Chunk and index of the stages that must end first: earlier ones of this chunk or of
            chunks before.
        slowdown: Factor on the time while the other processor runs a stage that slows it.
        slows: Whether it slows a stage of the other processor.
        refill_us: Time that it takes longer where its processor was idle before.
    """

    processor: Processor
    time_us: float
    needs: tuple[tuple[int, int], ...] = ()
    slowdown: float = 1.0
    slows: bool = True
    refill_us: float = 0.0


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


def schedule_chunks(chunks: Sequence[Sequence[Stage]], policy: SchedulePolicy = "out_of_order") -> Schedule:
    """Return when each stage of each chunk runs.

    Args:
        chunks: The stages of each chunk in order.
        policy: How to decide; ``exact`` knows no slowdown and no refill.

    Raises:
        PlanError: A stage needs a later one, or there are too many stages for the exact search.
    """
    graph = _Graph(chunks)
    in_order = graph.run(None)
    if policy == "in_order":
        return in_order
    rules = (graph.stall_relief, graph.longest_rest, *(graph.staggered(lag) for lag in LAGS))
    found = min((in_order, *map(graph.run, rules)), key=lambda one: one.elapsed_us)
    return graph.search(found) if policy == "exact" else found


class _Graph:
    """Stages with their dependencies, numbered chunk after chunk."""

    def __init__(self, chunks: Sequence[Sequence[Stage]]) -> None:
        self.places = [(chunk, index) for chunk, stages in enumerate(chunks) for index in range(len(stages))]
        self.stages = [stage for stages in chunks for stage in stages]
        numbers = {place: number for number, place in enumerate(self.places)}
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

    # -- priority rules: the ready stage with the largest value runs next -------------------------------

    def longest_rest(self, _: Sequence[int]) -> Callable[[int], _Key]:
        """Prefer the stage with the longest chain behind it."""
        return [(tail_us, -number) for number, tail_us in enumerate(self.tail_us)].__getitem__

    def staggered(self, lag: int) -> _Rule:
        """Prefer the chunk that is furthest behind, if each is due so many stages behind the one before."""
        keys = [(-index - lag * chunk, -number) for number, (chunk, index) in enumerate(self.places)]
        return lambda _: keys.__getitem__

    def stall_relief(self, missing: Sequence[int]) -> Callable[[int], _Key]:
        """Prefer the stage that gives the NPU the most work, or the GPU the least: equation (5)."""

        def key(number: int) -> _Key:
            released_us = 0.0
            for one in self.dependents[number]:
                if missing[one] == 1:
                    released_us += self.stages[one].time_us
            return (released_us if self.stages[number].processor == "gpu" else -released_us), -number

        return key

    # -- schedules --------------------------------------------------------------------------------------

    def run(self, rule: _Rule | None) -> Schedule:
        """Return the schedule in which an idle processor takes the ready stage that a rule prefers.

        Without a rule each processor finishes a chunk before it begins the next.
        """
        missing = [len(needs) for needs in self.needs]
        ready: dict[Processor, list[int]] = {"gpu": [], "npu": []}
        turns: dict[Processor, list[int]] = {"gpu": [], "npu": []}
        for one, stage in reversed(list(enumerate(self.stages))):
            turns[stage.processor].append(one)
            if not missing[one]:
                ready[stage.processor].append(one)
        running: dict[Processor, int] = {}
        free_us: dict[Processor, float] = {}
        begins_us: dict[int, float] = {}
        ends_us: dict[int, float] = {}
        now_us = 0.0
        stages, dependents = self.stages, self.dependents
        key = None if rule is None else rule(missing)
        while len(begins_us) < len(stages) or running:
            for processor in PROCESSORS:
                own = ready[processor]
                if processor in running or not own:
                    continue
                if key is not None:
                    best = own[0] if len(own) == 1 else max(own, key=key)
                elif turns[processor][-1] in own:
                    best = turns[processor].pop()
                else:
                    continue
                own.remove(best)
                begins_us[best] = now_us
                stage, factor = stages[best], 1.0
                for one in running.values():  # the other processor's, if it runs one
                    if stages[one].slows:
                        factor = stage.slowdown
                    if stage.slows and stages[one].slowdown != 1.0:
                        ends_us[one] = now_us + (ends_us[one] - now_us) * stages[one].slowdown
                refill_us = 0.0 if free_us.get(processor) == now_us else stage.refill_us
                ends_us[best] = now_us + refill_us + factor * stage.time_us
                running[processor] = best
            ended = min(running.values(), key=lambda one: (ends_us[one], one))
            now_us = ends_us[ended]
            stage = stages[ended]
            free_us[stage.processor] = now_us
            del running[stage.processor]
            for one in running.values():  # which goes on alone
                if stage.slows and stages[one].slowdown != 1.0:
                    ends_us[one] = now_us + (ends_us[one] - now_us) / stages[one].slowdown
            for one in dependents[ended]:
                missing[one] -= 1
                if not missing[one]:
                    ready[stages[one].processor].append(one)
        return self._schedule(begins_us, ends_us)

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
                bound = min(bound, self._schedule(begins_us, ends), key=lambda one: one.elapsed_us)
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

    def _schedule(self, begins_us: Mapping[int, float], ends_us: Mapping[int, float]) -> Schedule:
        order = sorted(begins_us, key=lambda one: (begins_us[one], one))
        busy_us: dict[Processor, float] = {"gpu": 0.0, "npu": 0.0}
        for number, stage in enumerate(self.stages):
            busy_us[stage.processor] += ends_us[number] - begins_us[number]
        return Schedule(
            tuple(self.places[one] for one in order),
            tuple(begins_us[one] for one in order),
            max(ends_us.values(), default=0.0),
            busy_us,
        )
