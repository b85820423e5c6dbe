"""A run of the profiler: tasks in sequence, within a budget, saved on the way, resumed after a crash.

The file is written while the work goes on, so that an interruption loses a few seconds of it. The next run of
an interrupted profile goes on where it stopped; a run after a finished one measures everything again, or with
``update`` only missing and disturbed records. Disturbed ones come first.

Where times are real, a point that lies far off its neighbours is measured again at once, and marked as
disturbed if it stays there.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from heterollm.base import HeteroLLMError, OptionError, Progress
from heterollm.profiler.ahead import Ahead
from heterollm.profiler.measure import BuildPace, Task, correct_drift, with_reference
from heterollm.profiler.predict import AGAIN_FACTOR, far_off, mark, series_of
from heterollm.profiler.records import DriftKey, Key, LinearKey, Processor, Profile, Record

logger = logging.getLogger(__name__)

Clock: TypeAlias = Callable[[], float]

SAVE_EVERY_S: Final = 3.0
RANK_EVERY_S: Final = 10.0
DRIFT_EVERY_S: Final = 20.0
CLOCK_STEP_S: Final = 0.001


class Reference(Protocol):
    """Measures the same operator repeatedly, to show the drift of the machine."""

    processors: tuple[Processor, ...]

    def measure(self, processor: Processor) -> tuple[float, ...]:
        """Return samples of the reference operator of a processor, in microseconds."""
        ...


Ranking: TypeAlias = Callable[[Profile, Sequence[Task]], list[Task]]
"""Orders tasks by their worth to the solver, best first, and drops those of no worth."""


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """Options of a run.

    Args:
        budget_s: Seconds after which only essential work begins; None measures everything.
        update: Whether to measure only points that the profile does not have, and disturbed ones.
    """

    budget_s: float | None = 240.0
    update: bool = False

    def __post_init__(self) -> None:
        if self.budget_s is not None and not (0 < self.budget_s < math.inf):
            raise OptionError(
                f"The profiling budget is {self.budget_s} seconds.",
                fix="Give a time such as 90s or 5m, or `none`.",
            )


@dataclass(slots=True)
class RunSummary:
    """The outcome of a run.

    Args:
        started_s: Start, in seconds since 1970.
        since_s: Start of the first run that this one resumes: records taken later count as its own.
        measured: Number of records that it took.
        failed: Number of those that are errors.
        known: Number of tasks whose records existed.
        left: Number of tasks that the budget left out.
        left_out: Number of their measurements, by group and processor or by stage.
        graphs: Number of NPU graphs built for linear layers.
        build_seconds: Build time of these graphs.
        over_seconds: Time of essential work past the budget.
        seconds: Duration.
        drift_fraction: Slowest over fastest reference time of a processor, minus 1.
        skipped: Number of points left out by rule, by reason.
        again: Number of points that were measured again, since they lay far off their neighbours.
        disturbed: Number of records of the profile that lie there still.
        finished: Whether it came to its end.
    """

    started_s: float
    since_s: float
    measured: int = 0
    failed: int = 0
    known: int = 0
    left: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    graphs: int = 0
    build_seconds: float = 0.0
    over_seconds: float = 0.0
    seconds: float = 0.0
    drift_fraction: dict[str, float] = field(default_factory=dict)
    skipped: dict[str, int] = field(default_factory=dict)
    again: int = 0
    disturbed: int = 0
    finished: bool = False


def run_tasks(
    profile: Profile,
    tasks: Sequence[Task],
    options: ProfileOptions,
    *,
    path: Path | None = None,
    ranked: Sequence[Task] = (),
    ranking: Ranking | None = None,
    reference: Reference | None = None,
    details: dict[str, Any] | None = None,
    skipped: Callable[[], Mapping[str, int]] = dict,
    progress: Progress | None = None,
    clock: Clock = time.monotonic,
) -> RunSummary:
    """Run tasks in order and then, as long as the budget lasts, ranked ones by their worth.

    No task but an essential one begins unless its estimate, the builds of its graphs included, fits into the
    rest of the budget.

    Args:
        profile: Receives the records.
        tasks: Run in order; after the budget only the essential ones.
        options: Budget, and whether known records are skipped.
        path: File that the profile is merged into on the way; None keeps it in memory.
        ranked: Tasks run while time is left, the most useful first.
        ranking: Orders them, again and again as measurements come in; None keeps their order.
        reference: Reference operators, measured through the run.
        details: Further entries of the run in the profile.
        skipped: Returns the number of points left out by rule so far, by reason.
        progress: Called with a stage, milliseconds done and milliseconds in all, both estimated.
        clock: Monotonic seconds.

    Raises:
        CacheError: The profile cannot be written.
    """
    # Records must not be older than earlier ones, even if the system's clock was set back.
    newest_s = max((record.taken_s for record in profile.records.values()), default=0.0)
    now_s = max(time.time(), newest_s + CLOCK_STEP_S)
    last = max(profile.runs.values(), key=lambda run: run["started_s"], default=None)
    resumes = last is not None and not last["finished"]
    since_s = float(last["since_s"]) if last is not None and resumes else now_s
    summary = RunSummary(round(now_s, 3), round(since_s, 3))
    run = _Run(
        profile=profile,
        options=options,
        summary=summary,
        path=path,
        reference=reference,
        details=details or {},
        skipped=skipped,
        progress=progress,
        clock=clock,
    )
    try:
        run.keep()
        run.drift()  # shows which earlier records are from a busy machine
        run.keep()
        disturbed = [task for task in ranked if run.disturbed(task)]
        tasks = sorted([*tasks, *disturbed], key=lambda task: not run.disturbed(task))
        ranked = [task for task in ranked if task not in disturbed]
        run.ordered(tasks, ranked)
        run.by_worth(ranked, ranking)
        if run.unreferenced:
            run.drift()
        summary.finished = True
    finally:
        run.keep()
    return summary


@dataclass
class _Run:
    """A run in progress."""

    profile: Profile
    options: ProfileOptions
    summary: RunSummary
    path: Path | None
    reference: Reference | None
    details: dict[str, Any]
    skipped: Callable[[], Mapping[str, int]]
    progress: Progress | None
    clock: Clock
    drift_s: float = -math.inf
    drifts: int = 0
    pace: BuildPace = field(default_factory=BuildPace)
    done_s: float = 0.0

    def __post_init__(self) -> None:
        self.name = f"{self.summary.started_s:.3f}"
        self.is_real = self.profile.time_kind == "real"
        self.tasks: dict[Key, Task] = {}
        self.unreferenced: list[Key] = []
        self.reference_us: dict[Processor, float] = {}
        self.begun_s = self.kept_s = self.clock()
        self.essential = self.other = Ahead()

    @property
    def elapsed_s(self) -> float:
        return self.clock() - self.begun_s

    @property
    def left_s(self) -> float:
        """The rest of the budget."""
        return math.inf if self.options.budget_s is None else self.options.budget_s - self.elapsed_s

    def estimate_s(self, task: Task) -> float:
        return self.pace.estimate_s(task.estimate_s, task.build_s)

    def leave(self, task: Task) -> None:
        """Note a task as left out by the budget."""
        self.summary.left += 1
        for key in task.keys:
            name = _name_of(task, key)
            self.summary.left_out[name] = self.summary.left_out.get(name, 0) + 1

    def keep(self) -> None:
        """Note the state of the run, mark disturbed records and write the profile."""
        if self.is_real:
            correct_drift(self.profile)
            self.summary.disturbed = mark(self.profile)
        self.summary.seconds = round(self.elapsed_s, 3)
        self.summary.skipped = dict(self.skipped())
        self.profile.runs[self.name] = {**self.details, **asdict(self.summary)}
        if self.path is not None:
            self.profile.save(self.path)
        self.kept_s = self.clock()

    def known(self, task: Task) -> bool:
        """Whether a task's records are there already, of this run or, with ``update``, of any."""
        held = [self.profile.records.get(key) for key in task.keys]
        return all(
            record is not None
            and (record.taken_s >= self.summary.started_s or not record.disturbed)
            and (self.options.update or record.taken_s >= self.summary.since_s)
            for record in held
        )

    def disturbed(self, task: Task) -> bool:
        """Whether an earlier run left a disturbed record of a task."""
        held = [self.profile.records.get(key) for key in task.keys]
        return any(record is not None and record.disturbed for record in held)

    def ordered(self, tasks: Sequence[Task], later: Sequence[Task]) -> None:
        self.essential = Ahead.of(task for task in tasks if task.essential)
        self.other = Ahead.of([*(task for task in tasks if not task.essential), *later])
        for task in tasks:
            self.begin(task)
            if self.known(task):
                self.summary.known += 1
                self.done_s += self.estimate_s(task)
            elif not task.essential and self.estimate_s(task) > self.left_s:
                self.leave(task)
            else:
                self.run(task)
        self.summary.over_seconds = round(max(0.0, -self.left_s), 3)

    def by_worth(self, tasks: Sequence[Task], ranking: Ranking | None) -> None:
        waiting = [task for task in tasks if not self.known(task)]
        self.summary.known += len(tasks) - len(waiting)
        ranked_s = -math.inf
        while waiting and self.left_s > 0:
            if ranking is not None and self.clock() - ranked_s >= RANK_EVERY_S:
                waiting = ranking(self.profile, waiting)
                ranked_s = self.clock()
                if not waiting:
                    break
            task = waiting.pop(0)
            self.begin(task)
            if self.estimate_s(task) > self.left_s:
                self.leave(task)
            else:
                self.run(task)
        for task in waiting:
            self.leave(task)

    def run(self, task: Task) -> None:
        self.drift(DRIFT_EVERY_S)
        if self.progress is not None:
            done, own_s = self.done_s, self.estimate_s(task)
            total = done + own_s + self.ahead_s(self.left_s - own_s)
            self.progress(task.stage, round(1000 * done), round(1000 * total))
        records = [self.stamped(record) for record in _records_of(task)]
        for record in records:
            self.add(record)
            self.tasks[record.key] = task
            self.summary.measured += 1
            self.summary.failed += record.failed
        self.pace.learn(task, records)
        if self.is_real:
            self.repeat({series_of(record.key) for record in records})
        self.summary.graphs = self.pace.graphs
        self.summary.build_seconds = round(self.pace.seconds, 3)
        self.done_s += self.estimate_s(task)
        if self.clock() - self.kept_s >= SAVE_EVERY_S:
            self.keep()

    def stamped(self, record: Record) -> Record:
        """Return a record with its moment by the monotonic clock since the start of the run."""
        return replace(record, taken_s=round(self.summary.started_s + self.elapsed_s, 3))

    def add(self, record: Record) -> None:
        """Add a record to the profile, and note that its reference operator is yet to be measured."""
        self.profile.add(record)
        if self.profile.records[record.key] is record:  # a failed one takes no sound one's place
            self.unreferenced.append(record.key)

    def repeat(self, series: Collection[Hashable]) -> None:
        """Measure points of this run again that lie far off their neighbours, each once.

        Of both times the one nearer to the neighbours stays.
        """
        found = far_off(self.profile, series, factor=AGAIN_FACTOR)
        for task in dict.fromkeys(self.tasks.pop(key) for key in found if key in self.tasks):
            if not task.essential and task.estimate_s > self.left_s:
                continue
            for record in map(self.stamped, _records_of(task)):
                expected_us, held = found.get(record.key), self.profile.records.get(record.key)
                if expected_us is None or held is None or record.failed:
                    continue
                self.tasks.pop(record.key, None)
                self.summary.again += 1
                if _distance(record.median_us, expected_us) < _distance(held.median_us, expected_us):
                    self.add(record)

    def drift(self, every_s: float = 0.0) -> None:
        """Measure the reference operators, unless that was done less than ``every_s`` ago.

        Records since the last time get the faster of both times: a slowdown that lasted as long as they.
        """
        if self.reference is None or self.clock() - self.drift_s < every_s:
            return
        before_us = dict(self.reference_us)
        for processor in self.reference.processors:
            key = DriftKey(processor, self.name, self.drifts)
            measure = functools.partial(_measure_reference, self.reference, key)
            for record in map(self.stamped, _records_of(Task("drift", (key,), measure, 0.0))):
                self.profile.add(record)
                if not record.failed:
                    self.reference_us[processor] = record.median_us
            times_us = [
                record.median_us
                for other, record in self.profile.of_kind(DriftKey)
                if (other.processor, other.run) == (processor, self.name)
            ]
            if times_us:
                self.summary.drift_fraction[processor] = round(max(times_us) / min(times_us) - 1.0, 4)
        around_us = {
            processor: min(before_us.get(processor, time_us), time_us)
            for processor, time_us in self.reference_us.items()
        }
        for known in self.unreferenced if self.is_real else ():
            self.profile.records[known] = with_reference(self.profile.records[known], around_us)
        self.unreferenced.clear()
        self.drifts += 1
        self.drift_s = self.clock()

    def begin(self, task: Task) -> None:
        """Count a task as waiting no longer."""
        if task.essential:
            self.essential = self.essential.without(task)
        else:
            self.other = self.other.without(task)

    def ahead_s(self, left_s: float) -> float:
        """Return the time of waiting tasks: of all essential ones, and of others while time is left."""
        essential_s = self.pace.estimate_s(self.essential.task_s, self.essential.build_s)
        other_s = self.pace.estimate_s(self.other.task_s, self.other.build_s)
        return essential_s + min(other_s, max(0.0, left_s - essential_s))


def _distance(time_us: float, expected_us: float) -> float:
    return abs(math.log(time_us / expected_us))


def _name_of(task: Task, key: Key) -> str:
    if not isinstance(key, LinearKey):
        return task.stage
    return f"{key.point.group} on the {key.processor.upper()}"


def _measure_reference(reference: Reference, key: DriftKey) -> list[Record]:
    return [Record(key, reference.measure(key.processor))]


def _records_of(task: Task) -> list[Record]:
    """Run a task; an error becomes the record of each of its keys."""
    try:
        return list(task.run())
    except Exception as error:  # noqa: BLE001 - a failed measurement is data, and never the end of a run
        if not isinstance(error, HeteroLLMError):
            logger.warning("%s failed: %s: %s", task.stage, type(error).__name__, error)
        text = error.message if isinstance(error, HeteroLLMError) else f"{type(error).__name__}: {error}"
        return [Record(key, error=text or type(error).__name__) for key in task.keys]
