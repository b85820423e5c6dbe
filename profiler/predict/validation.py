"""Cross-validation: errors of predicted times on weight shapes that the fit has not seen, and their regret.

Whole weight shapes are kept out of a fit: were single shards kept out, other shards of the same weight would
give their times away. *Error* is relative. *Regret* is the time lost by choosing splits and forms by
predicted times.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from heterollm.base import Amount, Count, Number, Positive, PositiveNumber
from heterollm.profiler.predict.neighbours import Neighbours
from heterollm.profiler.predict.time_model import Prediction, ShapeModel, TimeModel
from heterollm.profiler.records import LinearPoint, Processor

PointTimes: TypeAlias = Mapping[LinearPoint, float]
"""Microseconds, or another cost, of shards on one processor."""

MOST_FOLDS: Final = 10
"""Of more shapes several are kept out together, since every fold costs a fit."""

HIGH, LOW = 0.9, 0.1


class Score(Struct, frozen=True, forbid_unknown_fields=True, rename={"processor": "part"}):
    """Errors and regret of one model on shapes that it was not fitted on.

    Args:
        model: Name of the model.
        processor: The processor whose times it predicted.
        samples: Shards predicted.
        median_error: Half of the relative errors are below it.
        high_error: Nine in ten relative errors are below it.
        regret: Mean share of time lost by choosing by predictions; None where there was nothing to choose.
        choices: Number of decisions behind the regret, which is their mean.
        spread: Tenth and ninetieth percentile of measured over predicted time.
    """

    model: str
    processor: Processor
    samples: Positive
    median_error: Amount
    high_error: Amount
    regret: Number | None
    choices: Count
    spread: tuple[PositiveNumber, PositiveNumber]

    @classmethod
    def of(
        cls,
        model: str,
        processor: Processor,
        times: PointTimes,
        other: PointTimes,
        predicted: Mapping[LinearPoint, Prediction],
    ) -> Score:
        """Return the score of a model.

        Args:
            model: Name of the model.
            processor: The processor whose times are predicted.
            times: Its measured times.
            other: The measured times of the other processor.
            predicted: At least one prediction, as of :func:`held_out_predictions`.
        """
        times_us = {point: found.us for point, found in predicted.items()}
        errors = [abs(us - times[point]) / times[point] for point, us in times_us.items()]
        ratios = [times[point] / us for point, us in times_us.items()]
        losses = [
            _loss(found, times, times_us)
            for found in choices(processor, times, other)
            if all(point is None or point in predicted for point, _ in found)
        ]
        return cls(
            model,
            processor,
            len(errors),
            statistics.median(errors),
            percentile(errors, HIGH),
            statistics.fmean(losses) if losses else None,
            len(losses),
            (percentile(ratios, LOW), percentile(ratios, HIGH)),
        )

    @property
    def rank(self) -> tuple[float, float, str]:
        """Order of models, the best one first: regret to a tenth of a percent, then median error."""
        return round(self.regret or 0.0, 3), self.median_error, self.model


def weight_shape(point: LinearPoint) -> tuple[int, int, bool]:
    """Return the shape of a shard: its columns, its rows, and whether it is one of an ffn."""
    return point.columns, point.rows, point.is_ffn


def held_out_predictions(
    model: type[ShapeModel], times: PointTimes, *, most_folds: int = MOST_FOLDS, bounded: bool = True
) -> dict[LinearPoint, Prediction]:
    """Return the prediction of each shard by a model that saw no shard of its weight shape.

    Linear layers are left out where all of them have one shape, and likewise ffns.

    Args:
        model: Class of the model.
        times: Measured times.
        most_folds: Largest number of fits.
        bounded: Whether shards of other shapes bound the answers of the model, as in use.
    """
    shapes = sorted({weight_shape(point) for point in times})
    folds = min(len(shapes), most_folds)
    if folds < 2:
        return {}
    # Similar shapes go to different folds, so that each fold resembles the whole. scikit-learn's GroupKFold
    # sorts groups of equal size in an order that differs between processors.
    fold_of = {shape: place % folds for place, shape in enumerate(shapes)}
    predicted: dict[LinearPoint, Prediction] = {}
    for fold in range(folds):
        seen = {point: us for point, us in times.items() if fold_of[weight_shape(point)] != fold}
        fitted, neighbours = TimeModel.fit(model, seen), Neighbours(seen if bounded else {})
        can_be = {point.is_ffn for point in seen}
        for point in times:
            if fold_of[weight_shape(point)] == fold and point.is_ffn in can_be:
                predicted[point] = neighbours.predict(point, fitted)
    return predicted


def choices(
    processor: Processor, times: PointTimes, other: PointTimes
) -> Iterator[list[tuple[LinearPoint | None, float]]]:
    """Yield every decision between measured alternatives that depends on the times of a processor.

    An alternative is a shard on the processor (None if the other processor takes all), and the measured time
    of the remaining shard on the other processor, which runs at the same time. An ffn has alternative forms
    only: the GPU's shard of it is measured as several operators.

    Args:
        processor: The processor whose times are predicted.
        times: Its measured times.
        other: The measured times of the other processor, which count as known.
    """
    npu, gpu = (times, other) if processor == "npu" else (other, times)
    shards: dict[Hashable, list[LinearPoint]] = defaultdict(list)
    for point in npu:
        shards[_decision(point)].append(point)
    rests = {
        rest
        for whole in gpu
        for point in shards.get(_decision(whole), ())
        if (rest := _rest(whole, point)) in gpu
    }
    for whole in sorted(set(gpu) - rests):
        found: list[tuple[LinearPoint | None, float]] = []
        found.append((whole, 0.0) if processor == "gpu" else (None, gpu[whole]))
        for point in sorted(shards.get(_decision(whole), ())):
            rest = _rest(whole, point)
            if rest in gpu:
                found.append((point, gpu[rest]) if processor == "npu" else (rest, npu[point]))
            elif not any(rest.member_rows):
                found.append((point, 0.0) if processor == "npu" else (None, npu[point]))
        if len(found) > 1:
            yield found
    if processor == "npu":
        yield from _forms(npu)


def _decision(point: LinearPoint) -> Hashable:
    """Return the fields that alternatives share: all but the rows and the form."""
    return replace(point, member_rows=(0,) * len(point.member_rows), form="")


def _rest(whole: LinearPoint, point: LinearPoint) -> LinearPoint:
    """Return the shard of a group that remains for the GPU."""
    rows = tuple(all_rows - own for all_rows, own in zip(whole.member_rows, point.member_rows, strict=True))
    return replace(whole, member_rows=rows)


def _forms(times: PointTimes) -> Iterator[list[tuple[LinearPoint | None, float]]]:
    """Yield the decisions between forms of one shard."""
    found: dict[LinearPoint, list[LinearPoint]] = defaultdict(list)
    for point in sorted(times):
        found[replace(point, form="")].append(point)
    for points in found.values():
        if len(points) > 1:
            yield [(point, 0.0) for point in points]


def _loss(
    found: Sequence[tuple[LinearPoint | None, float]], times: PointTimes, predicted: PointTimes
) -> float:
    """Return the share of the best time that is lost by the alternative with the best predicted time."""

    def total(alternative: tuple[LinearPoint | None, float], known: PointTimes) -> float:
        point, rest = alternative
        return rest if point is None else max(rest, known[point])

    chosen = min(found, key=lambda alternative: total(alternative, predicted))
    best = min(total(alternative, times) for alternative in found)
    return total(chosen, times) / best - 1.0


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values lies, between two of them in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
