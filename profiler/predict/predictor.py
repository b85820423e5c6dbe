"""Times of linear layers and other operators on a profiled device, measured or predicted.

A measured time is returned as it is, and between two measured widths of a weight a straight line answers. For
other slices a fitted model answers, within bounds that measured times set. Of the models of a part, the one
with the least regret on weight shapes that were kept out of its fit is used. The scores of all are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, get_args

from heterollm.base import ProfileError
from heterollm.profiler.predict.baselines import ConstantRate
from heterollm.profiler.predict.file import (
    PredictorFile,
    StoredLayers,
    StoredPart,
    predictions,
    read_file,
    times_of,
)
from heterollm.profiler.predict.interpolation import Interpolation
from heterollm.profiler.predict.neighbours import Neighbours
from heterollm.profiler.predict.operators import LayerPredictor
from heterollm.profiler.predict.roofline import Roofline
from heterollm.profiler.predict.stage_linear import StageLinear
from heterollm.profiler.predict.time_model import Prediction, ShapeModel, TimeModel, measured_time
from heterollm.profiler.predict.tree import Tree
from heterollm.profiler.predict.validation import Score, score
from heterollm.profiler.records import LayerKey, LinearKey, LinearPoint, Part, Profile, Record

__all__ = ["BASELINE", "CANDIDATES", "PartPredictor", "Predictor"]

FIX: Final = "Run `heterollm profile`."

CANDIDATES: Final[Mapping[Part, tuple[type[ShapeModel], ...]]] = {
    "gpu": (Interpolation, Roofline),
    "npu": (StageLinear, Tree),
}
"""Models to choose from for each part; the first is used where a profile is too small to compare them."""

BASELINE: Final[type[ShapeModel]] = ConstantRate
"""The model that the others are compared with."""

FEWEST_POINTS: Final = 2


@dataclass(frozen=True, slots=True)
class PartPredictor:
    """The times of linear layers on one part.

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
        """Return the measured time of a slice, or the predicted one within what its neighbours allow."""
        return self.measured.get(point) or self._neighbours.predict(point, self.model)


@dataclass(slots=True)
class Predictor:
    """The times of all operators that a plan places.

    Args:
        parts: The parts of which the profile has linear layers.
        layers: The other operators; None if the profile has none.
    """

    parts: Mapping[Part, PartPredictor]
    layers: LayerPredictor | None = None
    _known: dict[tuple[Part, LinearPoint], Prediction] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def fit(cls, profile: Profile) -> Predictor:
        """Fit every model of every part and keep the best ones.

        Of several versions of kernels or graphs, the one measured last counts.

        Raises:
            ProfileError: The profile has no linear layers, or too few of a part.
        """
        records: dict[Part, list[Record]] = {part: _latest(profile, part) for part in get_args(Part)}
        times = {
            part: {
                record.key.point: record.median_us for record in found if isinstance(record.key, LinearKey)
            }
            for part, found in records.items()
        }
        parts: dict[Part, PartPredictor] = {}
        for part, found in records.items():
            if times[part]:
                others = times["npu" if part == "gpu" else "gpu"]
                parts[part] = _fit_part(part, times[part], others, found)
        if not parts:
            raise ProfileError(
                f"The profile of {profile.device} has no measured linear layer to predict others from.",
                fix=FIX,
            )
        layers = dict(profile.of_kind(LayerKey))
        return cls(parts, LayerPredictor.fit(layers) if layers else None)

    def predict_us(self, point: LinearPoint, part: Part) -> Prediction:
        """Return the time of a slice on a part.

        Raises:
            ProfileError: The profile has no linear layer of the part.
        """
        found = self._known.get((part, point))
        if found is None:
            if part not in self.parts:
                raise ProfileError(f"The profile has no linear layer measured on the {part}.", fix=FIX)
            found = self._known[part, point] = self.parts[part].predict(point)
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
        parts = {
            part: StoredPart.of(held.model, held.scores, held.measured) for part, held in self.parts.items()
        }
        layers = None
        if self.layers is not None:
            layers = StoredLayers(dict(self.layers.operators), times_of(self.layers.measured))
        return PredictorFile(parts=parts, layers=layers).text

    @classmethod
    def from_json(cls, text: str | bytes) -> Predictor:
        """Return the predictor of :meth:`to_json`.

        Raises:
            ProfileError: The text is damaged, or of another version.
        """
        stored = read_file(text)
        parts = {
            part: PartPredictor(held.model, held.scores, predictions(held.measured))
            for part, held in stored.parts.items()
        }
        if stored.layers is None:
            return cls(parts)
        return cls(parts, LayerPredictor(stored.layers.operators, predictions(stored.layers.measured)))


def _latest(profile: Profile, part: Part) -> list[Record]:
    """Return the sound records of a part's linear layers, of the code that was measured last."""
    found = [(key, record) for key, record in profile.of_kind(LinearKey) if key.part == part]
    code = max(found, key=lambda item: (item[1].taken_s, item[0].code))[0].code if found else ""
    return [record for key, record in found if key.code == code and record.samples_us]


def _fit_part(
    part: Part,
    times: Mapping[LinearPoint, float],
    other: Mapping[LinearPoint, float],
    records: list[Record],
) -> PartPredictor:
    if len(times) < FEWEST_POINTS:
        raise ProfileError(
            f"The profile has {len(times)} measured linear layer of the {part}, too few to predict from.",
            fix=FIX,
        )
    candidates = {model.name: model for model in CANDIDATES[part]}
    scores = [score(model, part, times, other) for model in candidates.values()]
    usable = [entry for entry in scores if entry is not None]
    baseline = score(BASELINE, part, times, other, bounded=False)
    best = min(usable, key=lambda entry: entry.rank, default=None)
    model = TimeModel(CANDIDATES[part][0] if best is None else candidates[best.model])
    if best is not None:
        model.spread = best.spread
    model.fit(list(times), list(times.values()))
    measured = {
        record.key.point: measured_time(record) for record in records if isinstance(record.key, LinearKey)
    }
    return PartPredictor(model, (*usable, *(() if baseline is None else (baseline,))), measured)
