"""Stages of tokens, and fits and curves that do not fall where work rises.

Hexagon's arrays are 32 wide, so that dimensions count rounded up to 32. Below 32 tokens the emulator's
activation-first graphs move in steps of 4 (measured), so that tokens count rounded up to 4 too.
Models that are built of the functions below rise with tokens (within a stage), rows and columns by
construction.
"""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import round_up

ARRAY: Final = 32
"""Width of the matrix unit."""

FINE_STEP: Final = 4
"""Step in tokens below one array's width."""

DIGITS: Final = 6
REWEIGHTINGS: Final = 6
SMALLEST_RESIDUAL: Final = 0.01
"""Relative residuals below this weigh alike; above it, less in proportion, so that outliers do not pull."""

SMALLEST_SHARE: Final = 1e-7
"""Costs that are never a larger share of a time than this are none."""

TIE: Final = 3e-3
"""Weight of the sizes of coefficients in a fit: among equally good solutions there is a smallest one."""

ROUNDING: Final = 1e-14
"""Slopes below this share of the largest possible one are rounding errors."""

MOST_STEPS: Final = 3
"""Steps of non-negative least squares for each coefficient, after which rounding errors turn in circles."""

FLOOR_LIMIT: Final = 0.95
"""Largest share of the fastest time that counts as a fixed cost."""


