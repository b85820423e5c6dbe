"""Search for the fastest of several candidates within a time budget.

Candidates differ from the default in one number each. They are built and checked until most of the budget is
used, then raced in turns, the slower half leaving after each round (successive halving). The changes that won
are joined into candidates that differ in several numbers, and the best of all is compared with the default on
fresh samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from heterollm.base import OptionError
from heterollm.kernels.gpu import BuildError, KernelParameters, differences, with_numbers
from heterollm.profiler.measure import Measurement, Timer, measure_interleaved

Trial: TypeAlias = Callable[[KernelParameters], Callable[[], object]]
"""Builds and checks parameters and returns the call to time; raises BuildError where they fail."""

MARGIN_FRACTION: Final = 0.03
"""Fraction by which a winner must be faster: less is noise, and the default is tested best."""

BUILD_FRACTION: Final = 0.6
"""Share of the budget after which no further candidate is built in the first wave."""

RACE_FRACTION: Final = 0.8
"""Share of the budget after which the race ends: the last samples need the rest."""

HOPELESS_FACTOR: Final = 2.0
"""A candidate whose first run takes so many times the default's is dropped at once."""

ROUND_REPEATS: Final = (3, 5, 7)
DUEL_REPEATS: Final = 15
LEAST_DUEL_REPEATS: Final = 11

