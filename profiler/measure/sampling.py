"""Repeated runs of one piece of work, until its time is known.

Samples are taken until they agree or there are enough of them; the first runs, which compile and fill caches,
are kept apart. A clock that jumped makes the measurement fail instead of spoiling it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Final

from heterollm.base import HeteroLLMError, ProfileError
from heterollm.profiler.records import Key, Record

NOTHING_COMPUTED_S: Final = 0.001
"""About how long a measurement takes where times are modelled and nothing is computed."""

LEAST_SAMPLES: Final = 5
MOST_SAMPLES: Final = 12
LEAST_SLOW_SAMPLES: Final = 3
SLOW_US: Final = 0.3e6
"""A run that takes longer is repeated less: noise of the system hardly shows in it."""

LONG_US: Final = 1e6
"""Samples that took so long together are enough, once there are the least of them."""

WARM_UPS: Final = 2
STABLE_FRACTION: Final = 0.04
"""Distance between the quartiles, as a fraction of the median, at which more samples say nothing new."""

LONGEST_US: Final = 1e9
ABSURD_FACTOR: Final = 1000.0
LONGEST_STALL_US: Final = 5e6
"""A sample far above the median is refused, unless a loaded machine can have stalled the run for so long."""


def take_samples(
    once: Callable[[], float],
    warm_up: Callable[[], float] | None = None,
    *,
    most: int = MOST_SAMPLES,
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Run something until its time is known.

    Args:
        once: Runs it once and returns its microseconds.
        warm_up: The same for the first runs; default ``once``.
        most: Samples after which it ends, whether they agree or not.

    Returns:
        The samples, and the runs before them that were thrown away, in microseconds.

    Raises:
        ProfileError: A time is zero, negative, beyond reason, or far from the median.
    """
    first = warm_up or once
    warmup = [_checked(first())]
    if warmup[0] < SLOW_US:
        warmup += [_checked(first()) for _ in range(WARM_UPS - 1)]
    samples: list[float] = []
    while not _enough(samples, most):
        samples.append(_checked(once()))
    median = statistics.median(samples)
    most_us = max(ABSURD_FACTOR * median, LONGEST_STALL_US)
    strange = [sample for sample in samples if not median / ABSURD_FACTOR <= sample <= most_us]
    if strange:
        raise _jumped(f"one run took {strange[0]:g} us, and half of them up to {median:g} us")
    return tuple(samples), tuple(warmup)


def taken(
    key: Key,
    once: Callable[[], float],
    warm_up: Callable[[], float] | None = None,
    *,
    values: Callable[[], Mapping[str, float]] = dict,
    most: int = MOST_SAMPLES,
) -> Record:
    """Return the record of something that is run until its time is known; a failure is in the record.

    Args:
        key: Key of the record.
        once: Runs it once and returns its microseconds.
        warm_up: The same for the first runs; default ``once``.
        values: Called after the samples; other numbers to record.
        most: Samples after which it ends, whether they agree or not.
    """
    try:
        samples, warmup = take_samples(once, warm_up, most=most)
        return Record(key, samples, warmup, dict(values()))
    except HeteroLLMError as error:
        return Record(key, error=error.message)


def _enough(samples: list[float], most: int) -> bool:
    count = len(samples)
    if count >= most:
        return True
    if count < LEAST_SLOW_SAMPLES:
        return False
    median = statistics.median(samples)
    if median > SLOW_US:
        return True
    if count < LEAST_SAMPLES:
        return False
    if sum(samples) >= LONG_US:
        return True
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return high - low <= STABLE_FRACTION * median


def _checked(sample_us: float) -> float:
    if not (math.isfinite(sample_us) and 0 < sample_us < LONGEST_US):
        raise _jumped(f"a run took {sample_us:g} us")
    return sample_us


def _jumped(what: str) -> ProfileError:
    return ProfileError(f"The clock jumped: {what}.", fix="Run `heterollm profile --update`.")
