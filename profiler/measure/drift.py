"""Reference operators, one for each processor, measured repeatedly through a run to show and correct drift.

Each operator's record keeps the time of its processor's reference operator around it. Where that was slower
than in the quietest run of the profile, by more than its noise, the samples are divided by as much.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from heterollm.base import ProfileError
from heterollm.kernels.device import Device
from heterollm.kernels.npu import LinearShape
from heterollm.kernels.ops import Member, OpSpec, WeightFormat
from heterollm.profiler.measure.linears import LinearBench
from heterollm.profiler.records import (
    DriftKey,
    ExpertsKey,
    Key,
    LayerKey,
    LinearKey,
    LinearPoint,
    Processor,
    Profile,
    Record,
    SparseKey,
)
from heterollm.profiler.work import WorkPoint

REFERENCE: Final = "reference_us"
"""Name of the value of a record with the time of the reference operator around its measurement."""

SLOWDOWN: Final = "slowdown_corrected"
"""Name of the value of a record with the factor that its samples were divided by."""

NOISE: Final = 1.1
"""Factor up to which a slower reference operator is noise."""

TOKENS: Final = 64
SPEC: Final = OpSpec("o", 0, (Member("o", 1024),), 1024, WeightFormat(4, 32), "x", "y")


class ReferenceOperators:
    """Measures one small linear layer on each processor.

    Args:
        device: The opened device.

    Attributes:
        processors: The processors that can compute it.
    """

    def __init__(self, device: Device) -> None:
        self.processors: tuple[Processor, ...] = ("gpu",)
        self._form = ""
        if device.npu is not None:
            forms = device.npu.forms(LinearShape(SPEC.weight, SPEC.columns), TOKENS)
            if TOKENS in device.npu.standard_lengths and forms:
                self.processors, self._form = ("gpu", "npu"), forms[0]
        self._bench = LinearBench(device)

    def measure(self, processor: Processor) -> tuple[float, ...]:
        """Return samples of a processor's time in microseconds.

        Raises:
            ProfileError: It could not be measured.
        """
        form = self._form if processor == "npu" else ""
        point = LinearPoint.of(SPEC, TOKENS, form=form, streamed=False)
        record = self._bench.measure(WorkPoint(processor, point, 0, SPEC))[0]
        if record.failed:
            raise ProfileError(record.error)
        return record.samples_us


def with_reference(record: Record, times_us: Mapping[Processor, float]) -> Record:
    """Return a record of an operator with the time of its processor's reference operator around it.

    Args:
        record: Any record; those of no operator, and failed ones, are returned as they are.
        times_us: Times of the reference operators.
    """
    processor = _processor_of(record.key)
    if processor is None or processor not in times_us or not record.samples_us:
        return record
    return replace(record, values={**record.values, REFERENCE: round(times_us[processor], 3)})


def correct_drift(profile: Profile) -> None:
    """Divide samples by the slowdown of the reference operator against the quietest run of the profile.

    A correction that an earlier call made is taken back first, so that every call has the same effect.
    """
    quiet_us = _quiet_us(profile)
    for key, record in profile.records.items():
        processor = _processor_of(key)
        if processor not in quiet_us or REFERENCE not in record.values:
            continue
        slowdown = record.values[REFERENCE] / quiet_us[processor]
        slowdown = round(slowdown, 4) if slowdown > NOISE else 1.0
        held = record.values.get(SLOWDOWN, 1.0)
        if slowdown != held:
            values = {name: value for name, value in record.values.items() if name != SLOWDOWN}
            values |= {SLOWDOWN: slowdown} if slowdown != 1.0 else {}
            samples = tuple(sample * held / slowdown for sample in record.samples_us)
            profile.records[key] = replace(record, samples_us=samples, values=values)


def _quiet_us(profile: Profile) -> dict[Processor | None, float]:
    """Return the reference operator's time in the quietest run, by processor: the lower quartile there.

    Runs of other versions of the kernels and graphs than the newest one's do not count.
    """
    newest = max(profile.runs, key=lambda name: profile.runs[name]["started_s"], default="")
    versions = {name: run.get("code") for name, run in profile.runs.items()}
    runs: dict[tuple[Processor, str], list[float]] = defaultdict(list)
    for key, record in profile.of_kind(DriftKey):
        if versions.get(key.run) == versions.get(newest):
            runs[key.processor, key.run].append(record.median_us)
    found: dict[Processor | None, float] = {}
    for (processor, _), times_us in runs.items():
        low_us = statistics.quantiles(times_us, n=4, method="inclusive")[0] if times_us[1:] else times_us[0]
        found[processor] = min(found.get(processor, low_us), low_us)
    return found


def _processor_of(key: Key) -> Processor | None:
    """Return the processor of an operator; None for other measurements."""
    match key:
        case LinearKey():
            return key.processor
        case LayerKey():
            return "gpu"
        case SparseKey():
            return "npu" if key.operator == "scores" else "gpu"
        case ExpertsKey():
            return "npu" if key.operator == "graph" else "gpu"
        case _:
            return None