ROUNDS_FRACTION: Final = 0.8
"""Share of the last race's rounds that a winner wins: of 11 that equals do so once in 30 times."""


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The result of a search.

    Args:
        winner: The fastest parameters; the default unless another was faster by the margin.
        winner_us: Median time of the winner in microseconds.
        default_us: That of the default, measured in turns with it.
        best: The fastest other than the default, whether it won or not; None if there is no other.
        best_us: Its median time; that of the default if there is no other.
        tried: Number of candidates that were built and checked, the default among them.
        failed: Number of candidates that did not build or computed wrongly.
        left_out: Number of candidates for which the budget did not suffice.
    """

    winner: KernelParameters
    winner_us: float
    default_us: float
    best: KernelParameters | None
    best_us: float
    tried: int
    failed: int
    left_out: int


def search(
    default: KernelParameters,
    candidates: Sequence[KernelParameters],
    trial: Trial,
    *,
    budget_s: float,
    margin_fraction: float = MARGIN_FRACTION,
    timer: Timer = time.perf_counter_ns,
    progress: Callable[[float], None] | None = None,
) -> SearchResult:
    """Return the fastest of the candidates and the default.

    Args:
        default: Parameters without a winner; they must pass their trial.
        candidates: The others, most promising first.
        trial: Builds and checks one.
        budget_s: Seconds to use; a candidate that was begun is finished, so it may take a little longer.
        margin_fraction: How much faster than the default the winner must be.
        timer: The clock.
        progress: Called with the fraction of the budget that is used.

    Raises:
        OptionError: The budget or the margin is out of range.
        BuildError: The default fails its trial.
    """
    if not budget_s > 0 or not 0 <= margin_fraction < 1:
        raise OptionError(f"Cannot tune for {budget_s} s with a margin of {margin_fraction}.")
    race = _Race(trial, timer, budget_s, progress)
    race.enter(default)
    limit_us = HOPELESS_FACTOR * race.times_us[default]
    left_out = 0
    for place, candidate in enumerate(candidates):
        if race.used_fraction() > BUILD_FRACTION:
            left_out = len(candidates) - place
            break
        race.enter(candidate, limit_us)
    finalists = race.run(default)
    for candidate in _joined(default, race.times_us):
        if race.used_fraction() < RACE_FRACTION and race.enter(candidate, limit_us):
            finalists.append(candidate)
    if race.used_fraction() > RACE_FRACTION:
        finalists = sorted(finalists, key=race.times_us.__getitem__)[:1]
    winner, best = default, None
    winner_us = default_us = best_us = race.times_us[default]
    if finalists:
        # Fresh samples, which no earlier luck has chosen.
        times = race.measure([default, *finalists], DUEL_REPEATS, least=LEAST_DUEL_REPEATS)
        race.used_fraction()
        best = min(finalists, key=lambda finalist: times[finalist].median_us)
        winner_us = default_us = times[default].median_us
        best_us = times[best].median_us
        if is_faster(times[best], times[default], margin_fraction):
            winner, winner_us = best, best_us
    counts = race.tried, race.failed, left_out
    return SearchResult(winner, winner_us, default_us, best, best_us, *counts)


class _Race:
    """The candidates that are still in, and their latest median times."""

    def __init__(
        self, trial: Trial, timer: Timer, budget_s: float, progress: Callable[[float], None] | None
    ) -> None:
        self.calls: dict[KernelParameters, Callable[[], object]] = {}
        self.times_us: dict[KernelParameters, float] = {}
        self.tried = self.failed = 0
        self._trial = trial
        self._timer = timer
        self._begin_ns = timer()
        self._budget_ns = budget_s * 1e9
        self._progress = progress

    def used_fraction(self) -> float:
        """Return how much of the budget is used, and report it."""
        used = (self._timer() - self._begin_ns) / self._budget_ns
        if self._progress is not None:
            self._progress(min(1.0, used))
        return used

    def enter(self, parameters: KernelParameters, limit_us: float | None = None) -> bool:
        """Build, check and run a candidate; without a limit its failure is an error.

        Returns:
            Whether it is in.
        """
        self.tried += 1
        try:
            call = self._trial(parameters)
        except BuildError:
            if limit_us is None:
                raise
            self.failed += 1
            return False
        # The first run compiles on some devices; the second tells whether more are worth it.
        time_us = measure_interleaved({"": call}, warmup=1, repeats=1, timer=self._timer)[""].median_us
        if limit_us is not None and time_us > limit_us:
            return False
        self.calls[parameters], self.times_us[parameters] = call, time_us
        return True

    def run(self, default: KernelParameters) -> list[KernelParameters]:
        """Race all, the slower half leaving after each round; return the fastest of those left.

        Times of those who left early stay: a number that helped alone may be joined with others.
        """
        others = [other for other in self.calls if other != default]
        for repeats in ROUND_REPEATS:
            if not others or self.used_fraction() > RACE_FRACTION:
                break
            self.measure([default, *others], repeats)
            others = sorted(others, key=self.times_us.__getitem__)[: (len(others) + 1) // 2]
        return others[:1]

    def measure(
        self, names: list[KernelParameters], repeats: int, least: int = 1
    ) -> dict[KernelParameters, Measurement]:
        """Time candidates in turns, as often as the budget allows but for the least."""
        round_ns = 1e3 * sum(self.times_us[name] for name in names)
        left_ns = self._budget_ns - (self._timer() - self._begin_ns)
        repeats = max(least, min(repeats, int(left_ns / max(round_ns, 1.0))))
        calls = {str(place): self.calls[name] for place, name in enumerate(names)}
        measured = measure_interleaved(calls, warmup=0, repeats=repeats, timer=self._timer)
        times = {name: measured[str(place)] for place, name in enumerate(names)}
        self.times_us |= {name: taken.median_us for name, taken in times.items()}
        return times


def is_faster(candidate: Measurement, default: Measurement, margin_fraction: float) -> bool:
    """Return whether a candidate wins by the margin, and not only because others used the machine meanwhile.

    Samples were taken in turns, so a round's two are of one moment: a real winner wins most rounds.
    """
    if candidate.median_us >= default.median_us * (1.0 - margin_fraction):
        return False
    rounds = list(zip(candidate.samples_us, default.samples_us, strict=True))
    return sum(ours < theirs for ours, theirs in rounds) >= ROUNDS_FRACTION * len(rounds)


def _joined(default: KernelParameters, times_us: dict[KernelParameters, float]) -> list[KernelParameters]:
    """Return the default with the best two changes that helped alone, and with the best three."""
    helpful: dict[str, int] = {}
    for other in sorted(times_us, key=times_us.__getitem__):
        changed = differences(other, default)
        if times_us[other] < times_us[default] and len(changed) == 1:
            (name,) = changed
            helpful.setdefault(name, changed[name])
    changes = list(helpful.items())
    return [with_numbers(default, dict(changes[:count])) for count in (2, 3) if len(changes) >= count]
