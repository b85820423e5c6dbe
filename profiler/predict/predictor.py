"""Times of linear layers and other operators on a profiled device, measured or predicted.

A measured time is returned as it is, and between two measured widths of a weight a straight line answers. For
other shards a fitted model answers, within bounds that measured times set. Each processor uses the model with
the least regret on weight shapes that were kept out of its fit, and keeps the scores of all models.

A fit takes a second, and one more to import scikit-learn, without which the tree is no candidate; a load with
a kept plan asks for predicted times too. So fitted models are kept as JSON in the cache; measured times stay
in the profile.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Final, get_args

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from heterollm.base import ProfileError, decode, decode_json, load_or_make, own_folder
from heterollm.profiler.predict.interpolation import Interpolation
from heterollm.profiler.predict.neighbours import Neighbours
from heterollm.profiler.predict.operators import LayerPredictor, OperatorModel
from heterollm.profiler.predict.roofline import Roofline
from heterollm.profiler.predict.stage_linear import StageLinear
from heterollm.profiler.predict.steps import grows_within_tiles, sweep_costs
from heterollm.profiler.predict.time_model import (
    Kind,
    Prediction,
    ShapeModel,
    TimeModel,
    measured_time,
    undisturbed,
)
from heterollm.profiler.predict.tree import Tree
from heterollm.profiler.predict.validation import PointTimes, Score, held_out_predictions
from heterollm.profiler.records import (
    LayerKey,
    LinearKey,
    LinearPoint,
    Processor,
    Profile,
    Record,
    SparseKey,
    record_line,
)

FIX: Final = "Run `heterollm profile`."

PREDICTOR_VERSION: Final = 10
"""Raise when a fit of the same profile gives other models: kept ones are then fitted again."""

CANDIDATES: Final[Mapping[Processor, tuple[type[ShapeModel], ...]]] = {
    "gpu": (Interpolation, Roofline),
    "npu": (StageLinear, Tree),
}
"""Models of each processor; the first is the default where a profile is too small to compare them."""

FEWEST_POINTS: Final = 2


def installed_candidates(processor: Processor) -> tuple[type[ShapeModel], ...]:
    """Return the models of a processor that can be fitted: the tree needs scikit-learn."""
    without = () if find_spec("sklearn") else (Tree,)
    return tuple(model for model in CANDIDATES[processor] if model not in without)


class ProcessorFit(Struct, frozen=True, forbid_unknown_fields=True):
    """The model of a processor's linear layers.

    Args:
        model: The fitted model that is used.
        scores: Errors and regret of every model; empty where the profile has one weight shape only.
    """

    model: TimeModel
    scores: tuple[Score, ...]

    @classmethod
    def of(
        cls, processor: Processor, times: PointTimes, other: PointTimes, *, continuous: bool = False
    ) -> ProcessorFit:
        """Fit every model of a processor and keep the best one.

        Args:
            processor: The processor.
            times: Its measured times.
            other: Those of the other processor.
            continuous: Whether times rise within a tile of tokens.

        Raises:
            ProfileError: There are too few.
        """
        if len(times) < FEWEST_POINTS:
            raise ProfileError(
                f"The profile has {len(times)} measured linear layer of the {processor}, too few to "
                "predict from.",
                fix=FIX,
            )
        models, scores = {model.name: model for model in installed_candidates(processor)}, []
        for name, model in models.items():
            if predicted := held_out_predictions(model, times):
                scores.append(Score.of(name, processor, times, other, predicted))
        if not scores:
            return cls(replace(TimeModel.fit(CANDIDATES[processor][0], times), continuous=continuous), ())
        best = min(scores, key=lambda entry: entry.rank)
        fitted = TimeModel.fit(models[best.model], times, best.spread)
        return cls(replace(fitted, continuous=continuous), tuple(scores))


class Fits(Struct, frozen=True, forbid_unknown_fields=True):
    """The models that were fitted to a profile; other operators' by their names."""

    processors: dict[Processor, ProcessorFit]
    layers: dict[str, OperatorModel] | None
    sparse: dict[str, OperatorModel] | None


