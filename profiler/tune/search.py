"""Search for the fastest of several candidates within a time budget.

Candidates differ from the default in one number each. They are built and checked until most of the budget is
used, then raced in turns, the slower half leaving after each round (successive halving). The changes that won
are joined into candidates that differ in several numbers, and the best of all is compared with the default on
fresh samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from heterollm.base import OptionError
from heterollm.kernels.gpu import BuildError
from heterollm.profiler.measure import Measurement, Timer, measure_interleaved

C = TypeVar("C", bound=Hashable)
"""A candidate, such as parameters of a kernel."""

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


LOST: Final = "the process ended while it was tried"
"""Failure of a candidate that took the process down, as the device's table keeps it."""


@dataclass(frozen=True, slots=True)
class SearchResult(Generic[C]):
    """The result of a search.

    Args:
        winner: The fastest candidate; the default unless another was faster by the margin.
        winner_us: Median time of the winner in microseconds.
        default_us: That of the default, measured in turns with it.
        best: The fastest other than the default, whether it won or not; None if there is no other.
        best_us: Its median time; that of the default if there is no other.
        tried: Number of candidates that were built and checked, the default among them.
        failures: The candidates that did not build or computed wrongly, with the reasons.
        left_out: Number of candidates for which the budget did not suffice.
    """

    winner: C
    winner_us: float
    default_us: float
    best: C | None
    best_us: float
    tried: int
    failures: Mapping[C, str]
    left_out: int


def search(
    default: C,
    candidates: Sequence[C],
    trial: Callable[[C], Callable[[], object]],
    *,
    budget_s: float,
    joined: Callable[[Mapping[C, float]], Sequence[C]] = lambda _: (),
    margin_fraction: float = MARGIN_FRACTION,
    timer: Timer = time.perf_counter_ns,
    progress: Callable[[float], None] | None = None,
) -> SearchResult[C]:
    """Return the fastest of the candidates and the default.

    Args:
        default: The candidate without a winner; it must pass its trial.
        candidates: The others, most promising first.
        trial: Builds and checks one and returns the call to time; raises BuildError where it fails.
        budget_s: Seconds to use; a candidate that was begun is finished, so it may take a little longer.
        joined: Returns candidates that join what helped alone, from the times so far.
        margin_fraction: How much faster than the default the winner must be.
        timer: The clock.
        progress: Called with the fraction of the budget that is used.

    Raises:
        OptionError: The budget or the margin is out of range.
        BuildError: The default fails its trial.
    """
    if not budget_s > 0 or not 0 <= margin_fraction < 1:
        raise OptionError(f"Cannot tune for {budget_s} s with a margin of {margin_fraction}.")
    race = _Race(default, trial, timer, budget_s, progress)
    left_out = 0
    for place, candidate in enumerate(candidates):
        if race.used_fraction() > BUILD_FRACTION:
            left_out = len(candidates) - place
            break
        race.enter(candidate)
    finalists = race.run()
    for candidate in joined(race.times_us):
        if race.used_fraction() < RACE_FRACTION and race.enter(candidate):
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
    return SearchResult(winner, winner_us, default_us, best, best_us, race.tried, race.failures, left_out)


class _Race(Generic[C]):
    """The candidates that are still in, and their latest median times."""

    def __init__(
        self,
        default: C,
        trial: Callable[[C], Callable[[], object]],
        timer: Timer,
        budget_s: float,
        progress: Callable[[float], None] | None,
    ) -> None:
        self.failures: dict[C, str] = {}
        self.tried = 1
        self._trial = trial
        self._timer = timer
        self._begin_ns = timer()
        self._budget_ns = budget_s * 1e9
        self._progress = progress
        self._default = default
        self._calls = {default: trial(default)}
        self.times_us = {default: self._first_us(self._calls[default])}
        self._limit_us = HOPELESS_FACTOR * self.times_us[default]

    def used_fraction(self) -> float:
        """Return how much of the budget is used, and report it."""
        used = (self._timer() - self._begin_ns) / self._budget_ns
        if self._progress is not None:
            self._progress(min(1.0, used))
        return used

    def enter(self, candidate: C) -> bool:
        """Build, check and run a candidate; return whether it is in."""
        self.tried += 1
        try:
            call = self._trial(candidate)
        except BuildError as error:
            self.failures[candidate] = error.message
            return False
        time_us = self._first_us(call)
        if time_us > self._limit_us:
            return False
        self._calls[candidate], self.times_us[candidate] = call, time_us
        return True

    def _first_us(self, call: Callable[[], object]) -> float:
        # The first run compiles on some devices; the second tells whether more are worth it.
        return measure_interleaved({"": call}, warmup=1, repeats=1, timer=self._timer)[""].median_us

    def run(self) -> list[C]:
        """Race all, the slower half leaving after each round; return the fastest of those left.

        Times of those who left early stay: a number that helped alone may be joined with others.
        """
        others = [other for other in self._calls if other != self._default]
        for repeats in ROUND_REPEATS:
            if not others or self.used_fraction() > RACE_FRACTION:
                break
            self.measure([self._default, *others], repeats)
            others = sorted(others, key=self.times_us.__getitem__)[: (len(others) + 1) // 2]
        return others[:1]

    def measure(self, names: Sequence[C], repeats: int, least: int = 1) -> dict[C, Measurement]:
        """Time candidates in turns, as often as the budget allows but for the least."""
        round_ns = 1e3 * sum(self.times_us[name] for name in names)
        left_ns = self._budget_ns - (self._timer() - self._begin_ns)
        repeats = max(least, min(repeats, int(left_ns / max(round_ns, 1.0))))
        calls = {name: self._calls[name] for name in names}
        times = measure_interleaved(calls, warmup=0, repeats=repeats, timer=self._timer)
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
