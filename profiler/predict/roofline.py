"""A roofline: memory bounds a processor, or arithmetic whose efficiency rises with the number of tokens.

``T = floor + max(bytes / bandwidth, operations / rate(m))``. A pass that unpacks the weights first takes the
same time for it at any number of tokens: ``W/R + 2 W m/F = 2 W (m + h)/F``, an efficiency that rises with
tokens. One measured curve, the time of a weight at ``m`` tokens, describes both.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import ClassVar, Self

from msgspec import Struct

from heterollm.base import Amount, Positive, PositiveNumber
from heterollm.profiler.predict.curves import common_floor, isotonic_median, rises
from heterollm.profiler.records import LinearPoint


class Roofline(Struct, frozen=True, forbid_unknown_fields=True, tag_field="model", tag="roofline"):
    """Bandwidth, and the time per weight at each measured number of tokens.

    Args:
        floor_us: Fixed cost of a pass.
        bytes_per_us: The fastest measured rate of reading weights.
        tokens: Measured numbers of tokens, ascending.
        us_per_weight: Time of each weight at these, rising.
    """

    name: ClassVar[str] = "roofline"

    floor_us: Amount
    bytes_per_us: PositiveNumber
    tokens: list[Positive]
    us_per_weight: list[PositiveNumber]

    def __post_init__(self) -> None:
        """Check that the curve has a time at each of its tokens."""
        if not self.tokens or len(self.tokens) != len(self.us_per_weight) or not rises(self.tokens):
            raise ValueError("a roofline needs rising tokens, and a time for each of them")

    @classmethod
    def fit(cls, points: Sequence[LinearPoint], times_us: Sequence[float]) -> Self:
        """Fit the floor and every number of tokens together."""
        weights = [point.rows * point.columns for point in points]
        floor, by_tokens = common_floor([point.tokens for point in points], weights, times_us)
        tokens = sorted(by_tokens)
        # A token costs no more in a longer pass than in a shorter one.
        shares = isotonic_median([-by_tokens[count] / count for count in tokens])
        costs = isotonic_median([-share * count for share, count in zip(shares, tokens, strict=True)])
        bandwidth = max(
            point.weight_bytes / (time_us - floor) for point, time_us in zip(points, times_us, strict=True)
        )
        return cls(floor, bandwidth, tokens, costs)

    def estimate_us(self, point: LinearPoint) -> float:
        """Return the floor plus the larger of both bounds."""
        arithmetic_us = self._us_per_weight(point.tokens) * (point.rows * point.columns)
        return self.floor_us + max(point.weight_bytes / self.bytes_per_us, arithmetic_us)

    def _us_per_weight(self, tokens: int) -> float:
        known, costs = self.tokens, self.us_per_weight
        place = bisect.bisect_left(known, tokens)
        if place == 0 or place == len(known):
            end = 0 if place == 0 else -1
            return costs[end] * tokens / known[end]
        share = (tokens - known[place - 1]) / (known[place] - known[place - 1])
        return costs[place - 1] + (costs[place] - costs[place - 1]) * share
