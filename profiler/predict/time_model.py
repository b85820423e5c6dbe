"""The protocol of models of linear layers, and the answers of all of them.

A model is fitted for each *kind* of shard (form and number formats) by itself. An ffn is never predicted from
plain linear layers, nor a linear layer from ffns. Predictions use only additions,
multiplications, divisions and comparisons of float64, whose results IEEE 754 fixes: they are the same on
every platform.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Final, Protocol, Self

from msgspec import Meta, Struct

from heterollm.base import Amount, ProfileError
from heterollm.profiler.measure import Measurement
from heterollm.profiler.records import LinearPoint, Record

KNOWN_FACTOR: Final = 2.0
"""A shape counts as known up to this factor beyond the measured tokens, rows and columns."""

UNKNOWN_FACTOR: Final = 2.0
"""Factor by which the interval of an unknown shape is wider, to either side."""

DEFAULT_SPREAD: Final = (0.5, 2.0)
"""Interval as ratios of the prediction, until cross-validation has found them."""


class Prediction(Struct, frozen=True):
    """The time of one pass.

    Args:
        us: Microseconds expected.
        low_us: Nine in ten passes take longer than this.
        high_us: Nine in ten passes take less than this.
        known: Whether the shape is within the measured ones, or near them.
        source: ``measured``, or the name of the model.
    """

    us: float
    low_us: float
    high_us: float
    known: bool
    source: str


def near(sizes: Sequence[float], low: Sequence[float], high: Sequence[float]) -> bool:
    """Whether sizes are within the measured ones, or beyond them by at most ``KNOWN_FACTOR``."""
    bounds = zip(sizes, low, high, strict=True)
    return all(least / KNOWN_FACTOR <= size <= most * KNOWN_FACTOR for size, least, most in bounds)


def with_interval(us: float, spread: tuple[float, float], *, known: bool, source: str) -> Prediction:
    """Return a predicted time with its interval, which is wider for an unknown shape."""
    wider = 1.0 if known else UNKNOWN_FACTOR
    low, high = min(spread[0], 1.0) / wider, max(spread[1], 1.0) * wider
    return Prediction(us, us * low, us * high, known, source)


def measured_time(record: Record) -> Prediction:
    """Return the measured time of a record, between its quartiles."""
    low, high = Measurement(record.samples_us).quartiles_us
    return Prediction(record.median_us, low, high, True, "measured")


def undisturbed(records: Sequence[Record]) -> Sequence[Record]:
    """Return the records that are not disturbed; all where the others are too few to predict from."""
    sound = [record for record in records if not record.disturbed]
    return sound if 2 * len(sound) >= len(records) else records


class Kind(Struct, frozen=True, order=True, forbid_unknown_fields=True, rename={"is_ffn": "is_block"}):
    """The fields of ``LinearPoint`` that two shards must share for their times to be comparable."""

    form: str
    integer_inputs: bool
    bits: Annotated[int, Meta(ge=1, le=4096)]
    block: Annotated[int, Meta(ge=0, le=4096)]
    symmetric: bool
    streamed: bool
    is_ffn: bool
    minimum: bool = False

    @classmethod
    def of(cls, point: LinearPoint) -> Kind:
        """Return the kind of a shard."""
        return cls(
            point.form,
            point.integer_inputs,
            point.bits,
            point.block,
            point.symmetric,
            point.streamed,
            point.is_ffn,
            point.minimum,
        )

    def unlikeness(self, other: Kind) -> tuple[int, ...]:
        """Return how far another kind is from this one, the weightiest difference first."""
        return (
            self.form != other.form,
            self.integer_inputs != other.integer_inputs,
            abs(self.bits - other.bits),
            abs(self.block - other.block),
            self.symmetric != other.symmetric,
            self.minimum != other.minimum,
            self.streamed != other.streamed,
        )


class Hull(Struct, frozen=True, forbid_unknown_fields=True):
    """The smallest and largest tokens, rows and columns that a model was fitted on."""

    low: tuple[Amount, Amount, Amount]
    high: tuple[Amount, Amount, Amount]

    @classmethod
    def of(cls, points: Sequence[LinearPoint]) -> Hull:
        """Return the hull of some shards."""
        tokens, rows, columns = zip(*(_sizes(point) for point in points), strict=True)
        return cls((min(tokens), min(rows), min(columns)), (max(tokens), max(rows), max(columns)))

    def near(self, point: LinearPoint) -> bool:
        """Whether a shard is within the hull, or beyond it by at most ``KNOWN_FACTOR``."""
        return near(_sizes(point), self.low, self.high)


def _sizes(point: LinearPoint) -> tuple[float, float, float]:
    return float(point.tokens), float(point.rows), float(point.columns)


class ShapeModel(Protocol):
    """Predicts the time of shards of one kind."""

    name: ClassVar[str]

    @classmethod
    def fit(cls, points: Sequence[LinearPoint], times_us: Sequence[float]) -> Self:
        """Return the model of at least one measured shard, all of one kind, times positive."""
        ...

    def estimate_us(self, point: LinearPoint) -> float:
        """Return the time of a shard of any shape: finite and positive."""
        ...


@dataclass(slots=True)
class TimeModel:
    """A model for each kind of shard of one processor.

    Args:
        model: Class of the models.
        kinds: The fitted models, with the hulls of the shards that they were fitted on.
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
        """Return the time of a shard; for a kind that was never measured, the most similar kind answers.

        Raises:
            ProfileError: The model was not fitted; or the shard is one of an ffn and only plain
                linear layers were measured, or the other way round.
        """
        kind = Kind.of(point)
        held = self.kinds.get(kind)
        known = held is not None
        if held is None:
            alike = [other for other in self.kinds if other.is_ffn == kind.is_ffn]
            if not alike:
                what = "feed-forward network" if kind.is_ffn else "linear layer"
                raise ProfileError(
                    f"There is no measured {what} to predict others from.", fix="Run `heterollm profile`."
                )
            held = self.kinds[min(alike, key=lambda other: (*kind.unlikeness(other), other))]
        model, hull = held
        known = known and hull.near(point)
        return with_interval(model.estimate_us(point), self.spread, known=known, source=self.name)
