"""Times between those measured: piecewise linear in tokens, rows and columns, in proportion beyond them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from heterollm.base import ProfileError
from heterollm.profiler.predict.features import work
from heterollm.profiler.predict.json_values import ascending, mapping, numbers, positive, sequence, whole
from heterollm.profiler.predict.monotone import (
    at_tokens,
    between,
    common_floor,
    isotonic,
    isotonic_within_stages,
)
from heterollm.profiler.records import LinearPoint

__all__ = ["Interpolation", "TokenCurve"]


@dataclass(frozen=True, slots=True)
class TokenCurve:
    """The times of one weight shape.

    Args:
        columns: Inputs of the weight.
        rows: Outputs of the weight.
        tokens: Measured numbers of tokens, ascending.
        times_us: Their times, rising within each stage.
    """

    columns: int
    rows: int
    tokens: tuple[int, ...]
    times_us: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Interpolation:
    """Goes through what was measured, made to rise within each order and stage.

    Args:
        floor_us: Part of the time that does not grow with the shape.
        curves: The measured shapes, by columns and then rows.
    """

    name: ClassVar[str] = "interpolation"

    floor_us: float
    curves: tuple[TokenCurve, ...]
    _at: dict[int, dict[int, tuple[list[int], list[float]]]] = field(
        default_factory=dict, repr=False, compare=False
    )

    @classmethod
    def fit(cls, points: Sequence[LinearPoint], times_us: Sequence[float]) -> Self:
        """Average what has the same shape and arrange it in curves."""
        found: dict[tuple[int, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for point, time_us in zip(points, times_us, strict=True):
            found[point.columns, point.rows][point.tokens].append(time_us)
        curves = []
        for (columns, rows), by_tokens in sorted(found.items()):
            tokens = sorted(by_tokens)
            means = [sum(by_tokens[count]) / len(by_tokens[count]) for count in tokens]
            curves.append(
                TokenCurve(columns, rows, tuple(tokens), tuple(isotonic_within_stages(tokens, means)))
            )
        floor, _ = common_floor(
            [point.tokens for point in points], [work(point) for point in points], times_us
        )
        return cls(floor, tuple(curves))

    def estimate_us(self, point: LinearPoint) -> float:
        """Return the time along rows at each measured number of columns, and then along columns."""
        by_columns = self._at.get(point.tokens)
        if by_columns is None:
            by_columns = self._at[point.tokens] = self._read(point.tokens)
        columns = list(by_columns)
        times = isotonic(
            [between(rows, values, point.rows, self.floor_us) for rows, values in by_columns.values()]
        )
        return between(columns, times, point.columns, self.floor_us)

    def _read(self, tokens: int) -> dict[int, tuple[list[int], list[float]]]:
        """Return rows and times at some tokens, by columns."""
        found: dict[int, tuple[list[int], list[float]]] = {}
        for curve in self.curves:
            rows, values = found.setdefault(curve.columns, ([], []))
            rows.append(curve.rows)
            values.append(at_tokens(curve.tokens, curve.times_us, tokens, self.floor_us))
        return {columns: (rows, isotonic(values)) for columns, (rows, values) in found.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        curves = [
            {
                "columns": curve.columns,
                "rows": curve.rows,
                "tokens": list(curve.tokens),
                "times_us": list(curve.times_us),
            }
            for curve in self.curves
        ]
        return {"floor_us": self.floor_us, "curves": curves}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Return the model of a JSON form; see :class:`heterollm.profiler.predict.time_model.ShapeModel`."""
        named = mapping(data, {"floor_us", "curves"}, cls.name)
        curves = tuple(_curve(entry) for entry in sequence(named["curves"], "curves"))
        shapes = [(curve.columns, curve.rows) for curve in curves]
        if not shapes or shapes != sorted(set(shapes)):
            raise ProfileError(f"{cls.name} holds no shapes, or not in order: {shapes!r:.160}.")
        return cls(positive(named["floor_us"], "floor", or_zero=True), curves)


def _curve(data: object) -> TokenCurve:
    named = mapping(data, {"columns", "rows", "tokens", "times_us"}, "curve")
    columns, rows = (whole([named[name]], name)[0] for name in ("columns", "rows"))
    tokens = whole(named["tokens"], "tokens")
    ascending(tokens, "tokens")
    times = numbers(named["times_us"], "times", len(tokens))
    if isotonic_within_stages(tokens, times) != times:
        raise ProfileError(f"The times of a curve fall within a stage: {times!r:.160}.")
    return TokenCurve(columns, rows, tuple(tokens), tuple(times))
