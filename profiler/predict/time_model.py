"""What every predictor of linear layers shares: its answer, what it knows, and its JSON form.

A model is fitted for one *kind* of slice (form and number formats) at a time, so that no number of one leaks
into another; and feed-forward blocks are never predicted from plain linear layers, nor these from them.
Predictions use only additions, multiplications, divisions and comparisons of float64, whose
results IEEE 754 fixes: they are the same on every platform.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Final, Protocol, Self, get_args

from heterollm.base import ProfileError
from heterollm.kernels.ops import Group
from heterollm.profiler.predict.json_values import mapping, number, positive, sequence, whole, word
from heterollm.profiler.records import LinearPoint

__all__ = ["Hull", "Kind", "Prediction", "ShapeModel", "TimeModel", "point_from_dict"]

KNOWN_FACTOR: Final = 2.0
"""How far beyond the measured tokens, rows and columns a model still knows a shape."""

UNKNOWN_FACTOR: Final = 2.0
"""By how much the interval of an unknown shape is wider, to either side."""

DEFAULT_SPREAD: Final = (0.5, 2.0)
"""Interval as ratios of the prediction, until cross-validation has found them."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The time of one pass.

    Args:
        us: Microseconds expected.
        low_us: Nine in ten passes take longer than this.
        high_us: Nine in ten passes take less than this.
        known: Whether the shape is within what was measured, or near it.
        source: ``measured``, or the name of the model.
    """

    us: float
    low_us: float
    high_us: float
    known: bool
    source: str


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """What slices must have in common for their times to be comparable: what ``LinearPoint`` says of them."""

    form: str
    integer_inputs: bool
    bits: int
    block: int
    symmetric: bool
    streamed: bool
    is_block: bool = False

    @classmethod
    def of(cls, point: LinearPoint) -> Kind:
        """Return the kind of a slice."""
        return cls(
            point.form,
            point.integer_inputs,
            point.bits,
            point.block,
            point.symmetric,
            point.streamed,
            point.is_block,
        )

    def unlikeness(self, other: Kind) -> tuple[int, ...]:
        """Return how far another kind is from this one: what weighs most comes first."""
        return (
            self.form != other.form,
            self.integer_inputs != other.integer_inputs,
            abs(self.bits - other.bits),
            abs(self.block - other.block),
            self.symmetric != other.symmetric,
            self.streamed != other.streamed,
        )

    @classmethod
    def from_dict(cls, data: object) -> Kind:
        """Return the kind of a JSON form.

        Raises:
            ProfileError: It is not one.
        """
        named = mapping(data, {item.name for item in fields(cls)}, "kind")
        _check_kind(named)
        if type(named["is_block"]) is not bool:
            raise ProfileError(f"A predictor's kind is {dict(named)!r:.200}.")
        return cls(**named)


@dataclass(frozen=True, slots=True)
class Hull:
    """The smallest and largest tokens, rows and columns that a model was fitted on."""

    low: tuple[float, ...]
    high: tuple[float, ...]

    @classmethod
    def of(cls, points: Sequence[LinearPoint]) -> Hull:
        """Return the hull of some slices."""
        sizes = list(zip(*(_sizes(point) for point in points), strict=True))
        return cls(tuple(float(min(size)) for size in sizes), tuple(float(max(size)) for size in sizes))

    def near(self, point: LinearPoint) -> bool:
        """Whether a slice is within, or beyond by no more than the stated factor."""
        sizes = zip(_sizes(point), self.low, self.high, strict=True)
        return all(low / KNOWN_FACTOR <= size <= high * KNOWN_FACTOR for size, low, high in sizes)


def _sizes(point: LinearPoint) -> tuple[int, int, int]:
    return point.tokens, point.rows, point.columns


class ShapeModel(Protocol):
    """Predicts the time of slices of one kind."""

    name: ClassVar[str]

    @classmethod
    def fit(cls, points: Sequence[LinearPoint], times_us: Sequence[float]) -> Self:
        """Return the model of at least one measured slice, all of one kind, times positive."""
        ...

    def estimate_us(self, point: LinearPoint) -> float:
        """Return the time of a slice of any shape: finite and positive."""
        ...

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        ...

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Return the model of a JSON form.

        Raises:
            ProfileError: It is not one.
        """
        ...


