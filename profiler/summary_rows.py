"""Rows of a profile's summary; tables, pages and JSON share them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, cast

import msgspec
from msgspec import Struct

from heterollm.profiler.measure import Measurement
from heterollm.profiler.predict import HIGH, Score, percentile
from heterollm.profiler.records import ContentionBound, LinearPoint, Processor, Record

WIDE_FRACTION: Final = 0.5
"""Distance between the quartiles, as a fraction of the median, from which on samples lie far apart."""


@dataclass(frozen=True, slots=True)
class RecordTimes:
    """Statistics of samples.

    Args:
        median_us: Half of the samples are below it.
        low_us: First quartile.
        high_us: Third quartile.
        high_tail_us: Nine in ten samples are below it.
        spread_fraction: Distance between the quartiles as a fraction of the median.
        samples: Number of samples.
        expected_us: Time that its neighbours explain, where it is disturbed; else 0.
    """

    median_us: float
    low_us: float
    high_us: float
    high_tail_us: float
    spread_fraction: float
    samples: int
    expected_us: float = 0.0

    @property
    def doubtful(self) -> bool:
        """Whether it lies far off its neighbours, or its samples far apart."""
        return self.expected_us > 0.0 or self.spread_fraction > WIDE_FRACTION

    @classmethod
    def of(cls, record: Record) -> RecordTimes | None:
        """Return the times of a record; None where it has none."""
        if not record.samples_us:
            return None
        taken = Measurement(record.samples_us)
        tail = percentile(record.samples_us, HIGH)
        spread, samples = taken.spread_fraction, len(record.samples_us)
        return cls(taken.median_us, *taken.quartiles_us, tail, spread, samples, record.expected_us)


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run of the profiler.

    Args:
        models: Names of the models whose shapes it measured.

    The other fields are those of :class:`heterollm.profiler.RunSummary`.
    """

    started_s: float
    seconds: float
    finished: bool
    measured: int
    failed: int
    known: int
    left: int
    drift_fraction: Mapping[str, float]
    skipped: Mapping[str, int]
    models: tuple[str, ...]


class LinearRow(Struct, frozen=True, rename={"processor": "part"}):
    """A shard of a group of linear layers on one processor.

    Args:
        processor: The processor.
        point: The shard.
        whole: Whether it is the whole group, and no shard of a split.
        times: Times of a pass.
        gflops: 10⁹ operations a second, two for each multiply-add.
        cpu_us: CPU time of a run of an emulated NPU.
    """

    processor: Processor
    point: LinearPoint
    whole: bool
    times: RecordTimes
    gflops: float
    cpu_us: float | None


@dataclass(frozen=True, slots=True)
class LayerRow:
    """A glue operator."""

    operator: str
    tokens: int
    context: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    times: RecordTimes


@dataclass(frozen=True, slots=True)
class SparseRow:
    """An operator of sparse attention."""

    operator: str
    tokens: int
    keys: int
    heads: int
    group: int
    head_dim: int
    keep: float
    times: RecordTimes


@dataclass(frozen=True, slots=True)
class ExpertsRow:
    """An operator of a layer's mixture of experts."""

    operator: str
    experts: int
    tokens: int
    columns: int
    width: int
    weight: str
    form: str
    times: RecordTimes


class BandwidthRow(Struct, frozen=True, rename={"processor": "part"}):
    """Reading memory on one processor, alone or while the other reads too."""

    processor: Processor
    size_bytes: int
    together: bool
    gbps: float
    times: RecordTimes | None


class ContentionRow(Struct, frozen=True, rename={"processor": "part"}):
    """A processor's job while the other processor is at work: its time divided by the time alone."""

    processor: Processor
    bound: ContentionBound
    beside: ContentionBound
    slowdown: float


@dataclass(frozen=True, slots=True)
class LaunchRow:
    """One cost of a launch."""

    measure: str
    times: RecordTimes


@dataclass(frozen=True, slots=True)
class FenceRow:
    """Latency from the end of a kernel to the host.

    Args:
        strategy: Strategy of the wait.
        kernel_us: Approximate time of the kernel.
        times: Latencies.
        processor_fraction: Fraction of the wait in which the waiting thread was computing; None if unknown.
    """

    strategy: str
    kernel_us: int
    times: RecordTimes
    processor_fraction: float | None


@dataclass(frozen=True, slots=True)
class CopyRow:
    """Moving or mapping memory."""

    method: str
    size_bytes: int
    times: RecordTimes


@dataclass(frozen=True, slots=True)
class GraphRow:
    """An NPU graph with the known costs of building, loading and storing it."""

    point: LinearPoint
    whole: bool
    build_us: float | None
    load_us: float | None
    size_bytes: float | None


@dataclass(frozen=True, slots=True)
class PowerRow:
    """Average power under a load."""

    source: str
    load: str
    watts: float


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One weight on the NPU at any length, measured to know the device.

    Args:
        point: The weight and its tokens.
        cost_us: CPU time where the NPU is emulated, else time.
        emulated: Whether ``cost_us`` is CPU time.
    """

    point: LinearPoint
    cost_us: float
    emulated: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """Measurements that failed with the same error."""

    kind: str
    error: str
    count: int


@dataclass(frozen=True, slots=True)
class AccuracyRow:
    """Accuracy of a model on weight shapes that it has not seen.

    Args:
        score: Its errors and its regret.
        used: Whether this profile is predicted with it.
    """

    score: Score
    used: bool


@dataclass(frozen=True, slots=True)
class ProfileSummary:
    """A profile in rows.

    Args:
        device: Name of the device.
        time_kind: Whether times are real, emulated or simulated.
        fingerprint: Short hash of the description.
        description: Parts, drivers and thread split.
        runs: The newest last.
        linear: Shards of linear layers.
        layers: Glue operators.
        bandwidth: Of each processor.
        contention: Between the processors.
        launches: Costs of launches.
        hand_overs: By strategy and length of the kernel.
        copies: By method and size.
        graphs: NPU graphs.
        power: Empty where the system exposes none.
        failures: Failed measurements.
        accuracy: Of every model on each processor.
        accuracy_reason: Reason why there is none; empty otherwise.
        sweeps: Stages, order of operands and effect of ``k`` on the NPU.
        grows_within_tiles: Whether the NPU's times rise within a tile of 32 tokens, which predictions read;
            None where nothing tells.
        sparse: Operators of sparse attention.
    """

    device: str
    time_kind: str
    fingerprint: str
    description: Mapping[str, Any]
    runs: tuple[RunRow, ...]
    linear: tuple[LinearRow, ...]
    layers: tuple[LayerRow, ...]
    bandwidth: tuple[BandwidthRow, ...]
    contention: tuple[ContentionRow, ...]
    launches: tuple[LaunchRow, ...]
    hand_overs: tuple[FenceRow, ...]
    copies: tuple[CopyRow, ...]
    graphs: tuple[GraphRow, ...]
    power: tuple[PowerRow, ...]
    failures: tuple[Failure, ...]
    accuracy: tuple[AccuracyRow, ...]
    accuracy_reason: str
    sweeps: tuple[SweepRow, ...] = ()
    grows_within_tiles: bool | None = None
    sparse: tuple[SparseRow, ...] = ()
    experts: tuple[ExpertsRow, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold."""
        return cast("dict[str, Any]", msgspec.to_builtins(self))
