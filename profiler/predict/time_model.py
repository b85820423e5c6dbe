"""The protocol of models of linear layers, and the answers of all of them.

A model is fitted for each *kind* of shard (form and number formats) by itself. An ffn is never predicted from
plain linear layers, nor a linear layer from ffns. Predictions use only additions,
multiplications, divisions and comparisons of float64, whose results IEEE 754 fixes: they are the same on
every platform.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, ClassVar, Final, Protocol, Self, TypeAlias, TypeVar

from msgspec import Meta, Struct
from msgspec.structs import replace

from heterollm.base import Amount, PositiveNumber, ProfileError
from heterollm.profiler.measure import Measurement
from heterollm.profiler.predict.curves import ARRAY
from heterollm.profiler.predict.interpolation import Interpolation
from heterollm.profiler.predict.roofline import Roofline
from heterollm.profiler.predict.stage_linear import StageLinear
from heterollm.profiler.predict.tree import Tree
from heterollm.profiler.records import LinearPoint, Record

KNOWN_FACTOR: Final = 2.0
"""A shape counts as known up to this factor beyond the measured tokens, rows and columns."""

UNKNOWN_FACTOR: Final = 2.0
"""Factor by which the interval of an unknown shape is wider, to either side."""

DEFAULT_SPREAD: Final = (0.5, 2.0)
"""Interval as ratios of the prediction, until cross-validation has found them."""

Sizes: TypeAlias = tuple[float, float, float]

K = TypeVar("K")


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


def with_interval(us: float, spread: tuple[float, float], *, known: bool, source: str) -> Prediction:
    """Return a predicted time with its interval, which is wider for an unknown shape."""
    wider = 1.0 if known else UNKNOWN_FACTOR
    low, high = min(spread[0], 1.0) / wider, max(spread[1], 1.0) * wider
    return Prediction(us, us * low, us * high, known, source)


def measured_time(record: Record) -> Prediction:
    """Return the measured time of a record, between its quartiles."""
    low, high = Measurement(record.samples_us).quartiles_us
    return Prediction(record.median_us, low, high, True, "measured")


def undisturbed(records: Mapping[K, Record]) -> Mapping[K, Record]:
    """Return the records that are not disturbed; all where the others are too few to predict from."""
    sound = {key: record for key, record in records.items() if not record.disturbed}
    return sound if 2 * len(sound) >= len(records) else records


class Kind(Struct, frozen=True, order=True, forbid_unknown_fields=True):
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
    """The smallest and the largest sizes that a model was fitted on, such as tokens, rows and columns."""

    low: tuple[Amount, Amount, Amount]
    high: tuple[Amount, Amount, Amount]

    @classmethod
    def of(cls, sizes: Iterable[Sizes]) -> Hull:
        """Return the hull of some sizes."""
        first, second, third = zip(*sizes, strict=True)
        return cls((min(first), min(second), min(third)), (max(first), max(second), max(third)))

    def near(self, sizes: Sizes) -> bool:
        """Whether sizes are within the hull, or beyond it by at most ``KNOWN_FACTOR``."""
        bounds = zip(sizes, self.low, self.high, strict=True)
        return all(low / KNOWN_FACTOR <= size <= high * KNOWN_FACTOR for size, low, high in bounds)


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


class TimeModel(Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """A model for each kind of shard of one processor.

    Args:
        kinds: The fitted models, all of one class, with the hulls of the shards that they were fitted on.
        spread: Tenth and ninetieth percentile of measured over predicted time on shapes kept out of the fit.
        continuous: Whether times rise from token to token within a tile; models assume steps of a tile.
    """

    kinds: Annotated[
        list[tuple[Kind, Hull, Interpolation | Roofline | StageLinear | Tree]], Meta(min_length=1)
    ]
    spread: tuple[PositiveNumber, PositiveNumber] = DEFAULT_SPREAD
    continuous: bool = False

    @classmethod
    def fit(
        cls,
        model: type[ShapeModel],
        times_us: Mapping[LinearPoint, float],
        spread: tuple[float, float] = DEFAULT_SPREAD,
    ) -> TimeModel:
        """Fit a model to every kind of some shards.

        Raises:
            ProfileError: There is nothing to fit.
        """
        by_kind: dict[Kind, dict[LinearPoint, float]] = defaultdict(dict)
        for point in sorted(times_us):
            by_kind[Kind.of(point)][point] = times_us[point]
        if not by_kind:
            raise ProfileError(
                "There are no linear layers to learn times from.", fix="Run `heterollm profile`."
            )
        kinds: list[Any] = [
            (kind, Hull.of(map(_sizes, own)), model.fit(list(own), list(own.values())))
            for kind, own in sorted(by_kind.items())
        ]
        return cls(kinds, spread)

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.kinds[0][2].name

    @cached_property
    def _by_kind(self) -> dict[Kind, tuple[Hull, ShapeModel]]:
        return {kind: (hull, model) for kind, hull, model in self.kinds}

    def predict(self, point: LinearPoint) -> Prediction:
        """Return the time of a shard; for a kind that was never measured, the most similar kind answers.

        Raises:
            ProfileError: The shard is one of an ffn and only plain linear layers were measured, or the other
                way round.
        """
        kind = Kind.of(point)
        held = self._by_kind.get(kind)
        known = held is not None
        if held is None:
            alike = [other for other in self._by_kind if other.is_ffn == kind.is_ffn]
            if not alike:
                what = "feed-forward network" if kind.is_ffn else "linear layer"
                raise ProfileError(
                    f"There is no measured {what} to predict others from.", fix="Run `heterollm profile`."
                )
            held = self._by_kind[min(alike, key=lambda other: (*kind.unlikeness(other), other))]
        hull, model = held
        known = known and hull.near(_sizes(point))
        return with_interval(self._estimate_us(model, point), self.spread, known=known, source=self.name)

    def _estimate_us(self, model: ShapeModel, point: LinearPoint) -> float:
        """Return the time of a shard, on a line between the ends of its tile where times have no steps."""
        tile = point.tokens // ARRAY * ARRAY
        if not self.continuous or tile in (0, point.tokens):
            return model.estimate_us(point)
        low_us, high_us = (
            model.estimate_us(replace(point, tokens=tokens)) for tokens in (tile, tile + ARRAY)
        )
        return low_us + (high_us - low_us) * (point.tokens - tile) / ARRAY


def _sizes(point: LinearPoint) -> Sizes:
    return float(point.tokens), float(point.rows), float(point.columns)