def stage(tokens: int) -> int:
    """Return the number of arrays that some tokens fill, rounded up; within one, times never fall."""
    return -(-tokens // ARRAY)


def step_end(tokens: int) -> int:
    """Return tokens rounded up to 4 up to one array, and to 32 beyond."""
    return round_up(tokens, FINE_STEP if tokens <= ARRAY else ARRAY)


def digits(value: float) -> float:
    """Return a fitted number without its last digits, which differ between processors."""
    return float(f"{value:.{DIGITS}g}")


def rises(values: Sequence[float]) -> bool:
    """Whether each value is above the one before."""
    return all(before < after for before, after in itertools.pairwise(values))


def rising(values: Sequence[float]) -> list[float]:
    """Return a rising sequence near the values; larger values in give larger values out.

    It lies halfway between the least rising sequence above the values and the greatest one below them.
    """
    above = list(itertools.accumulate(values, max))
    if above == values:
        return above
    below = list(itertools.accumulate(reversed(values), min))
    return [(high + low) / 2 for high, low in zip(above, reversed(below), strict=True)]


def isotonic_median(values: Sequence[float]) -> list[float]:
    """Return the rising sequence with the least absolute distance: an outlier moves no other value."""
    pools: list[list[float]] = []
    for value in values:
        pool = [value]
        while pools and statistics.median(pools[-1]) > statistics.median(pool):
            pool = pools.pop() + pool
        pools.append(pool)
    return [statistics.median(pool) for pool in pools for _ in pool]


def within_stages(tokens: Sequence[int], values: Sequence[float]) -> list[float]:
    """Return times that rise with tokens within each stage; from one stage to the next they may fall.

    Args:
        tokens: Ascending numbers of tokens.
        values: Their times.
    """
    found = itertools.groupby(zip(tokens, values, strict=True), lambda pair: stage(pair[0]))
    return [risen for _, own in found for risen in rising([value for _, value in own])]


def at_tokens(levels: Sequence[int], values: Sequence[float], tokens: int, floor: float) -> float:
    """Return the time at a number of tokens between, below or above those measured.

    Args:
        levels: Tokens at which times are known, ascending.
        values: Their times, rising within each stage.
        tokens: Where to read the curve.
        floor: Part of the time that does not grow with the number of stages.
    """
    if tokens <= levels[0] or tokens >= levels[-1]:
        end = 0 if tokens <= levels[0] else -1
        time, factor = values[end], stage(tokens) / stage(levels[end])
        return time if time <= floor else floor + (time - floor) * factor
    place = bisect.bisect_left(levels, tokens)
    before, after = values[place - 1], values[place]
    low, high = levels[place - 1], levels[place]
    time = before + (after - before) * (tokens - low) / (high - low)
    if after >= before:
        return time
    # A reversal: the fall from one stage to the next must not begin inside a stage.
    first, here, last = stage(low), stage(tokens), stage(high)
    return before + (after - before) * (here - first) / (last - first)


def nonnegative_fit(terms: NDArray[np.float64], times_us: NDArray[np.float64]) -> list[float]:
    """Return non-negative coefficients with which ``terms @ coefficients`` is near the times, relatively.

    Non-negative least squares on relative residuals, repeated with large residuals weighted down, which comes
    near the least absolute deviation. Six digits are kept, since the last ones differ between processors.

    Args:
        terms: ``[samples, terms]``, none negative, no column all zero.
        times_us: ``[samples]``, positive.
    """
    relative = terms / times_us[:, None]
    scales = relative.max(axis=0)
    relative = relative / scales
    weights = np.ones(len(times_us))
    # Dependent columns have many solutions, of which rounding errors would choose one.
    sizes = np.diag(TIE * np.arange(1.0, terms.shape[1] + 1.0))
    for _ in range(REWEIGHTINGS):
        rows = np.vstack([relative * weights[:, None], sizes])
        found = nonnegative_least_squares(rows, np.append(weights, 0.0 * sizes[0]))
        residuals = np.abs((relative * found).sum(axis=1) - 1.0)
        weights = 1.0 / np.sqrt(np.maximum(residuals, SMALLEST_RESIDUAL))
    found[found < SMALLEST_SHARE] = 0.0
    return [digits(cost) for cost in (found / scales).tolist()]


def nonnegative_least_squares(terms: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the non-negative coefficients with which ``terms @ coefficients`` is nearest to the values.

    Lawson and Hanson's method (Solving Least Squares Problems, 1974, chapter 23): coefficients leave zero one
    at a time where that helps most, and return to it where the best fit of those above zero has a negative.

    Args:
        terms: ``[samples, terms]``, of full column rank.
        values: ``[samples]``.
    """
    found = np.zeros(terms.shape[1])
    above = found > 0.0
    least = ROUNDING * np.abs(terms).sum(axis=0).max() * np.abs(values).max()
    for _ in range(MOST_STEPS * len(found)):
        slopes = np.where(above, 0.0, terms.T @ (values - terms @ found))
        if slopes.max() <= least:
            break
        above[slopes.argmax()] = True
        while True:
            best = np.zeros(len(found))
            best[above] = np.linalg.lstsq(terms[:, above], values)[0]
            below = above & (best <= 0.0)
            if not below.any():
                break
            shares = found[below] / (found[below] - best[below])
            found += shares.min() * (best - found)
            above[np.flatnonzero(below)[shares == shares.min()]] = False
            found[~above] = 0.0
        found = best
    return found


def common_floor(
    levels: Sequence[int], works: Sequence[float], times_us: Sequence[float]
) -> tuple[float, dict[int, float]]:
    """Return the fixed cost of all shards, and the time of a unit of work at each level beside it.

    Args:
        levels: Which samples share a time per unit of work: their tokens, or the stage of these.
        works: Units of work of each sample.
        times_us: Time of each sample.
    """
    names = sorted(set(levels))
    times = np.array(times_us, np.float64)
    terms = np.zeros((len(times), 1 + len(names)))
    terms[:, 0] = 1.0
    for row, (level, work) in enumerate(zip(levels, works, strict=True)):
        terms[row, 1 + names.index(level)] = work
    # With one size of work a fixed cost and one per unit cannot be told apart: all of it is per unit.
    fixed = nonnegative_fit(terms, times)[0] if len(set(works)) > 1 else 0.0
    floor = min(fixed, FLOOR_LIMIT * float(times.min()))
    samples = list(zip(levels, works, times_us, strict=True))
    rates = {
        name: float(np.median([(time - floor) / work for level, work, time in samples if level == name]))
        for name in names
    }
    return floor, rates
