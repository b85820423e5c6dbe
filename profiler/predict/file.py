"""The JSON file of a fitted predictor: its records, and their checks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar, cast

import msgspec
from msgspec import Meta, Struct

from heterollm.base import PositiveNumber, ProfileError, decode, decode_json
from heterollm.profiler.predict.baselines import ConstantRate
from heterollm.profiler.predict.interpolation import Interpolation
from heterollm.profiler.predict.operators import OperatorModel
from heterollm.profiler.predict.roofline import Roofline
from heterollm.profiler.predict.stage_linear import StageLinear
from heterollm.profiler.predict.time_model import Hull, Kind, Prediction, TimeModel
from heterollm.profiler.predict.tree import Tree
from heterollm.profiler.predict.validation import Score
from heterollm.profiler.records import LayerKey, LinearPoint, Processor, SparseKey

SCHEMA_VERSION: Final = 3

AnyModel: TypeAlias = Tree | StageLinear | Interpolation | Roofline | ConstantRate

StoredTimes: TypeAlias = tuple[PositiveNumber, PositiveNumber, PositiveNumber]
"""Median, and lower and upper quartile."""

K = TypeVar("K", LinearPoint, LayerKey, SparseKey)


class StoredKind(Struct, frozen=True, forbid_unknown_fields=True):
    """The fitted model of one kind of shards."""

    kind: Kind
    hull: Hull
    model: AnyModel


class StoredProcessor(Struct, frozen=True, forbid_unknown_fields=True):
    """The predictor of one processor.

    Args:
        spread: As in :class:`heterollm.profiler.predict.time_model.TimeModel`.
        kinds: The fitted models, all of one class.
        scores: How every model did.
        measured: Measured shards and their times.
    """

    spread: tuple[PositiveNumber, PositiveNumber]
    kinds: Annotated[list[StoredKind], Meta(min_length=1)]
    scores: tuple[Score, ...]
    measured: list[tuple[LinearPoint, StoredTimes]]

    def __post_init__(self) -> None:
        """Check that the models have one class, and that every shard has rows."""
        if len({type(entry.model) for entry in self.kinds}) > 1:
            raise ValueError("the kinds of a processor need models of one class")
        if not all(point.rows for point, _ in self.measured):
            raise ValueError("member_rows of a shard are all 0")

    @classmethod
    def of(
        cls, model: TimeModel, scores: tuple[Score, ...], measured: Mapping[LinearPoint, Prediction]
    ) -> StoredProcessor:
        """Return the record of a fitted model."""
        kinds = [StoredKind(kind, hull, cast("AnyModel", own)) for kind, (own, hull) in model.kinds.items()]
        return cls(model.spread, kinds, scores, times_of(measured))

    @property
    def model(self) -> TimeModel:
        """The fitted model."""
        kinds: dict[Kind, Any] = {entry.kind: (entry.model, entry.hull) for entry in self.kinds}
        return TimeModel(type(self.kinds[0].model), kinds, self.spread)


class StoredLayers(Struct, frozen=True, forbid_unknown_fields=True):
    """The predictor of the other operators.

    Args:
        operators: The fitted models by the operators' names.
        measured: Measured operators and their times.
    """

    operators: Annotated[dict[str, OperatorModel], Meta(min_length=1)]
    measured: list[tuple[LayerKey, StoredTimes]]


class StoredSparse(Struct, frozen=True, forbid_unknown_fields=True):
    """The predictor of sparse attention.

    Args:
        operators: The fitted models by the operators' names.
        measured: Measured operators and their times.
    """

    operators: Annotated[dict[str, OperatorModel], Meta(min_length=1)]
    measured: list[tuple[SparseKey, StoredTimes]]


class PredictorFile(
    Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename={"processors": "parts"}
):
    """A fitted predictor."""

    schema_version: Literal[3] = SCHEMA_VERSION
    processors: Annotated[dict[Processor, StoredProcessor], Meta(min_length=1)]
    layers: StoredLayers | None
    sparse: StoredSparse | None = None

    @property
    def text(self) -> str:
        """The content of the file."""
        return msgspec.json.encode(self).decode() + "\n"


def times_of(measured: Mapping[K, Prediction]) -> list[tuple[K, StoredTimes]]:
    """Return measured times in the form of the file, in order."""
    return [(key, (found.us, found.low_us, found.high_us)) for key, found in sorted(measured.items())]


def predictions(times: list[tuple[K, StoredTimes]]) -> dict[K, Prediction]:
    """Return measured times as answers."""
    return {key: Prediction(*own, True, "measured") for key, own in times}


def read_file(text: str | bytes) -> PredictorFile:
    """Return the records of a file's content.

    Raises:
        ProfileError: The text is damaged, or of another version.
    """
    fix = "Run `heterollm profile`."
    data = decode_json(text, source="The predictor", error=ProfileError, fix=fix)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA_VERSION:
        raise ProfileError(f"The predictor has schema version {version!r:.40}.", fix=fix)
    return decode(data, PredictorFile, source="The predictor is damaged", error=ProfileError, fix=fix)
