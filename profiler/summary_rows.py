"""The rows that a profile comes down to; tables, pages and JSON share them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from heterollm.profiler.measure import Measurement
from heterollm.profiler.predict import HIGH, Score, percentile
from heterollm.profiler.records import Bound, LinearPoint, Part, Record

__all__ = [
    "AccuracyRow",
    "BandwidthRow",
    "ContentionRow",
    "CopyRow",
    "Failure",
    "GraphRow",
    "HandOverRow",
    "LaunchRow",
    "LayerRow",
    "LinearRow",
    "PowerRow",
    "ProfileSummary",
    "RunRow",
    "SweepRow",
    "Times",
]


@dataclass(frozen=True, slots=True)
class Times:
    """Samples in short.

    Args:
        median_us: Half of the samples are below it.
        low_us: First quartile.
        high_us: Third quartile.
        high_tail_us: Nine in ten samples are below it.
        spread_fraction: Distance between the quartiles as a fraction of the median.
        samples: How many.
    """

    median_us: float
    low_us: float
    high_us: float
    high_tail_us: float
    spread_fraction: float
    samples: int

    @classmethod
    def of(cls, record: Record) -> Times | None:
        """Return the times of a record; None where it has none."""
        if not record.samples_us:
            return None
        taken = Measurement(record.samples_us)
        tail = percentile(record.samples_us, HIGH)
        return cls(taken.median_us, *taken.quartiles_us, tail, taken.spread_fraction, len(record.samples_us))


@dataclass(frozen=True, slots=True)
class RunRow:
    """A run of the profiler.

    Args:
        started_s: When it began, in seconds since 1970.
        seconds: How long it took.
        finished: Whether it came to its end.
        measured: Records that it took.
        failed: How many of them are errors.
        known: Tasks that it did not run because their records were there.
        left: Tasks that the budget left out.
        drift_fraction: How far the slowest reference time of a part was above the fastest.
        skipped: Points left out by rule, by reason.
        models: Whose shapes it measured.
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


@dataclass(frozen=True, slots=True)
class LinearRow:
    """A slice of a group of linear layers on one part.

    Args:
        part: Where it ran.
        point: What it computed.
        whole: Whether it is no cut of another measured slice, and no part of a block's width.
        times: How long a pass took.
        gflops: 10⁹ multiply-adds, counted as two each, in a second.
        cycles: Cycles of the NPU, where it counts them.
    """

    part: Part
    point: LinearPoint
    whole: bool
    times: Times
    gflops: float
    cycles: float | None


@dataclass(frozen=True, slots=True)
class LayerRow:
    """Another operator of a layer."""

    operator: str
    tokens: int
    context: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    times: Times


@dataclass(frozen=True, slots=True)
class BandwidthRow:
    """Reading memory on one part, alone or while the other reads too."""

    part: Part
    size_bytes: int
    together: bool
    gbps: float
    times: Times | None


@dataclass(frozen=True, slots=True)
class ContentionRow:
    """A part's job while the other part is at work: its time divided by the time alone."""

    part: Part
    bound: Bound
    beside: Bound
    slowdown: float


@dataclass(frozen=True, slots=True)
class LaunchRow:
    """One way of counting what a launch costs."""

    measure: str
    times: Times


@dataclass(frozen=True, slots=True)
class HandOverRow:
    """Latency from the end of a kernel to the host.

    Args:
        strategy: How it waits.
        kernel_us: About how long the kernel runs.
        times: Latencies.
        processor_fraction: Share of the wait that the waiting thread was computing; None if unknown.
    """

    strategy: str
    kernel_us: int
    times: Times
    processor_fraction: float | None


@dataclass(frozen=True, slots=True)
class CopyRow:
    """Moving or mapping memory."""

    method: str
    size_bytes: int
    times: Times


@dataclass(frozen=True, slots=True)
class GraphRow:
    """An NPU graph: what building, loading and keeping it cost, as far as known."""

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
        point: What it computed.
        cost: Cycles where they are counted, else microseconds.
        counted: Whether they are.
    """

    point: LinearPoint
    cost: float
    counted: bool


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
        baseline: Whether it is only compared with.
    """

    score: Score
    used: bool
    baseline: bool


@dataclass(frozen=True, slots=True)
class ProfileSummary:
    """A profile in rows.

    Args:
        device: Name of the device.
        time_kind: Whether times are real, emulated or simulated.
        fingerprint: Short hash of the description.
        description: Parts, drivers and thread split.
        runs: The newest last.
        linear: Slices of linear layers.
        layers: The other operators.
        bandwidth: Of each part.
        contention: Between the parts.
        launches: Costs of launches.
        hand_overs: By strategy and length of the kernel.
        copies: By method and size.
        graphs: NPU graphs.
        power: Empty where the system exposes none.
        failures: What could not be measured.
        accuracy: Of every model on each part.
        accuracy_reason: Why there is none; empty otherwise.
        sweeps: Stages, order of operands and effect of ``k`` on the NPU.
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
    hand_overs: tuple[HandOverRow, ...]
    copies: tuple[CopyRow, ...]
    graphs: tuple[GraphRow, ...]
    power: tuple[PowerRow, ...]
    failures: tuple[Failure, ...]
    accuracy: tuple[AccuracyRow, ...]
    accuracy_reason: str
    sweeps: tuple[SweepRow, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold."""
        return cast("dict[str, Any]", msgspec.to_builtins(self))
