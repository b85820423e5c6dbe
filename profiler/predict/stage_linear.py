"""A fixed cost plus a cost for each tile of the array, with a table of stages for each form.

The equations of a weight-stationary array are ``T = t + n·k·(32 m + L)·c`` for one order and
``T = t + k·m·(32 n + L)·c`` for the other, in tiles of 32, besides a term in ``n·k`` for reading the weights
(HeteroLLM, section 3.2; docs of the simulated device). At a fixed number of tokens all of them are sums of a
constant, ``k``, ``n`` and ``n·k`` with coefficients that are not negative, so that is what is fitted at each
step of tokens. How steps relate is taken from the measurements, since one form costs less at 33 tokens than
at 32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self

import numpy as np

from heterollm.base import ProfileError
from heterollm.profiler.predict.features import stage, stage_tokens
from heterollm.profiler.predict.json_values import ascending, mapping, numbers, positive, sequence, whole
from heterollm.profiler.predict.monotone import (
    at_tokens,
    common_floor,
    isotonic_within_stages,
    nonnegative_fit,
)
from heterollm.profiler.records import LinearPoint

__all__ = ["StageLinear"]

TERMS: Final = 4
SHAPES_FOR_ALL_TERMS: Final = 6
SHAPES_FOR_A_FLOOR: Final = 3


@dataclass(frozen=True, slots=True)
class StageLinear:
    """Costs at each step of tokens.

    Args:
        floor_us: Part of the time that does not grow with tokens, to go beyond the measured ones.
        steps: Tokens at the end of each measured step: multiples of 4 up to 32, and of 32 beyond.
        costs_us: For each step the cost of a pass, of a tile of ``n·k``, of one of ``k`` and of one of ``n``.
    """

    name: ClassVar[str] = "stage_linear"

    floor_us: float
    steps: tuple[int, ...]
    costs_us: tuple[tuple[float, ...], ...]
    _curves: dict[tuple[int, int], list[float]] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def fit(cls, points: Sequence[LinearPoint], times_us: Sequence[float]) -> Self:
        """Fit every step by itself."""
        by_step: dict[int, list[tuple[LinearPoint, float]]] = defaultdict(list)
        for point, time_us in zip(points, times_us, strict=True):
            by_step[stage_tokens(point.tokens)].append((point, time_us))
        levels = [stage_tokens(point.tokens) for point in points]
        floor, rates = common_floor(levels, [_terms(point)[1] for point in points], times_us)
        costs: list[tuple[float, ...]] = []
        for step in sorted(by_step):
            terms = np.array([_terms(point) for point, _ in by_step[step]], np.float64)
            times = np.array([time_us for _, time_us in by_step[step]], np.float64)
            shapes = len(np.unique(terms, axis=0))
            if shapes < SHAPES_FOR_A_FLOOR:
                costs.append((floor, rates[step], 0.0, 0.0))
                continue
            used = TERMS if shapes >= SHAPES_FOR_ALL_TERMS else 2
            fitted = [float(cost) for cost in nonnegative_fit(terms[:, :used], times)]
            costs.append((*fitted, *[0.0] * (TERMS - used)))
        return cls(floor, tuple(sorted(by_step)), tuple(costs))

    def estimate_us(self, point: LinearPoint) -> float:
        """Return the sum of the costs at the step of the point's tokens, or between steps."""
        shape = (stage(point.rows), stage(point.columns))
        curve = self._curves.get(shape)
        if curve is None:
            terms = _terms(point)
            times = [
                costs[0] + costs[1] * terms[1] + costs[2] * terms[2] + costs[3] * terms[3]
                for costs in self.costs_us
            ]
            curve = self._curves[shape] = isotonic_within_stages(self.steps, times)
        return at_tokens(self.steps, curve, stage_tokens(point.tokens), self.floor_us)

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {
            "floor_us": self.floor_us,
            "steps": list(self.steps),
            "costs_us": [list(costs) for costs in self.costs_us],
        }

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Return the model of a JSON form; see :class:`heterollm.profiler.predict.time_model.ShapeModel`."""
        named = mapping(data, {"floor_us", "steps", "costs_us"}, cls.name)
        steps = whole(named["steps"], "steps")
        ascending(steps, "steps")
        costs = [
            tuple(numbers(entry, "costs", TERMS, or_zero=True))
            for entry in sequence(named["costs_us"], "costs", len(steps))
        ]
        if any(stage_tokens(step) != step for step in steps) or not all(any(entry) for entry in costs):
            raise ProfileError(f"{cls.name} has steps {steps!r:.160} or costs nothing at one of them.")
        return cls(positive(named["floor_us"], "floor", or_zero=True), tuple(steps), tuple(costs))


def _terms(point: LinearPoint) -> tuple[float, float, float, float]:
    """Return what the costs are multiplied with."""
    rows, columns = stage(point.rows), stage(point.columns)
    return 1.0, float(rows * columns), float(columns), float(rows)
