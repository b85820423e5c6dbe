"""How well times are predicted for weight shapes that the fit has not seen, and what the errors cost.

Random rows of a table would be told apart by their neighbours of the same weight, so whole weight shapes are
kept out. *Error* is relative. *Regret* is the time lost by choosing the cut, or the form, by predicted times.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from msgspec.structs import replace

from heterollm.profiler.predict.neighbours import Neighbours
from heterollm.profiler.predict.time_model import ShapeModel, TimeModel
from heterollm.profiler.records import LinearPoint, Part

__all__ = ["Score", "Times", "choices", "held_out_predictions", "percentile", "score"]

Times: TypeAlias = Mapping[LinearPoint, float]
"""Microseconds, or cycles, of slices on one part."""

MOST_FOLDS: Final = 10
"""With more shapes several are kept out at once, since every fold costs a fit."""

HIGH, LOW = 0.9, 0.1


@dataclass(frozen=True, slots=True)
class Score:
    """How one model did on shapes that it was not fitted on.

    Args:
        model: Its name.
        part: Whose times it predicted.
        samples: Slices predicted.
        median_error: Half of the relative errors are below it.
        high_error: Nine in ten relative errors are below it.
        regret: Mean share of time lost by choosing by predictions; None where there was nothing to choose.
        choices: Decisions that the regret is the mean of.
        spread: Tenth and ninetieth percentile of measured over predicted time.
    """

    model: str
    part: Part
    samples: int
    median_error: float
    high_error: float
    regret: float | None
    choices: int
    spread: tuple[float, float]

    @property
    def rank(self) -> tuple[float, float, str]:
        """What the best model has least of: regret to a tenth of a percent, then error."""
        return round(self.regret or 0.0, 3), self.median_error, self.model


def weight_shape(point: LinearPoint) -> tuple[int, int, bool]:
    """Return what slices of a weight have in common: its columns, its rows, and whether it is a block's."""
    return point.columns, point.rows, point.is_block


def held_out_predictions(
    model: type[ShapeModel], times: Times, *, most_folds: int = MOST_FOLDS, bounded: bool = True
) -> dict[LinearPoint, float]:
    """Return the predicted time of each slice by a model that saw no slice of its weight shape.

    Without those of which there is but one shape, counting plain linear layers and feed-forward blocks apart.

    Args:
        model: How kinds of slices are modelled.
        times: Measured times.
        most_folds: At most so many fits.
        bounded: Whether slices of other shapes bound what the model says, as they do where it is used.
    """
    shapes = sorted({weight_shape(point) for point in times})
    folds = min(len(shapes), most_folds)
    if folds < 2:
        return {}
    # Neighbours in order go to different folds: each fold is then like the whole.
    fold_of = {shape: place % folds for place, shape in enumerate(shapes)}
    predicted: dict[LinearPoint, float] = {}
    for fold in range(folds):
        seen = [point for point in times if fold_of[weight_shape(point)] != fold]
        fitted = TimeModel(model).fit(seen, [times[point] for point in seen])
        neighbours = Neighbours({point: times[point] for point in seen} if bounded else {})
        can_be = {point.is_block for point in seen}
        for point in times:
            if fold_of[weight_shape(point)] == fold and point.is_block in can_be:
                predicted[point] = neighbours.predict(point, fitted).us
    return predicted


def choices(part: Part, times: Times, other: Times) -> Iterator[list[tuple[LinearPoint | None, float]]]:
    """Yield every decision between measured alternatives in which a part's times matter.

    Each alternative is the slice on the part (None if all runs on the other) and the measured time of the
    rest on the other part, which runs meanwhile. For feed-forward blocks they are forms: the GPU's part of
    one is measured as several operators, and not by itself.

    Args:
        part: The part whose times are predicted.
        times: Its measured times.
        other: The other part's measured times, which are taken as they are.
    """
    npu, gpu = (times, other) if part == "npu" else (other, times)
    slices: dict[Hashable, list[LinearPoint]] = defaultdict(list)
    for point in npu:
        slices[_decision(point)].append(point)
    rests = {
        rest
        for whole in gpu
        for point in slices.get(_decision(whole), ())
        if (rest := _rest(whole, point)) in gpu
    }
    for whole in sorted(set(gpu) - rests):
        found: list[tuple[LinearPoint | None, float]] = []
        found.append((whole, 0.0) if part == "gpu" else (None, gpu[whole]))
        for point in sorted(slices.get(_decision(whole), ())):
            rest = _rest(whole, point)
            if rest in gpu:
                found.append((point, gpu[rest]) if part == "npu" else (rest, npu[point]))
            elif not any(rest.member_rows):
                found.append((point, 0.0) if part == "npu" else (None, npu[point]))
        if len(found) > 1:
            yield found
    if part == "npu":
        yield from _forms(npu)


def _decision(point: LinearPoint) -> Hashable:
    """Return what alternatives have in common: all but the rows and the form."""
    return replace(point, member_rows=(0,) * len(point.member_rows), form="")


def _rest(whole: LinearPoint, point: LinearPoint) -> LinearPoint:
    """Return the slice that is left of a group on the GPU."""
    rows = tuple(all_rows - own for all_rows, own in zip(whole.member_rows, point.member_rows, strict=True))
    return replace(whole, member_rows=rows)


def _forms(times: Times) -> Iterator[list[tuple[LinearPoint | None, float]]]:
    """Yield the decisions between forms of one slice."""
    found: dict[LinearPoint, list[LinearPoint]] = defaultdict(list)
    for point in sorted(times):
        found[replace(point, form="")].append(point)
    for points in found.values():
        if len(points) > 1:
            yield [(point, 0.0) for point in points]


def score(
    model: type[ShapeModel],
    part: Part,
    times: Times,
    other: Times,
    *,
    most_folds: int = MOST_FOLDS,
    bounded: bool = True,
) -> Score | None:
    """Return how a model does on shapes kept out of its fit; None where there is but one shape.

    Args:
        model: How kinds of slices are modelled.
        part: The part whose times are predicted.
        times: Its measured times.
        other: The other part's measured times.
        most_folds: At most so many fits.
        bounded: As of :func:`held_out_predictions`.
    """
    predicted = held_out_predictions(model, times, most_folds=most_folds, bounded=bounded)
    if not predicted:
        return None
    errors = [abs(found - times[point]) / times[point] for point, found in predicted.items()]
    ratios = [times[point] / found for point, found in predicted.items()]
    losses = [
        _loss(found, times, predicted)
        for found in choices(part, times, other)
        if all(point is None or point in predicted for point, _ in found)
    ]
    return Score(
        model.name,
        part,
        len(errors),
        statistics.median(errors),
        percentile(errors, HIGH),
        statistics.fmean(losses) if losses else None,
        len(losses),
        (percentile(ratios, LOW), percentile(ratios, HIGH)),
    )


def _loss(found: Sequence[tuple[LinearPoint | None, float]], times: Times, predicted: Times) -> float:
    """Return the share of the best time that is lost by the alternative with the best predicted time."""

    def total(alternative: tuple[LinearPoint | None, float], known: Times) -> float:
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
