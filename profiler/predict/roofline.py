"""A part bound by memory or by arithmetic whose efficiency rises with the number of tokens.

``T = floor + max(bytes / bandwidth, operations / rate(m))``. A pass that unpacks the weights first costs the
same at any number of tokens, which is an efficiency that rises with them: ``W/R + 2 W m/F = 2 W (m + h)/F``.
So one curve, the time that a weight costs at ``m`` tokens, holds both; it is read off the measurements.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from heterollm.base import ProfileError
from heterollm.profiler.predict.json_values import ascending, mapping, numbers, positive, whole
from heterollm.profiler.predict.monotone import common_floor, isotonic
from heterollm.profiler.records import LinearPoint

__all__ = ["Roofline"]


@dataclass(frozen=True, slots=True)
class Roofline:
    """Bandwidth, and the time per weight at each measured number of tokens.

    Args:
        floor_us: Cost of a pass whatever its size.
        bytes_per_us: The fastest that weights were ever read.
        tokens: Measured numbers of tokens, ascending.
        us_per_weight: Time of each weight at these, rising.
    """

    name: ClassVar[str] = "roofline"

    floor_us: float
    bytes_per_us: float
    tokens: tuple[int, ...]
    us_per_weight: tuple[float, ...]

    @classmethod
    def fit(cls, points: Sequence[LinearPoint], times_us: Sequence[float]) -> Self:
        """Fit the floor and every number of tokens together."""
        weights = [point.rows * point.columns for point in points]
        floor, by_tokens = common_floor([point.tokens for point in points], weights, times_us)
        tokens = sorted(by_tokens)
        # Tokens that others share a pass over the weights with cost no more than they would alone.
        shares = isotonic([-by_tokens[count] / count for count in tokens])
        costs = isotonic([-share * count for share, count in zip(shares, tokens, strict=True)])
        bandwidth = max(
            point.weight_bytes / (time_us - floor) for point, time_us in zip(points, times_us, strict=True)
        )
        return cls(floor, bandwidth, tuple(tokens), tuple(costs))

    def estimate_us(self, point: LinearPoint) -> float:
        """Return the floor and whichever bound is later."""
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

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {
            "floor_us": self.floor_us,
            "bytes_per_us": self.bytes_per_us,
            "tokens": list(self.tokens),
            "us_per_weight": list(self.us_per_weight),
        }

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Return the model of a JSON form; see :class:`heterollm.profiler.predict.time_model.ShapeModel`."""
        named = mapping(data, {"floor_us", "bytes_per_us", "tokens", "us_per_weight"}, cls.name)
        tokens = whole(named["tokens"], "tokens")
        ascending(tokens, "tokens")
        costs = numbers(named["us_per_weight"], "costs", len(tokens))
        if costs != sorted(costs):
            raise ProfileError(f"{cls.name} has costs that fall as tokens rise: {costs!r:.160}.")
        floor = positive(named["floor_us"], "floor", or_zero=True)
        return cls(floor, positive(named["bytes_per_us"], "bandwidth"), tuple(tokens), tuple(costs))