@dataclass(slots=True)
class TimeModel:
    """A model for each kind of slice of one part.

    Args:
        model: How kinds are modelled.
        kinds: The fitted models, with what they were fitted on.
        spread: Tenth and ninetieth percentile of measured over predicted time on shapes kept out of the fit.
    """

    model: type[ShapeModel]
    kinds: dict[Kind, tuple[ShapeModel, Hull]] = field(default_factory=dict)
    spread: tuple[float, float] = DEFAULT_SPREAD

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.model.name

    def fit(self, points: Sequence[LinearPoint], times_us: Sequence[float]) -> TimeModel:
        """Fit every kind and return the model itself.

        Raises:
            ProfileError: There is nothing to fit.
        """
        by_kind: dict[Kind, list[tuple[LinearPoint, float]]] = defaultdict(list)
        for point, time_us in sorted(zip(points, times_us, strict=True)):
            by_kind[Kind.of(point)].append((point, time_us))
        if not by_kind:
            raise ProfileError(
                "There are no linear layers to learn times from.", fix="Run `heterollm profile`."
            )
        self.kinds = {}
        for kind, samples in sorted(by_kind.items()):
            of_kind, times = [point for point, _ in samples], [time_us for _, time_us in samples]
            self.kinds[kind] = (self.model.fit(of_kind, times), Hull.of(of_kind))
        return self

    def predict(self, point: LinearPoint) -> Prediction:
        """Return the time of a slice; of a kind that was never measured, that of the likest one.

        Raises:
            ProfileError: The model was not fitted; or the slice is one of a feed-forward block and only plain
                linear layers were measured, or the other way round.
        """
        kind = Kind.of(point)
        held = self.kinds.get(kind)
        known = held is not None
        if held is None:
            alike = [other for other in self.kinds if other.is_block == kind.is_block]
            if not alike:
                what = "feed-forward block" if kind.is_block else "linear layer"
                raise ProfileError(
                    f"There is no measured {what} to predict others from.", fix="Run `heterollm profile`."
                )
            held = self.kinds[min(alike, key=lambda other: (*kind.unlikeness(other), other))]
        model, hull = held
        us = model.estimate_us(point)
        known = known and hull.near(point)
        wider = 1.0 if known else UNKNOWN_FACTOR
        low, high = min(self.spread[0], 1.0) / wider, max(self.spread[1], 1.0) * wider
        return Prediction(us, us * low, us * high, known, self.name)

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold."""
        kinds = [
            {"kind": asdict(kind), "low": list(hull.low), "high": list(hull.high), "model": model.to_dict()}
            for kind, (model, hull) in self.kinds.items()
        ]
        return {"model": self.name, "spread": list(self.spread), "kinds": kinds}

    @classmethod
    def from_dict(cls, data: object, models: Mapping[str, type[ShapeModel]]) -> TimeModel:
        """Return the model of a JSON form.

        Args:
            data: The form.
            models: How kinds may be modelled, by name.

        Raises:
            ProfileError: It is not one.
        """
        named = mapping(data, {"model", "spread", "kinds"}, "model")
        model = models.get(word(named["model"], "model"))
        if model is None:
            raise ProfileError(f"There is no predictor called {named['model']!r:.80}.")
        spread = [positive(value, "spread") for value in sequence(named["spread"], "spread", 2)]
        fitted = cls(model, spread=(spread[0], spread[1]))
        for entry in sequence(named["kinds"], "kinds"):
            item = mapping(entry, {"kind", "low", "high", "model"}, "kind of a model")
            low, high = (
                tuple(number(value, name) for value in sequence(item[name], name, 3))
                for name in ("low", "high")
            )
            fitted.kinds[Kind.from_dict(item["kind"])] = (model.from_dict(item["model"]), Hull(low, high))
        if not fitted.kinds:
            raise ProfileError("A predictor holds no fitted model.")
        return fitted


def point_from_dict(data: object) -> LinearPoint:
    """Return the slice of a JSON form.

    Raises:
        ProfileError: It is not one.
    """
    named = mapping(data, set(LinearPoint.__struct_fields__), "A slice")
    _check_kind(named)
    if named["group"] not in get_args(Group):
        raise ProfileError(f"There is no group {named['group']!r:.80}.")
    rows = sequence(named["member_rows"], "member_rows")
    # A member that is too short to be cut has no rows on one of the parts.
    own = [count for count in rows if type(count) is not int or count]
    whole([*own, named["columns"], named["tokens"]] if own else own, "member_rows, columns and tokens")
    return LinearPoint(**{**named, "member_rows": tuple(rows)})


def _check_kind(named: Mapping[str, Any]) -> None:
    """Check the fields that make up a kind."""
    word(named["form"], "form")
    counts, flags = [("bits", 1), ("block", 0)], ("integer_inputs", "symmetric", "streamed")
    if not all(type(named[name]) is int and low <= named[name] <= 4096 for name, low in counts) or not all(
        type(named[name]) is bool for name in flags
    ):
        raise ProfileError(f"A predictor's number formats are {dict(named)!r:.200}.")
