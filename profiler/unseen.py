"""Predicted beside measured times, each by a model that saw no shard of the same weight shape."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from heterollm.profiler.predict import CANDIDATES, Hull, Kind, PointTimes, held_out_predictions
from heterollm.profiler.records import LinearPoint, Processor
from heterollm.profiler.summary_rows import ProfileSummary


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A measured shard with its prediction.

    Args:
        processor: The processor.
        point: The shard.
        measured_us: Median of its times.
        predicted_us: By a model that was fitted without its weight shape.
        known: Whether the other shapes surround it, or nearly so.
    """

    processor: Processor
    point: LinearPoint
    measured_us: float
    predicted_us: float
    known: bool


def held_out(summary: ProfileSummary) -> list[HeldOut]:
    """Return every shard of linear layers with the prediction of the model in use on its processor."""
    models = {model.name: model for found in CANDIDATES.values() for model in found}
    used = {row.score.processor: models[row.score.model] for row in summary.accuracy if row.used}
    found: list[HeldOut] = []
    for processor, model in used.items():
        times = {row.point: row.times.median_us for row in summary.linear if row.processor == processor}
        known = dict(_known(times))
        for point, predicted_us in held_out_predictions(model, times).items():
            found.append(HeldOut(processor, point, times[point], predicted_us, known[point]))
    return found


def _known(times: PointTimes) -> Iterator[tuple[LinearPoint, bool]]:
    """Yield whether the measured shards of other shapes, of the same kind, surround each."""
    kinds: Mapping[Kind, dict[tuple[int, int], list[LinearPoint]]] = defaultdict(lambda: defaultdict(list))
    for point in times:
        kinds[Kind.of(point)][point.columns, point.rows].append(point)
    for shapes in kinds.values():
        for shape, points in shapes.items():
            others = [point for other, found in shapes.items() if other != shape for point in found]
            hull = Hull.of(others) if others else None
            for point in points:
                yield point, hull is not None and hull.near(point)
