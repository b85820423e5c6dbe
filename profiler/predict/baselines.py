"""What every predictor must beat: one rate for all shapes, and the nearest measured shape."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from heterollm.base import ProfileError
from heterollm.profiler.predict.json_values import mapping, numbers, positive, sequence
from heterollm.profiler.records import LinearPoint

__all__ = ["ConstantRate", "Nearest"]


@dataclass(frozen=True, slots=True)
class ConstantRate:
    """Multiply-adds at one rate, as the paper predicts GPU times (HeteroLLM, section 4.3).

    Args:
        flops_per_us: The rate.
    """

    name: ClassVar[str] = "constant_rate"

    flops_per_us: float

    @classmethod
    def fit(cls, points: Sequence[LinearPoint], times_us: Sequence[float]) -> Self:
        """Take the median rate."""
        rates = [point.flops / time_us for point, time_us in zip(points, times_us, strict=True)]
        return cls(statistics.median(rates))

    def estimate_us(self, point: LinearPoint) -> float:
        """Return the time at that rate."""
        return point.flops / self.flops_per_us

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {"flops_per_us": self.flops_per_us}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Return the model of a JSON form; see :class:`heterollm.profiler.predict.time_model.ShapeModel`."""
        return cls(positive(mapping(data, {"flops_per_us"}, cls.name)["flops_per_us"], "rate"))


@dataclass(frozen=True, slots=True)
class Nearest:
    """The time of the measured shape with the nearest tokens, rows and columns, as ratios.

    Args:
        shapes: ``(tokens, rows, columns)`` of each.
        times_us: Their times.
    """

    name: ClassVar[str] = "nearest"

    shapes: tuple[tuple[float, ...], ...]
    times_us: tuple[float, ...]

    @classmethod
    def fit(cls, points: Sequence[LinearPoint], times_us: Sequence[float]) -> Self:
        """Keep every sample."""
        shapes = tuple((float(point.tokens), float(point.rows), float(point.columns)) for point in points)
        return cls(shapes, tuple(times_us))

    def estimate_us(self, point: LinearPoint) -> float:
        """Return the time of the nearest."""
        sizes = (point.tokens, point.rows, point.columns)

        def distance(place: int) -> float:
            # The product of the ratios orders shapes as the sum of their logarithms does.
            product = 1.0
            for size, held in zip(sizes, self.shapes[place], strict=True):
                product *= size / held if size > held else held / size
            return product

        return self.times_us[min(range(len(self.shapes)), key=distance)]

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        return {"shapes": [list(shape) for shape in self.shapes], "times_us": list(self.times_us)}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Return the model of a JSON form; see :class:`heterollm.profiler.predict.time_model.ShapeModel`."""
        named = mapping(data, {"shapes", "times_us"}, cls.name)
        shapes = tuple(tuple(numbers(shape, "shape", 3)) for shape in sequence(named["shapes"], "shapes"))
        times = numbers(named["times_us"], "times", len(shapes))
        if not times:
            raise ProfileError(f"{cls.name} holds no shape.")
        return cls(shapes, tuple(times))
