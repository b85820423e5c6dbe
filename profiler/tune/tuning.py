"""Search of the linear kernels' parameters on a device, kept for every later run on it.

Profiling calls :func:`tune` with the shape classes that matter. The device's table
(:mod:`heterollm.kernels.gpu.tuning`) then has parameters faster than the default, and those that failed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from heterollm.base import OptionError
from heterollm.kernels.gpu import (
    LEGAL,
    BuildError,
    GpuRuntime,
    KernelParameters,
    KernelStyle,
    ShapeClass,
    Tuned,
    Variant,
    all_parameters,
    default_parameters,
    differences,
    linear_style,
    with_numbers,
)
from heterollm.kernels.ops import WeightFormat
from heterollm.profiler.measure import Timer
from heterollm.profiler.tune.search import LOST, MARGIN_FRACTION, SearchResult, search
from heterollm.profiler.tune.trial import COPIES_BYTES, Checker, TuningJob, TuningWorkload

DEFAULT_BUDGET_S: Final = 40.0

LAYER: Final = (5632, 2048)
"""Rows and inputs that are timed by default: one of TinyLlama-1.1B's feed-forward layers."""

TOKENS: Final = {"one": (1,), "few": (4, 8), "many": (256,)}

TuningProgress = Callable[[float, str], None]
"""Callback with the fraction done and the name of the kernel."""


