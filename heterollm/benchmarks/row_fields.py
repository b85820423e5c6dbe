"""Groups of a row's fields, as those who find them out hand them on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

__all__ = [
    "AccountFields",
    "CaseFields",
    "EngineFields",
    "FoundFields",
    "LoadFields",
    "QualityFields",
    "RateFields",
    "RunFields",
    "TimeFields",
]


class RunFields(TypedDict):
    """Fields that all rows of a run share: where it ran, and with what."""

    build_commit: str
    heterollm_version: str
    cpu_info: str
    model_filename: str
    versions: Mapping[str, str]
    seed: int
    run: str | None
    load_average: float | None


class CaseFields(TypedDict):
    """What was asked for."""

    n_prompt: int
    n_gen: int
    n_depth: int
    test: str
    n_threads: int | None
    engine: str
    label: str
    asked_level: str
    baseline: bool
    precision: str
    group_size: int
    length_policy: str
    sync: str
    gpu_threads: int | None
    npu_threads: int | None


class LoadFields(TypedDict):
    """How a test got its samples."""

    loads: int
    memory_bytes: int | None
    repetitions: int
    interrupted: str | None


class TimeFields(TypedDict):
    """What samples come to; None without any."""

    avg_ns: float | None
    stddev_ns: float | None
    avg_ts: float | None
    stddev_ts: float | None
    median_ts: float | None
    measured_ms: float | None
    samples_ns: tuple[int, ...]
    samples_ts: tuple[float, ...]
    samples_disturbed: tuple[bool | None, ...]
    disturbed_fraction: float | None


class EngineFields(TypedDict):
    """What an engine says of itself; None if it never loaded."""

    engine_version: str | None
    plan_level: str
    device: str | None
    time_kind: str | None
    fingerprint: str | None
    model_type: str | None
    model_size: int | None
    model_n_params: int | None
    description: Mapping[str, Any]


class FoundFields(TypedDict, total=False):
    """What an engine says that a sample does, and what its trace shows; what it does not know is left out.

    ``read_bytes`` and ``flops`` are no fields of a row: the rates follow from them.
    """

    gpu_share: float
    cut_groups: Sequence[str]
    padded_tokens: int
    predicted_ms: float
    read_bytes: float
    flops: float
    ceiling_gbps: float
    ceiling_gflops: float
    traced_ms: float
    gpu_busy_ms: float
    npu_busy_ms: float
    overlap_ms: float
    overlap_fraction: float
    hand_over_ms: float
    hand_overs: int
    operators: Sequence[Mapping[str, Any]]
    reasons: Mapping[str, str]


class RateFields(TypedDict):
    """Rates that a time comes to, and what bounds it."""

    achieved_gbps: float | None
    achieved_gflops: float | None
    ceiling_gbps: float | None
    ceiling_gflops: float | None
    gbps_fraction: float | None
    gflops_fraction: float | None
    bound: str | None


class AccountFields(TypedDict):
    """What :class:`FoundFields` comes to in a row."""

    gpu_share: float | None
    cut_groups: tuple[str, ...] | None
    padded_tokens: int | None
    predicted_ms: float | None
    traced_ms: float | None
    gpu_busy_ms: float | None
    npu_busy_ms: float | None
    overlap_ms: float | None
    overlap_fraction: float | None
    hand_over_ms: float | None
    hand_overs: int | None
    operators: tuple[Mapping[str, Any], ...] | None


class QualityFields(TypedDict):
    """How near the logits are to the reference's."""

    quality_reference: str | None
    logits_sqnr_db: float | None
    quality_gate_db: float | None
    top_1_agreement: float | None
    quality_passed: bool | None
