"""Models of linear layers that predictors are compared with, and that the product does not use.

On GPUs :class:`Interpolation` and a roofline choose alike from full profiles; from thin ones the roofline
chooses better (docs/profile.md).
"""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from heterollm.profiler.predict.curves import at_tokens, common_floor, rising, within_stages
from heterollm.profiler.predict.tree import features
from heterollm.profiler.records import LinearPoint


@dataclass(frozen=True)
class ConstantRate:
    """Multiply-adds at one rate, as the paper predicts GPU times (HeteroLLM, section 4.3)."""

    name: ClassVar[str] = "constant_rate"

    flops_per_us: float

    @classmethod
    def fit(cls, points: Sequence[LinearPoint], times_us: Sequence[float]) -> Self:
        """Take the median rate."""
        return cls(statistics.median(point.flops / us for point, us in zip(points, times_us, strict=True)))

    def estimate_us(self, point: LinearPoint) -> float:
        """Return the time at that rate."""
        return point.flops / self.flops_per_us


@dataclass(frozen=True)
class Interpolation:
    """Straight lines between measured times in tokens, rows and columns, in proportion beyond them.

    Args:
        floor_us: Part of the time that does not grow with the shape.
        curves: Tokens and times, rising within each stage, by columns and rows, ascending.
    """

    name: ClassVar[str] = "interpolation"

    floor_us: float
    curves: dict[tuple[int, int], tuple[list[int], list[float]]]

    @classmethod
    def fit(cls, points: Sequence[LinearPoint], times_us: Sequence[float]) -> Self:
        """Average the times of the same shape and arrange them in curves."""
        found: dict[tuple[int, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for point, time_us in zip(points, times_us, strict=True):
            found[point.columns, point.rows][point.tokens].append(time_us)
        curves = {}
        for shape, by_tokens in sorted(found.items()):
            tokens = sorted(by_tokens)
            means = [statistics.fmean(by_tokens[count]) for count in tokens]
            curves[shape] = tokens, within_stages(tokens, means)
        works = [features(point)[-1] for point in points]
        return cls(common_floor([point.tokens for point in points], works, times_us)[0], curves)

    def estimate_us(self, point: LinearPoint) -> float:
        """Return the time along rows at each measured number of columns, and then along columns."""
        found: dict[int, dict[int, float]] = defaultdict(dict)
        for (columns, rows), curve in self.curves.items():
            found[columns][rows] = at_tokens(*curve, point.tokens, self.floor_us)
        times = [self._between(list(own), rising(list(own.values())), point.rows) for own in found.values()]
        return self._between(list(found), rising(times), point.columns)

    def _between(self, sizes: Sequence[int], values: Sequence[float], size: int) -> float:
        """Return the time at a size between, below or above those known."""
        if size <= sizes[0] or size >= sizes[-1]:
            end = 0 if size <= sizes[0] else -1
            own, floor = values[end], self.floor_us
            return own if own <= floor else floor + (own - floor) * size / sizes[end]
        place = bisect.bisect_left(sizes, size)
        share = (size - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
        return values[place - 1] + (values[place] - values[place - 1]) * share
