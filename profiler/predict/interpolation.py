"""Times between those measured: straight lines in tokens, rows and columns, in proportion beyond them."""

from __future__ import annotations

import bisect
import statistics
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, ClassVar, Self

from msgspec import Meta, Struct

from heterollm.base import Amount, Positive, PositiveNumber
from heterollm.profiler.predict.curves import at_tokens, common_floor, rises, rising, within_stages
from heterollm.profiler.predict.tree import features
from heterollm.profiler.records import LinearPoint


class TokenCurve(Struct, frozen=True, forbid_unknown_fields=True):
    """The times of one weight shape, rising within each stage, at ascending numbers of tokens."""

    columns: Positive
    rows: Positive
    tokens: list[Positive]
    times_us: list[PositiveNumber]

    def __post_init__(self) -> None:
        """Check that the curve has a time at each of its tokens."""
        if not self.tokens or len(self.tokens) != len(self.times_us) or not rises(self.tokens):
            raise ValueError("a curve needs rising tokens, and a time for each of them")


class Interpolation(
    Struct, frozen=True, forbid_unknown_fields=True, dict=True, tag_field="model", tag="interpolation"
):
    """Straight lines between measured times.

    Args:
        floor_us: Part of the time that does not grow with the shape.
        curves: The measured shapes, by columns and then rows, ascending.
    """

    name: ClassVar[str] = "interpolation"

    floor_us: Amount
    curves: Annotated[list[TokenCurve], Meta(min_length=1)]

    def __post_init__(self) -> None:
        """Check that every shape has one curve, in order."""
        shapes = [(curve.columns, curve.rows) for curve in self.curves]
        if shapes != sorted(set(shapes)):
            raise ValueError("an interpolation needs a curve for each shape, in order")

    @classmethod
    def fit(cls, points: Sequence[LinearPoint], times_us: Sequence[float]) -> Self:
        """Average the times of the same shape and arrange them in curves."""
        found: dict[tuple[int, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
        for point, time_us in zip(points, times_us, strict=True):
            found[point.columns, point.rows][point.tokens].append(time_us)
        curves = []
        for (columns, rows), by_tokens in sorted(found.items()):
            tokens = sorted(by_tokens)
            means = [statistics.fmean(by_tokens[count]) for count in tokens]
            curves.append(TokenCurve(columns, rows, tokens, within_stages(tokens, means)))
        works = [features(point)[-1] for point in points]
        return cls(common_floor([point.tokens for point in points], works, times_us)[0], curves)

    @cached_property
    def _at(self) -> dict[int, dict[int, tuple[list[int], list[float]]]]:
        """Rows and times by tokens and columns, as far as they were asked for."""
        return {}

    def estimate_us(self, point: LinearPoint) -> float:
        """Return the time along rows at each measured number of columns, and then along columns."""
        by_columns = self._at.get(point.tokens)
        if by_columns is None:
            by_columns = self._at[point.tokens] = self._read(point.tokens)
        times = [self._between(rows, values, point.rows) for rows, values in by_columns.values()]
        return self._between(list(by_columns), rising(times), point.columns)

    def _read(self, tokens: int) -> dict[int, tuple[list[int], list[float]]]:
        """Return rows and times at some tokens, by columns."""
        found: dict[int, tuple[list[int], list[float]]] = {}
        for curve in self.curves:
            rows, values = found.setdefault(curve.columns, ([], []))
            rows.append(curve.rows)
            values.append(at_tokens(curve.tokens, curve.times_us, tokens, self.floor_us))
        return {columns: (rows, rising(values)) for columns, (rows, values) in found.items()}

    def _between(self, sizes: Sequence[int], values: Sequence[float], size: int) -> float:
        """Return the time at a size between, below or above those known."""
        if size <= sizes[0] or size >= sizes[-1]:
            end = 0 if size <= sizes[0] else -1
            known, floor = values[end], self.floor_us
            return known if known <= floor else floor + (known - floor) * size / sizes[end]
        place = bisect.bisect_left(sizes, size)
        share = (size - sizes[place - 1]) / (sizes[place] - sizes[place - 1])
        return values[place - 1] + (values[place] - values[place - 1]) * share
