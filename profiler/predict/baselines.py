"""The baseline that every predictor must beat: one rate for all shapes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import ClassVar, Self

from msgspec import Struct

from heterollm.base import PositiveNumber
from heterollm.profiler.records import LinearPoint


class ConstantRate(Struct, frozen=True, forbid_unknown_fields=True, tag_field="model", tag="constant_rate"):
    """Multiply-adds at one rate, as the paper predicts GPU times (HeteroLLM, section 4.3).

    Args:
        flops_per_us: The rate.
    """

    name: ClassVar[str] = "constant_rate"

    flops_per_us: PositiveNumber

    @classmethod
    def fit(cls, points: Sequence[LinearPoint], times_us: Sequence[float]) -> Self:
        """Take the median rate."""
        rates = [point.flops / time_us for point, time_us in zip(points, times_us, strict=True)]
        return cls(statistics.median(rates))

    def estimate_us(self, point: LinearPoint) -> float:
        """Return the time at that rate."""
        return point.flops / self.flops_per_us