@dataclass(frozen=True, slots=True)
class ProcessorPredictor:
    """The times of linear layers on one processor.

    Args:
        fit: The fitted model.
        measured: The measured times.
    """

    fit: ProcessorFit
    measured: Mapping[LinearPoint, Prediction]
    _neighbours: Neighbours = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        times_us = {point.comparable: prediction.us for point, prediction in self.measured.items()}
        object.__setattr__(self, "_neighbours", Neighbours(times_us))

    def predict(self, point: LinearPoint) -> Prediction:
        """Return the measured time of a shard, or the predicted one within the bounds of its neighbours."""
        return self.measured.get(point) or self._neighbours.predict(point.comparable, self.fit.model)


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
    def fit(cls, profile: Profile, kept: Fits | None = None) -> Predictor:
        """Fit every model of every processor and keep the best ones.

        Of several versions of kernels or graphs, the one measured last counts. Disturbed points do not.

        Args:
            profile: The profile.
            kept: The models, if they were fitted to this profile before.

        Raises:
            ProfileError: The profile has no linear layers, or too few of a processor.
        """
        measured = {
            processor: {point: measured_time(record) for point, record in _latest(profile, processor).items()}
            for processor in get_args(Processor)
        }
        times = {
            processor: {point.comparable: prediction.us for point, prediction in own.items()}
            for processor, own in measured.items()
        }
        if not any(times.values()):
            raise ProfileError(
                f"The profile of {profile.device} has no measured linear layer to predict others from.",
                fix=FIX,
            )
        continuous = {"gpu": False, "npu": bool(grows_within_tiles(sweep_costs(profile)))}
        fitted = (
            kept.processors
            if kept
            else {
                processor: ProcessorFit.of(
                    processor,
                    own,
                    times["npu" if processor == "gpu" else "gpu"],
                    continuous=continuous[processor],
                )
                for processor, own in times.items()
                if own
            }
        )
        return cls(
            {processor: ProcessorPredictor(fit, measured[processor]) for processor, fit in fitted.items()},
            LayerPredictor.of(dict(profile.of_kind(LayerKey)), kept.layers if kept else None),
            LayerPredictor.of(dict(profile.of_kind(SparseKey)), kept.sparse if kept else None),
        )

    @property
    def fits(self) -> Fits:
        """The fitted models."""
        layers, sparse = (
            None if held is None else dict(held.operators) for held in (self.layers, self.sparse)
        )
        return Fits({processor: held.fit for processor, held in self.processors.items()}, layers, sparse)

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


def fitted_predictor(profile: Profile) -> Predictor:
    """Return the predictor of a profile, with kept models if the profile has not changed.

    Raises:
        ProfileError: There is too little to fit.
    """

    def read(content: bytes) -> Predictor:
        source = "The predictor"
        data = decode_json(content, source=source, error=ProfileError)
        return Predictor.fit(profile, decode(data, Fits, source=f"{source} is damaged", error=ProfileError))

    names = " ".join(model.name for processor in CANDIDATES for model in installed_candidates(processor))
    return load_or_make(
        own_folder("predictors") / f"{profile_digest(profile, names)}.json",
        "fitting it again",
        read=read,
        make=lambda: Predictor.fit(profile),
        text=lambda predictor: msgspec.json.encode(predictor.fits).decode(),
    )


def profile_digest(profile: Profile, inputs: str = "") -> str:
    """Return a name for files that are computed from a profile; equal measurements give equal names.

    Args:
        profile: The profile.
        inputs: Other inputs of the computation, as text.
    """
    digest = hashlib.sha256(f"{PREDICTOR_VERSION} {profile.fingerprint}{inputs}".encode())
    for line in sorted(map(record_line, profile.records.values())):
        digest.update(line.encode())
    return digest.hexdigest()[:32]


def _latest(profile: Profile, processor: Processor) -> dict[LinearPoint, Record]:
    """Return the sound records of a processor's linear layers, of the code that was measured last."""
    found = [(key, record) for key, record in profile.of_kind(LinearKey) if key.processor == processor]
    code = max(found, key=lambda item: (item[1].taken_s, item[0].code))[0].code if found else ""
    kinds: dict[Kind, dict[LinearPoint, Record]] = defaultdict(dict)
    for key, record in found:
        if key.code == code and record.samples_us:
            kinds[Kind.of(key.point)][key.point] = record
    return {point: record for own in kinds.values() for point, record in undisturbed(own).items()}
