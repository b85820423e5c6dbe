"""How many samples are taken, and which of them are no times."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from heterollm.base import KernelError, ProfileError
from heterollm.profiler.measure.sampling import LEAST_SAMPLES, MOST_SAMPLES, SLOW_US, take_samples, taken
from heterollm.profiler.records import LaunchKey

KEY = LaunchKey("idle")


def times(*values: float, then: float | None = None) -> Iterator[float]:
    yield from values
    while then is not None:
        yield then


def test_steady_times_are_soon_enough():
    source = times(900.0, 500.0, then=100.0)
    samples, warmup = take_samples(lambda: next(source))
    assert warmup == (900.0, 500.0)
    assert samples == (100.0,) * LEAST_SAMPLES


def test_unsteady_times_are_taken_until_there_are_enough():
    source = (100.0 + 50 * (index % 2) for index in range(100))
    samples, _ = take_samples(lambda: next(source))
    assert len(samples) == MOST_SAMPLES


def test_slow_runs_are_repeated_less():
    source = times(then=2 * SLOW_US)
    samples, warmup = take_samples(lambda: next(source))
    assert (len(samples), len(warmup)) == (3, 1)


def test_long_unsteady_runs_end_with_the_least_samples():
    source = (0.2e6 + 0.05e6 * (index % 2) for index in range(100))
    samples, _ = take_samples(lambda: next(source))
    assert len(samples) == LEAST_SAMPLES


def test_the_first_runs_may_be_others():
    samples, warmup = take_samples(lambda: 5.0, lambda: 7.0)
    assert set(samples) == {5.0}
    assert warmup == (7.0, 7.0)


@pytest.mark.parametrize("strange", [0.0, -3.0, math.inf, math.nan, 5e9, 8e6, 100.0 / 2000])
@pytest.mark.parametrize("place", [2, 4])
def test_a_clock_that_jumped_fails_the_measurement(strange, place):
    source = times(*[100.0] * place, strange, then=100.0)
    with pytest.raises(ProfileError, match="clock jumped"):
        take_samples(lambda: next(source))
    source = times(*[100.0] * place, strange, then=100.0)
    record = taken(KEY, lambda: next(source))
    assert record.failed
    assert not record.samples_us


def test_a_run_that_was_held_up_is_noise():
    source = times(*[100.0] * 5, 300_000.0, then=100.0)
    assert not taken(KEY, lambda: next(source)).failed


def test_errors_and_other_numbers_are_recorded():
    def broken() -> float:
        raise KernelError("The kernel is gone.")

    assert taken(KEY, broken).error == "The kernel is gone."
    assert taken(KEY, lambda: 3.0, values=lambda: {"cpu_us": 7.0}).values == {"cpu_us": 7.0}
