"""A filter of NPU points that earlier measurements rule out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from msgspec.structs import replace

from heterollm.profiler.records import Key, LinearKey, LinearPoint, Part, Record
from heterollm.profiler.work import SkipReason, WorkPoint

__all__ = ["Judge"]

POOR_FACTOR: Final = 2.0
POOR_LENGTHS: Final = 2
HOPELESS_FACTOR: Final = 20.0
"""At it the best cut saves a twentieth of the GPU's time, at most."""


class Judge:
    """Skips points of the NPU that timings of whole groups rule out.

    A form is poor that is slower than twice the best at two lengths. A cut is hopeless where the whole group
    takes the NPU so many times the GPU's time that its share could not save what a hand-over costs.

    Args:
        known: What was measured before.
        comparable: Whether the times of both parts are real.
    """

    def __init__(self, known: Mapping[Key, Record], *, comparable: bool) -> None:
        self._comparable = comparable
        self._times_us: dict[tuple[Part, LinearPoint], dict[int, dict[str, float]]] = {}
        for record in known.values():
            self.learn(record)

    def learn(self, record: Record) -> None:
        """Take note of a measurement; failed ones say nothing."""
        key = record.key
        if isinstance(key, LinearKey) and not record.failed:
            lengths = self._times_us.setdefault((key.part, replace(key.point, tokens=0, form="")), {})
            time_us = record.values.get("cycles", record.median_us)
            lengths.setdefault(key.point.tokens, {})[key.point.form] = time_us

    def objection(self, work: WorkPoint) -> SkipReason | None:
        """Return why a point is left out; None where it is to be measured."""
        if work.part == "gpu":
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
        """Return the GPU's time; of a block, that of gate and up for as many weights."""
        plain = replace(whole, group="gate_up") if whole.is_block else whole
        time_us = self._times_us.get(("gpu", plain), {}).get(tokens, {}).get("")
        return None if time_us is None else time_us * whole.weight_bytes / plain.weight_bytes