@dataclass(frozen=True, slots=True)
class TuningOutcome:
    """The result for one shape class.

    Args:
        job: The shape class and its layer.
        default: The parameters without tuning.
        result: Winner, times and counts; None where the search failed.
        launches: Launches that the times are for.
        error: Why the search failed; empty if it did not.
    """

    job: TuningJob
    default: KernelParameters
    result: SearchResult[KernelParameters] | None
    launches: int
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold."""
        record: dict[str, Any] = {
            "shape": str(self.job.shape),
            "rows": self.job.rows,
            "columns": self.job.columns,
            "tokens": list(self.job.tokens),
            "launches": self.launches,
            "default": str(self.default),
            "error": self.error,
            "quarantined": [],
        }
        if self.result is not None:
            record |= {
                "quarantined": [f"{bad}: {reason}" for bad, reason in self.result.failures.items()],
                "winner": str(self.result.winner),
                "winner_us": self.result.winner_us,
                "default_us": self.result.default_us,
                "best_other": None if self.result.best is None else str(self.result.best),
                "best_other_us": self.result.best_us,
                "tried": self.result.tried,
                "left_out": self.result.left_out,
            }
        return record


def default_jobs(
    *,
    half: bool,
    weight: WeightFormat | None = None,
    integer_inputs: Sequence[bool] = (False, True),
    rows: int = LAYER[0],
    columns: int = LAYER[1],
) -> list[TuningJob]:
    """Return the shape classes that matter for a model: one, a few and many tokens, and int8 inputs.

    With float and int8 inputs both, the latter are tuned for many tokens alone.

    Args:
        half: Whether the device's activations are float16.
        weight: Format of the weights; by default 4 bits in blocks of 32.
        integer_inputs: Whether inputs are float, rounded to int8, or both.
        rows: Output rows of the layer to time.
        columns: Its inputs.
    """
    number_format = weight or WeightFormat(4, 32)
    jobs = []
    kinds = list(dict.fromkeys(integer_inputs)) if number_format.quantized else [False]
    for place, rounded in enumerate(kinds):
        for kind, tokens in TOKENS.items():
            if kind != "many" and place > 0:
                continue
            shape = ShapeClass.of(number_format, integer_inputs=rounded, half=half, tokens=tokens[0])
            copies = 0 if kind == "many" else COPIES_BYTES // len(tokens)
            jobs.append(TuningJob(shape, rows, columns, tokens, copies))
    return jobs


def tune(
    runtime: GpuRuntime,
    jobs: Iterable[TuningJob],
    *,
    budget_s: float = DEFAULT_BUDGET_S,
    margin_fraction: float = MARGIN_FRACTION,
    timer: Timer = time.perf_counter_ns,
    progress: TuningProgress | None = None,
) -> list[TuningOutcome]:
    """Search each shape class and put the winners into the device's table, which launches use from now on.

    The outcomes are in the order of the jobs.

    Args:
        runtime: The device.
        jobs: Shape classes to tune; they share the budget evenly, and the rest of one goes to the next.
        budget_s: Seconds in all.
        margin_fraction: How much faster than the default a winner must be.
        timer: The clock.
        progress: Called as it goes on.

    Raises:
        OptionError: There is nothing to tune, or the budget is out of range.
    """
    todo = list(jobs)
    if not todo or not budget_s > 0:
        raise OptionError(f"Cannot tune {len(todo)} shape classes in {budget_s} s.")
    begin_ns = timer()
    outcomes = []
    for place, job in enumerate(todo):
        left_s = budget_s - (timer() - begin_ns) / 1e9
        share_s = max(left_s / (len(todo) - place), 0.05)

        def report(fraction: float, done: int = place, job: TuningJob = job) -> None:
            if progress is not None:
                progress((done + fraction) / len(todo), str(job.shape))

        outcomes.append(_tune_one(runtime, job, share_s, margin_fraction, timer, report))
        report(1.0)
    return outcomes


def candidates_for(runtime: GpuRuntime, shape: ShapeClass, style: KernelStyle) -> list[KernelParameters]:
    """Return parameters that differ from the default in one number, are legal here and not in quarantine.

    The values of each number in turn, so that a short search has seen something of each.
    """
    tuning, default = runtime.tuning, default_parameters(style, shape)
    by_number: dict[str, list[KernelParameters]] = {}
    for parameters in all_parameters(style, shape):
        changed = differences(parameters, default)
        if len(changed) != 1 or ("prefetch_bytes" in changed and not shape.weight.quantized):
            continue
        if tuning.identity.can_run(parameters) and not tuning.table.is_quarantined(shape, parameters):
            by_number.setdefault(next(iter(changed)), []).append(parameters)
    for name, group in by_number.items():
        # Neighbours of the default first.
        values = LEGAL[default.style, default.many][name]
        middle = values.index(getattr(default, name))
        places = {other: values.index(getattr(other, name)) for other in group}
        by_number[name] = sorted(group, key=lambda other: abs(places[other] - middle))
    other = [default_parameters("simt", shape)] if default.style == "half" else []
    return [*other, *_in_turns(list(by_number.values()))]


def _in_turns(groups: list[list[KernelParameters]]) -> Iterator[KernelParameters]:
    for place in range(max(map(len, groups), default=0)):
        for group in groups:
            if place < len(group):
                yield group[place]


def _joined(default: KernelParameters, times_us: Mapping[KernelParameters, float]) -> list[KernelParameters]:
    """Return the default with the best two changes that helped alone, and with the best three."""
    helpful: dict[str, int] = {}
    for other in sorted(times_us, key=times_us.__getitem__):
        changed = differences(other, default)
        if times_us[other] < times_us[default] and len(changed) == 1:
            (name,) = changed
            helpful.setdefault(name, changed[name])
    changes = list(helpful.items())
    return [with_numbers(default, dict(changes[:count])) for count in (2, 3) if len(changes) >= count]


def _tune_one(
    runtime: GpuRuntime,
    job: TuningJob,
    budget_s: float,
    margin_fraction: float,
    timer: Timer,
    report: Callable[[float], None],
) -> TuningOutcome:
    begin_ns = timer()
    traits = runtime.traits
    has = {"has_half": traits.has_half, "has_matrix": traits.has_matrix}
    style = linear_style(job.shape, is_cpu=traits.is_cpu, **has)
    default = default_parameters(style, job.shape)
    trials = _Trials(runtime, job, default)
    try:
        result = search(
            default,
            candidates_for(runtime, job.shape, style),
            trials.call,
            budget_s=max(budget_s - (timer() - begin_ns) / 1e9, 0.05),
            joined=lambda times_us: _joined(default, times_us),
            margin_fraction=margin_fraction,
            timer=timer,
            progress=report,
        )
    except BuildError as error:
        # Of the default: its variants have a record of their own, and nothing can be compared with it.
        return TuningOutcome(job, default, None, trials.launches, error.message)
    result = trials.confirm(result)
    tuned = Tuned(result.winner, result.winner_us, result.default_us)
    runtime.tuning.change(lambda table: table.keep(job.shape, tuned))
    return TuningOutcome(job, default, result, trials.launches)


class _Trials:
    """Trials of one job's parameters; those that fail are quarantined."""

    def __init__(self, runtime: GpuRuntime, job: TuningJob, default: KernelParameters) -> None:
        self._runtime, self._shape, self._default = runtime, job.shape, default
        self._workload, self._checker = TuningWorkload(runtime, job), Checker(runtime, job.shape)

    @property
    def launches(self) -> int:
        """Launches of one call."""
        return self._workload.calls_per_run()

    def call(self, parameters: KernelParameters) -> Callable[[], object]:
        """Check parameters and return the call to time."""
        if parameters == self._default:
            self._checker.check(parameters)
            return self._workload.call(parameters)
        if not self._runtime.tuning.identity.can_run(parameters):
            raise BuildError("its work-groups exceed the device's limits.")
        with self._quarantine(parameters):
            self._checker.check(parameters)
            call = self._workload.call(parameters)
            call()
        return call

    def confirm(self, result: SearchResult[KernelParameters]) -> SearchResult[KernelParameters]:
        """Check a winner on the lengths that are left; where it fails, the default stays."""
        if result.winner != self._default:
            try:
                with self._quarantine(result.winner):
                    self._checker.check(result.winner, winner=True)
            except BuildError as error:
                failures = {**result.failures, result.winner: error.message}
                return replace(result, winner=self._default, winner_us=result.default_us, failures=failures)
        return result

    @contextlib.contextmanager
    def _quarantine(self, parameters: KernelParameters) -> Iterator[None]:
        """Keep parameters in quarantine while they are tried, and afterwards if they fail."""
        tuning, shape = self._runtime.tuning, self._shape
        tuning.quarantine(shape, parameters, LOST)
        try:
            yield
        except BuildError as error:
            tuning.quarantine(shape, parameters, error.message.splitlines()[0])
            self._runtime.variants.reject(
                shape.layer, Variant(parameters.style, parameters=parameters), error
            )
            raise
        except BaseException:
            # Not its fault: an interruption, or no memory.
            tuning.change(lambda table: table.release(shape, parameters))
            raise
        tuning.change(lambda table: table.release(shape, parameters))
