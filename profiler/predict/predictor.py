"""Times of linear layers and other operators on a profiled device, measured or predicted.

A measured time is returned as it is, and between two measured widths of a weight a straight line answers. For
other shards a fitted model answers, within bounds that measured times set. Each processor uses the model with
the least regret on weight shapes that were kept out of its fit, and keeps the scores of all models.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, TypeVar, get_args

from heterollm.base import ProfileError
from heterollm.profiler.predict.baselines import ConstantRate
from heterollm.profiler.predict.file import (
    PredictorFile,
    StoredLayers,
    StoredProcessor,
    StoredSparse,
    predictions,
    read_file,
    times_of,
)
from heterollm.profiler.predict.interpolation import Interpolation
from heterollm.profiler.predict.neighbours import Neighbours
from heterollm.profiler.predict.operators import LayerPredictor
from heterollm.profiler.predict.roofline import Roofline
from heterollm.profiler.predict.stage_linear import StageLinear
from heterollm.profiler.predict.time_model import (
    Kind,
    Prediction,
    ShapeModel,
    TimeModel,
    measured_time,
    undisturbed,
)
from heterollm.profiler.predict.tree import Tree
from heterollm.profiler.predict.validation import Score, score
from heterollm.profiler.records import LayerKey, LinearKey, LinearPoint, Processor, Profile, Record, SparseKey

FIX: Final = "Run `heterollm profile`."

CANDIDATES: Final[Mapping[Processor, tuple[type[ShapeModel], ...]]] = {
    "gpu": (Interpolation, Roofline),
    "npu": (StageLinear, Tree),
}
"""Models of each processor; the first is the default where a profile is too small to compare them."""

BASELINE: Final[type[ShapeModel]] = ConstantRate
"""The model that the others are compared with."""

FEWEST_POINTS: Final = 2

K = TypeVar("K", LayerKey, SparseKey)


@dataclass(frozen=True, slots=True)
class ProcessorPredictor:
    """The times of linear layers on one processor.

    Args:
        model: The fitted model that is used.
        scores: Errors and regret of every model, the baseline included; empty where the profile has one
            weight shape only.
        measured: The measured times.
    """

    model: TimeModel
    scores: tuple[Score, ...]
    measured: Mapping[LinearPoint, Prediction]
    _neighbours: Neighbours = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        times_us = {point: prediction.us for point, prediction in self.measured.items()}
        object.__setattr__(self, "_neighbours", Neighbours(times_us))

    def predict(self, point: LinearPoint) -> Prediction:
        """Return the measured time of a shard, or the predicted one within the bounds of its neighbours."""
        return self.measured.get(point) or self._neighbours.predict(point, self.model)


@dataclass(slots=True)
class Predictor:
    """The times of all operators that a plan places.

    Args:
        processors: The processors of which the profile has linear layers.
        layers: The other operators; None if the profile has none.
        sparse: Those of sparse attention; None if the profile has none.
    """

    processors: Mapping[Processor, ProcessorPredictor]
    layers: LayerPredictor[LayerKey] | None = None
    sparse: LayerPredictor[SparseKey] | None = None
    _known: dict[tuple[Processor, LinearPoint], Prediction] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def fit(cls, profile: Profile) -> Predictor:
        """Fit every model of every processor and keep the best ones.

        Of several versions of kernels or graphs, the one measured last counts. Disturbed points do not.

        Raises:
            ProfileError: The profile has no linear layers, or too few of a processor.
        """
        records: dict[Processor, list[Record]] = {
            processor: _latest(profile, processor) for processor in get_args(Processor)
        }
        times = {
            processor: {
                record.key.point: record.median_us for record in found if isinstance(record.key, LinearKey)
            }
            for processor, found in records.items()
        }
        processors: dict[Processor, ProcessorPredictor] = {}
        for processor, found in records.items():
            if times[processor]:
                others = times["npu" if processor == "gpu" else "gpu"]
                processors[processor] = _fit_processor(processor, times[processor], others, found)
        if not processors:
            raise ProfileError(
                f"The profile of {profile.device} has no measured linear layer to predict others from.",
                fix=FIX,
            )
        return cls(processors, _fit_operators(profile, LayerKey), _fit_operators(profile, SparseKey))

    def predict_us(self, point: LinearPoint, processor: Processor) -> Prediction:
        """Return the time of a shard on a processor.

        Raises:
            ProfileError: The profile has no linear layer of the processor.
        """
        found = self._known.get((processor, point))
        if found is None:
            if processor not in self.processors:
                raise ProfileError(f"The profile has no linear layer measured on the {processor}.", fix=FIX)
            found = self._known[processor, point] = self.processors[processor].predict(point)
        return found

    def predict_layer_us(self, key: LayerKey) -> Prediction:
        """Return the time of another operator of a layer.

        Raises:
            ProfileError: The profile has no measurement of the operator.
        """
        if self.layers is None:
            raise ProfileError(f"The profile has no measurement of {key.operator}.", fix=FIX)
        return self.layers.predict(key)

    def to_json(self) -> str:
        """Return the fitted predictor as JSON text, of which :meth:`from_json` makes one of equal answers."""
        processors = {
            processor: StoredProcessor.of(held.model, held.scores, held.measured)
            for processor, held in self.processors.items()
        }
        layers = None
        if self.layers is not None:
            layers = StoredLayers(dict(self.layers.operators), times_of(self.layers.measured))
        sparse = None
        if self.sparse is not None:
            sparse = StoredSparse(dict(self.sparse.operators), times_of(self.sparse.measured))
        return PredictorFile(processors=processors, layers=layers, sparse=sparse).text

    @classmethod
    def from_json(cls, text: str | bytes) -> Predictor:
        """Return the predictor of :meth:`to_json`.

        Raises:
            ProfileError: The text is damaged, or of another version.
        """
        stored = read_file(text)
        processors = {
            processor: ProcessorPredictor(held.model, held.scores, predictions(held.measured))
            for processor, held in stored.processors.items()
        }
        layers, sparse = (
            None if held is None else LayerPredictor(held.operators, predictions(held.measured))
            for held in (stored.layers, stored.sparse)
        )
        return cls(processors, layers, sparse)


def _latest(profile: Profile, processor: Processor) -> list[Record]:
    """Return the sound records of a processor's linear layers, of the code that was measured last."""
    found = [(key, record) for key, record in profile.of_kind(LinearKey) if key.processor == processor]
    code = max(found, key=lambda item: (item[1].taken_s, item[0].code))[0].code if found else ""
    kinds: dict[Kind, list[Record]] = defaultdict(list)
    for key, record in found:
        if key.code == code and record.samples_us:
            kinds[Kind.of(key.point)].append(record)
    return [record for records in kinds.values() for record in undisturbed(records)]


