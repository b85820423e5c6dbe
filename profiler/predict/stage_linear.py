"""A fixed cost plus costs for each tile of the array, fitted at each step of tokens.

The equations of a weight-stationary array are ``T = t + n·k·(32 m + L)·c`` for one order and
``T = t + k·m·(32 n + L)·c`` for the other, in tiles of 32, besides a term in ``n·k`` for reading the weights
(HeteroLLM, section 3.2; docs/soc-model.md). At a fixed number of tokens both are sums of a constant,
``k``, ``n`` and ``n·k`` with coefficients that are not negative, and these are fitted. How the steps relate
follows from the measurements, since one order costs less at 33 tokens than at 32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, ClassVar, Final, Self

import numpy as np
from msgspec import Meta, Struct

from heterollm.base import Amount, Positive
from heterollm.profiler.predict.curves import (
    at_tokens,
    common_floor,
    nonnegative_fit,
    rises,
    stage,
    step_end,
    within_stages,
)
from heterollm.profiler.records import LinearPoint

TERMS: Final = 4
SHAPES_FOR_ALL_TERMS: Final = 6
SHAPES_FOR_A_FLOOR: Final = 3
"""With fewer shapes a step has the fixed cost of all steps, and a cost of ``n·k`` of its own."""


class StageLinear(
    Struct, frozen=True, forbid_unknown_fields=True, dict=True, tag_field="model", tag="stage_linear"
):
    """Costs at each step of tokens, and straight lines between steps.

    Args:
        floor_us: Part of the time that does not grow with tokens, to go beyond the measured ones.
        steps: Tokens at the end of each measured step: multiples of 4 up to 32, and of 32 beyond.
        costs_us: For each step the cost of a pass, of a tile of ``n·k``, of one of ``k`` and of one of ``n``.
    """

    name: ClassVar[str] = "stage_linear"

    floor_us: Amount
    steps: Annotated[list[Positive], Meta(min_length=1)]
    costs_us: list[tuple[Amount, Amount, Amount, Amount]]

    def __post_init__(self) -> None:
        """Check that every step has its costs."""
        if len(self.steps) != len(self.costs_us) or not rises(self.steps):
            raise ValueError("steps need rising tokens, and costs for each of them")

    @classmethod
    def fit(cls, points: Sequence[LinearPoint], times_us: Sequence[float]) -> Self:
        """Fit every step by itself."""
        by_step: dict[int, list[tuple[LinearPoint, float]]] = defaultdict(list)
        for point, time_us in zip(points, times_us, strict=True):
            by_step[step_end(point.tokens)].append((point, time_us))
        levels = [step_end(point.tokens) for point in points]
        floor, rates = common_floor(levels, [_terms(point)[1] for point in points], times_us)
        costs = []
        for step in sorted(by_step):
            terms = np.array([_terms(point) for point, _ in by_step[step]], np.float64)
            shapes = len(np.unique(terms, axis=0))
            if shapes < SHAPES_FOR_A_FLOOR:
                costs.append((floor, rates[step], 0.0, 0.0))
                continue
            used = TERMS if shapes >= SHAPES_FOR_ALL_TERMS else 2
            fitted = nonnegative_fit(terms[:, :used], np.array([time_us for _, time_us in by_step[step]]))
            once, tile, column, row = (*fitted, 0.0, 0.0)[:TERMS]
            costs.append((once, tile, column, row))
        return cls(floor, sorted(by_step), costs)

    @cached_property
    def _curves(self) -> dict[tuple[int, int], list[float]]:
        """Times at the steps by tiles of rows and columns, as far as they were asked for."""
        return {}

    def estimate_us(self, point: LinearPoint) -> float:
        """Return the sum of the costs at the step of the point's tokens, or between steps."""
        shape = (stage(point.rows), stage(point.columns))
        curve = self._curves.get(shape)
        if curve is None:
            once, tiles, columns, rows = _terms(point)
            times = [
                costs[0] * once + costs[1] * tiles + costs[2] * columns + costs[3] * rows
                for costs in self.costs_us
            ]
            curve = self._curves[shape] = within_stages(self.steps, times)
        return at_tokens(self.steps, curve, step_end(point.tokens), self.floor_us)


def _terms(point: LinearPoint) -> tuple[float, float, float, float]:
    """Return the factors of the costs."""
    rows, columns = stage(point.rows), stage(point.columns)
    return 1.0, float(rows * columns), float(columns), float(rows)
