"""Interleaved timing of several candidates.

Runs take turns, so that drift of clocks and caches meets all candidates alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from heterollm.base import OptionError

Timer: TypeAlias = Callable[[], int]
"""Returns nanoseconds from any fixed moment."""

Name = TypeVar("Name", bound=Hashable)
Sample = TypeVar("Sample")


@dataclass(frozen=True, slots=True)
class Measurement:
    """Times of one call, in the order in which they were taken.

    Args:
        samples_us: Every timed run in microseconds, at least one.
    """

    samples_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """Median of the samples."""
        return statistics.median(self.samples_us)

    @property
    def quartiles_us(self) -> tuple[float, float]:
        """First and third quartile of the samples; a single sample is both."""
        if len(self.samples_us) < 2:
            return self.samples_us[0], self.samples_us[0]
        low, _, high = statistics.quantiles(self.samples_us, n=4, method="inclusive")
        return low, high

    @property
    def spread_fraction(self) -> float:
        """Distance between the quartiles as a fraction of the median."""
        low, high = self.quartiles_us
        return (high - low) / self.median_us if self.median_us else 0.0


def measure_interleaved(
    calls: Mapping[Name, Callable[[], object]],
    *,
    warmup: int = 1,
    repeats: int = 5,
    min_time_s: float = 0.0,
    timer: Timer = time.perf_counter_ns,
    progress: Callable[[int, int], None] | None = None,
) -> dict[Name, Measurement]:
    """Time several calls in turns: every round runs each of them once.

    Args:
        calls: Calls to time, by name. A call returns when its work is done.
        warmup: Rounds that are run and thrown away: the first compiles and fills caches.
        repeats: Timed rounds at least.
        min_time_s: Rounds go on until the timed runs took this many seconds together.
        timer: The clock.
        progress: Called after every round with rounds done and rounds in all, as far as known.

    Raises:
        OptionError: There is nothing to time, or a number is out of range.
    """
    if not calls or warmup < 0 or repeats < 1 or not min_time_s >= 0.0:
        raise OptionError(
            f"Cannot time {len(calls)} calls with warmup {warmup}, repeats {repeats}, "
            f"min_time_s {min_time_s}."
        )
    rounds = warmup + repeats
    for done in range(warmup):
        for call in calls.values():
            call()
        if progress is not None:
            progress(done + 1, rounds)
    samples_ns: dict[Name, list[int]] = {name: [] for name in calls}
    total_ns = taken = 0
    while taken < repeats or total_ns < min_time_s * 1e9:
        for name, call in calls.items():
            begin = timer()
            call()
            elapsed = timer() - begin
            samples_ns[name].append(elapsed)
            total_ns += elapsed
        taken += 1
        if progress is not None:
            progress(warmup + taken, max(rounds, warmup + taken))
    return {
        name: Measurement(tuple(sample / 1e3 for sample in samples)) for name, samples in samples_ns.items()
    }


def collect_interleaved(
    calls: Mapping[Name, Callable[[], Sample]], *, warmup: int = 1, repeats: int = 5
) -> dict[Name, tuple[Sample, ...]]:
    """Run several calls in turns and keep the samples that they return.

    For calls that measure themselves: a fraction of the call counts, or the device keeps the time.

    Args:
        calls: Calls to run, by name.
        warmup: Rounds that are run and thrown away.
        repeats: Rounds that are kept.

    Raises:
        OptionError: There is nothing to run, or a number is out of range.
    """
    if not calls or warmup < 0 or repeats < 1:
        raise OptionError(f"Cannot run {len(calls)} calls with warmup {warmup}, repeats {repeats}.")
    samples: dict[Name, list[Sample]] = {name: [] for name in calls}
    for taken in range(warmup + repeats):
        for name, call in calls.items():
            sample = call()
            if taken >= warmup:
                samples[name].append(sample)
    return {name: tuple(kept) for name, kept in samples.items()}