def _fit_operators(profile: Profile, kind: type[K]) -> LayerPredictor[K] | None:
    """Return the predictor of operators that have keys of a kind; None if none was timed."""
    records = {key: record for key, record in profile.of_kind(kind) if record.samples_us}
    return LayerPredictor.fit(records) if records else None


def _fit_processor(
    processor: Processor,
    times: Mapping[LinearPoint, float],
    other: Mapping[LinearPoint, float],
    records: list[Record],
) -> ProcessorPredictor:
    if len(times) < FEWEST_POINTS:
        raise ProfileError(
            f"The profile has {len(times)} measured linear layer of the {processor}, too few to "
            "predict from.",
            fix=FIX,
        )
    candidates = {model.name: model for model in CANDIDATES[processor]}
    scores = [score(model, processor, times, other) for model in candidates.values()]
    usable = [entry for entry in scores if entry is not None]
    baseline = score(BASELINE, processor, times, other, bounded=False)
    best = min(usable, key=lambda entry: entry.rank, default=None)
    model = TimeModel(CANDIDATES[processor][0] if best is None else candidates[best.model])
    if best is not None:
        model.spread = best.spread
    model.fit(list(times), list(times.values()))
    measured = {
        record.key.point: measured_time(record) for record in records if isinstance(record.key, LinearKey)
    }
    return ProcessorPredictor(model, (*usable, *(() if baseline is None else (baseline,))), measured)
