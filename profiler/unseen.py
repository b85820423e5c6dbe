"""Predicted beside measured times, each by a model that saw no shard of the same weight shape."""

from __future__ import annotations

from dataclasses import dataclass

from heterollm.profiler.predict import CANDIDATES, held_out_predictions
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
    found: list[HeldOut] = []
    for used in (row.score for row in summary.accuracy if row.used):
        processor = used.processor
        times = {row.point: row.times.median_us for row in summary.linear if row.processor == processor}
        for point, prediction in held_out_predictions(models[used.model], times).items():
            found.append(HeldOut(processor, point, times[point], prediction.us, prediction.known))
    return found
