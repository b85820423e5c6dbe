"""Fits and curves that cannot fall where work rises.

Every step here keeps order: where all times that go in are larger, so is the time that comes out. Models
that are built of such steps rise with tokens (within a stage), rows and columns by construction.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.profiler.predict.features import stage

__all__ = [
    "at_tokens",
    "between",
    "common_floor",
    "isotonic",
    "isotonic_median",
    "isotonic_within_stages",
    "nonnegative_fit",
]

REWEIGHTINGS: Final = 6
SMALLEST_RESIDUAL: Final = 0.01
"""Relative residuals below this weigh alike; above it, less in proportion, so that outliers do not pull."""

SMALLEST: Final = 1e-300
SMALLEST_SHARE: Final = 1e-12
"""Share of a column that must be left beside the others for it to have a coefficient of its own."""

FLOOR_LIMIT: Final = 0.95
"""Largest share of the fastest time that counts as a fixed cost."""


def isotonic(values: Sequence[float]) -> list[float]:
    """Return the rising sequence with the least squared distance (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        pool, size = value, 1
        while pools and pools[-1][0] > pool:
            earlier, others = pools.pop()
            pool = (earlier * others + pool * size) / (others + size)
            size += others
        pools.append((pool, size))
    return [pool for pool, size in pools for _ in range(size)]


def isotonic_median(values: Sequence[float]) -> list[float]:
    """Return a rising sequence with the least absolute distance: one value far off moves no other."""
    pools: list[list[float]] = []
    for value in values:
        pool = [value]
        while pools and statistics.median(pools[-1]) > statistics.median(pool):
            pool = pools.pop() + pool
        pools.append(pool)
    return [statistics.median(pool) for pool in pools for _ in pool]


def isotonic_within_stages(tokens: Sequence[int], values: Sequence[float]) -> list[float]:
    """Return times that rise with tokens within each stage; between stages they may fall, as measured."""
    risen: list[float] = []
    begin = 0
    for end in range(1, len(tokens) + 1):
        if end == len(tokens) or stage(tokens[end]) != stage(tokens[begin]):
            risen += isotonic(values[begin:end])
            begin = end
    return risen


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
        return _scaled(values[end], stage(tokens) / stage(levels[end]), floor)
    place = bisect.bisect_left(levels, tokens)
    before, after = values[place - 1], values[place]
    low, high = levels[place - 1], levels[place]
    time = before + (after - before) * (tokens - low) / (high - low)
    if after >= before:
        return time
    # A reversal: the fall from one stage to the next must not begin inside a stage.
    first, here, last = stage(low), stage(tokens), stage(high)
    return before + (after - before) * (here - first) / (last - first)


def between(sizes: Sequence[int], values: Sequence[float], size: int, floor: float) -> float:
    """Return the time at a size between, below or above those known, in proportion beyond them.

    Args:
        sizes: Sizes at which times are known, ascending.
        values: Their times, rising.
        size: Where to read the curve.
        floor: Part of the time that does not grow with the size.
    """
    if size <= sizes[0] or size >= sizes[-1]:
        end = 0 if size <= sizes[0] else -1
        return _scaled(values[end], size / sizes[end], floor)
    place = bisect.bisect_left(sizes, size)
    share = (size - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
    return values[place - 1] + (values[place] - values[place - 1]) * share


def _scaled(time: float, factor: float, floor: float) -> float:
    """Return a time with all of it but the floor multiplied."""
    return time if time <= floor else floor + (time - floor) * factor


def nonnegative_fit(terms: NDArray[np.float64], times_us: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return non-negative coefficients with which ``terms @ coefficients`` is near the times, relatively.

    Non-negative least squares (Lawson and Hanson's active sets) on relative residuals, repeated with large
    residuals weighted down, which comes near the least absolute deviation.

    Args:
        terms: ``[samples, terms]``, none negative, no column all zero.
        times_us: ``[samples]``, positive.
    """
    relative = terms / times_us[:, None]
    scales = relative.max(axis=0)
    relative = relative / scales
    weights = np.ones(len(times_us))
    found = np.zeros(terms.shape[1])
    for _ in range(REWEIGHTINGS):
        found = _nonnegative_least_squares(relative * weights[:, None], weights)
        residuals = np.abs((relative * found).sum(axis=1) - 1.0)
        weights = 1.0 / np.sqrt(np.maximum(residuals, SMALLEST_RESIDUAL))
    coefficients: NDArray[np.float64] = found / scales
    return coefficients


def _nonnegative_least_squares(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    count = a.shape[1]
    solution = np.zeros(count)
    active: list[int] = []
    tolerance = 1e-10 * float(np.abs(a).sum())
    for _ in range(10 * count):
        gradient: NDArray[Any] = (a.T * (b - (a * solution).sum(axis=1))).sum(axis=1)
        gradient[active] = -np.inf
        best = int(np.argmax(gradient))
        if gradient[best] <= tolerance:
            break
        active.append(best)
        while active:
            trial = _least_squares(a[:, active], b)
            if trial.min() > 0.0:
                solution = np.zeros(count)
                solution[active] = trial
                break
            held = solution[active]
            falling = trial <= 0.0
            fall = np.maximum(held[falling] - trial[falling], SMALLEST)
            step = float(np.min(held[falling] / fall))
            solution[active] = held + step * (trial - held)
            active = [index for index in active if solution[index] > 1e-12]
            solution[[index for index in range(count) if index not in active]] = 0.0
    return solution


def _least_squares(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the least-squares solution, by modified Gram-Schmidt.

    Unlike those of BLAS and LAPACK, these sums have one order on every processor, and so the same digits.
    """
    rest, count = np.column_stack([a, b]), a.shape[1]
    factor = np.zeros((count, count + 1))
    smallest = np.sqrt((a * a).sum(axis=0)) * SMALLEST_SHARE
    for place in range(count):
        column = rest[:, place].copy()
        length = float(np.sqrt((column * column).sum()))
        if length <= smallest[place]:  # it follows from the columns before
            continue
        column /= length
        factor[place, place] = length
        factor[place, place + 1 :] = (rest[:, place + 1 :].T * column).sum(axis=1)
        rest[:, place + 1 :] -= column[:, None] * factor[place, place + 1 :]
    solution = np.zeros(count)
    for place in reversed(range(count)):
        if factor[place, place]:
            known = float((factor[place, place + 1 : -1] * solution[place + 1 :]).sum())
            solution[place] = (factor[place, -1] - known) / factor[place, place]
    return solution


def common_floor(
    levels: Sequence[int], works: Sequence[float], times_us: Sequence[float]
) -> tuple[float, dict[int, float]]:
    """Return the fixed cost of all slices, and the time of a unit of work at each level beside it.

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
    fixed = float(nonnegative_fit(terms, times)[0]) if len(set(works)) > 1 else 0.0
    floor = min(fixed, FLOOR_LIMIT * float(times.min()))
    samples = list(zip(levels, works, times_us, strict=True))
    rates = {
        name: float(np.median([(time - floor) / work for level, work, time in samples if level == name]))
        for name in names
    }
    return floor, rates
