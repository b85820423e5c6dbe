"""A filter of NPU points that earlier measurements rule out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from heterollm.profiler.records import Key, LinearKey, LinearPoint, Processor, Record
from heterollm.profiler.work import SkipReason, WorkPoint

POOR_FACTOR: Final = 2.0
POOR_LENGTHS: Final = 2
HOPELESS_FACTOR: Final = 20.0
"""At this factor the best split saves at most a twentieth of the GPU's time."""


class PointFilter:
    """Skips points of the NPU that timings of whole groups rule out.

    A form is poor if it takes more than twice the time of the best form at two lengths. A split is hopeless
    if the NPU takes so many times the GPU's time for the whole group that its shard cannot save the cost of a
    sync.

    Args:
        known: Earlier measurements.
        comparable: Whether the times of both processors are real.
    """

    def __init__(self, known: Mapping[Key, Record], *, comparable: bool) -> None:
        self._comparable = comparable
        self._times_us: dict[tuple[Processor, LinearPoint], dict[int, dict[str, float]]] = {}
        for record in known.values():
            self.learn(record)

    def learn(self, record: Record) -> None:
        """Take note of a measurement; failed ones are ignored."""
        key = record.key
        if isinstance(key, LinearKey) and not record.failed:
            lengths = self._times_us.setdefault((key.processor, replace(key.point, tokens=0, form="")), {})
            time_us = record.values.get("cpu_us", record.median_us)
            lengths.setdefault(key.point.tokens, {})[key.point.form] = time_us

    def objection(self, work: WorkPoint) -> SkipReason | None:
        """Return the reason to skip a point; None to measure it."""
        if work.processor == "gpu":
            return None
        form, tokens = work.point.form, work.point.tokens
        whole = replace(work.point, member_rows=work.spec.member_rows, tokens=0, form="")
        lengths = self._times_us.get(("npu", whole), {})
        slower = [
            times[form] > POOR_FACTOR * min(times.values()) for times in lengths.values() if form in times
        ]
        if sum(slower) >= POOR_LENGTHS:
            return "form"
        own_us = lengths.get(tokens, {}).get(form)
        gpu_us = self._gpu_us(whole, tokens)
        is_split = self._comparable and work.point.member_rows != work.spec.member_rows
        if is_split and own_us and gpu_us and own_us > HOPELESS_FACTOR * gpu_us:
            return "hopeless"
        return None

    def _gpu_us(self, whole: LinearPoint, tokens: int) -> float | None:
        """Return the GPU's time; for an ffn, that of gate and up scaled to as many weights."""
        plain = replace(whole, group="gate_up") if whole.is_ffn else whole
        time_us = self._times_us.get(("gpu", plain), {}).get(tokens, {}).get("")
        return None if time_us is None else time_us * whole.weight_bytes / plain.weight_bytes
