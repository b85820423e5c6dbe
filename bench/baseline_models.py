"""A model of linear layers that predictors are compared with, and that the product does not use."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

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
