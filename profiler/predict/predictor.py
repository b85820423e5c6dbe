"""Times of linear layers and other operators on a profiled device, measured or predicted (design, section 8).

A measured time wins, and between two measured widths of a weight a straight line. Else the model answers that
loses least, on weight shapes kept out of its fit, by choosing cuts with predicted times, within bounds that
the measured times set; every model's score is kept for reports.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final, get_args

from msgspec import structs

from heterollm.base import ProfileError, parse_json
from heterollm.profiler.measure import Measurement
from heterollm.profiler.predict.baselines import ConstantRate, Nearest
from heterollm.profiler.predict.interpolation import Interpolation
from heterollm.profiler.predict.json_values import mapping, number, numbers, positive, sequence, whole, word
from heterollm.profiler.predict.neighbours import Neighbours
from heterollm.profiler.predict.operators import LayerPredictor
from heterollm.profiler.predict.roofline import Roofline
from heterollm.profiler.predict.stage_linear import StageLinear
from heterollm.profiler.predict.time_model import Prediction, ShapeModel, TimeModel, point_from_dict
from heterollm.profiler.predict.tree import Tree
from heterollm.profiler.predict.validation import Score, score
from heterollm.profiler.records import LayerKey, LinearKey, LinearPoint, Part, Profile, Record

__all__ = ["BASELINES", "CANDIDATES", "PartPredictor", "Predictor"]

SCHEMA_VERSION: Final = 2
FIX: Final = "Run `heterollm profile`."

CANDIDATES: Final[Mapping[Part, tuple[type[ShapeModel], ...]]] = {
    "gpu": (Interpolation, Roofline),
    "npu": (Interpolation, StageLinear, Tree),
}
"""Models that may be used for each part; the first where the profile is too small to compare them."""

BASELINES: Final[tuple[type[ShapeModel], ...]] = (ConstantRate, Nearest)
"""Models that are only compared with."""

MODELS: Final = {model.name: model for models in (*CANDIDATES.values(), BASELINES) for model in models}
FEWEST_POINTS: Final = 2


@dataclass(frozen=True, slots=True)
class PartPredictor:
    """The times of linear layers on one part.

    Args:
        model: The fitted model that is used.
        scores: How every model did, the one in use and the baselines included; empty where the profile has
            one weight shape only.
        measured: What was measured.
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
    """The times of everything that a plan places.

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
        """Fit every model of every part and keep the best.

        Of kernels and graphs of several versions, the one measured last counts.

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
        """Return the fitted predictor as JSON text; what is read back predicts the same to the last bit."""
        parts = {
            part: {
                "model": held.model.to_dict(),
                "scores": [asdict(entry) for entry in held.scores],
                "measured": [
                    {
                        "point": structs.asdict(point),
                        "times_us": [prediction.us, prediction.low_us, prediction.high_us],
                    }
                    for point, prediction in sorted(held.measured.items(), key=lambda item: item[0])
                ],
            }
            for part, held in self.parts.items()
        }
        layers = None if self.layers is None else self.layers.to_dict()
        data = {"schema_version": SCHEMA_VERSION, "parts": parts, "layers": layers}
        return json.dumps(data, ensure_ascii=False, allow_nan=False, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Predictor:
        """Return the predictor of :meth:`to_json`.

        Raises:
            ProfileError: The text is damaged, or of another version.
        """
        try:
            data = parse_json(text)
        except ValueError as error:
            raise ProfileError(f"The predictor is not JSON: {error}.", fix=FIX) from error
        version = data.get("schema_version") if isinstance(data, dict) else None
        if version != SCHEMA_VERSION:
            raise ProfileError(f"The predictor has schema version {version!r:.40}.", fix=FIX)
        try:
            named = mapping(data, {"schema_version", "parts", "layers"}, "The predictor")
            if not isinstance(named["parts"], dict) or not named["parts"]:
                raise ProfileError(f"Its parts are {named['parts']!r:.80}.")
            parts = {_part(part): _read_part(held) for part, held in named["parts"].items()}
            layers = None if named["layers"] is None else LayerPredictor.from_dict(named["layers"])
        except ProfileError as error:
            raise ProfileError(f"The predictor is damaged: {error.message}", fix=FIX) from error
        return cls(parts, layers)


def _part(name: object) -> Part:
    if name == "gpu":
        return "gpu"
    if name == "npu":
        return "npu"
    raise ProfileError(f"There is no part called {name!r:.80}.")


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
    candidates = CANDIDATES[part]
    scores = [score(model, part, times, other) for model in candidates]
    scores += [score(model, part, times, other, bounded=False) for model in BASELINES]
    found = [entry for entry in scores if entry is not None]
    usable = [entry for entry in found if entry.model in {model.name for model in candidates}]
    best = min(usable, key=lambda entry: entry.rank, default=None)
    model = TimeModel(candidates[0] if best is None else MODELS[best.model])
    if best is not None:
        model.spread = best.spread
    model.fit(list(times), list(times.values()))
    measured = {}
    for record in records:
        assert isinstance(record.key, LinearKey)
        low, high = Measurement(record.samples_us).quartiles_us
        measured[record.key.point] = Prediction(record.median_us, low, high, True, "measured")
    return PartPredictor(model, tuple(found), measured)


def _read_part(data: object) -> PartPredictor:
    named = mapping(data, {"model", "scores", "measured"}, "A part")
    scores = tuple(_read_score(entry) for entry in sequence(named["scores"], "scores"))
    measured = {}
    for entry in sequence(named["measured"], "measured"):
        item = mapping(entry, {"point", "times_us"}, "A measured slice")
        us, low_us, high_us = numbers(item["times_us"], "times_us", 3)
        measured[point_from_dict(item["point"])] = Prediction(us, low_us, high_us, True, "measured")
    return PartPredictor(TimeModel.from_dict(named["model"], MODELS), scores, measured)


def _read_score(data: object) -> Score:
    named = mapping(data, set(Score.__dataclass_fields__), "A score")
    low, high = numbers(named["spread"], "spread", 2)
    samples = whole([named["samples"]], "samples")[0]
    choices = int(positive(named["choices"], "choices", or_zero=True))
    regret = None if named["regret"] is None else number(named["regret"], "regret")
    median, high_error = (
        positive(named[name], name, or_zero=True) for name in ("median_error", "high_error")
    )
    model, part = word(named["model"], "model"), _part(named["part"])
    return Score(model, part, samples, median, high_error, regret, choices, (low, high))
