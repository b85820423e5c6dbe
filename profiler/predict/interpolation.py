"""Times between those measured: piecewise linear in tokens, rows and columns, in proportion beyond them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, ClassVar, Self

from msgspec import Meta, Struct

from heterollm.base import Amount, Positive, PositiveNumber
from heterollm.profiler.predict.curves import (
    at_tokens,
    between,
    check_rising,
    common_floor,
    isotonic,
    rising,
    within_stages,
)
from heterollm.profiler.predict.features import work
from heterollm.profiler.records import LinearPoint


class TokenCurve(Struct, frozen=True, forbid_unknown_fields=True):
    """The times of one weight shape.

    Args:
        columns: Inputs of the weight.
        rows: Outputs of the weight.
        tokens: Measured numbers of tokens, ascending.
        times_us: Their times, rising within each stage.
    """

    columns: Positive
    rows: Positive
    tokens: list[Positive]
    times_us: list[PositiveNumber]

    def __post_init__(self) -> None:
        """Check that there is a curve and that it rises within each stage."""
        if not self.tokens or len(self.tokens) != len(self.times_us):
            raise ValueError("a curve needs a time for each number of tokens")
        check_rising("tokens", self.tokens, strictly=True)
        if within_stages(rising, self.tokens, self.times_us) != self.times_us:
            raise ValueError(f"times_us must rise within each stage, and is {self.times_us!r:.160}")


class Interpolation(
    Struct, frozen=True, forbid_unknown_fields=True, dict=True, tag_field="model", tag="interpolation"
):
    """Straight lines between measured times, which are made to rise within each stage.

    Args:
        floor_us: Part of the time that does not grow with the shape.
        curves: The measured shapes, by columns and then rows.
    """

    name: ClassVar[str] = "interpolation"

    floor_us: Amount
    curves: Annotated[list[TokenCurve], Meta(min_length=1)]

    def __post_init__(self) -> None:
        """Check that every shape has one curve, in order."""
        shapes = [(curve.columns, curve.rows) for curve in self.curves]
        if shapes != sorted(set(shapes)):
            raise ValueError(f"an interpolation needs its shapes in order: {shapes!r:.160}")

    @classmethod
    def fit(cls, points: Sequence[LinearPoint], times_us: Sequence[float]) -> Self:
        """Average the times of the same shape and arrange them in curves."""
        found: dict[tuple[int, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for point, time_us in zip(points, times_us, strict=True):
            found[point.columns, point.rows][point.tokens].append(time_us)
        curves = []
        for (columns, rows), by_tokens in sorted(found.items()):
            tokens = sorted(by_tokens)
            means = [sum(by_tokens[count]) / len(by_tokens[count]) for count in tokens]
            curves.append(TokenCurve(columns, rows, tokens, within_stages(isotonic, tokens, means)))
        floor, _ = common_floor(
            [point.tokens for point in points], [work(point) for point in points], times_us
        )
        return cls(floor, curves)

    @cached_property
    def _at(self) -> dict[int, dict[int, tuple[list[int], list[float]]]]:
        """Rows and times by tokens and columns, as far as they were asked for."""
        return {}

    def estimate_us(self, point: LinearPoint) -> float:
        """Return the time along rows at each measured number of columns, and then along columns."""
        by_columns = self._at.get(point.tokens)
        if by_columns is None:
            by_columns = self._at[point.tokens] = self._read(point.tokens)
        own, floor_us = point.rows, self.floor_us
        times = rising([between(rows, values, own, floor_us) for rows, values in by_columns.values()])
        return between(list(by_columns), times, point.columns, floor_us)

    def _read(self, tokens: int) -> dict[int, tuple[list[int], list[float]]]:
        """Return rows and times at some tokens, by columns."""
        found: dict[int, tuple[list[int], list[float]]] = {}
        for curve in self.curves:
            rows, values = found.setdefault(curve.columns, ([], []))
            rows.append(curve.rows)
            values.append(at_tokens(curve.tokens, curve.times_us, tokens, self.floor_us))
        return {columns: (rows, rising(values)) for columns, (rows, values) in found.items()}
