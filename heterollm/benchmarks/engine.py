"""The protocol of an engine, and its facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray

from heterollm.benchmarks.cases import Case, Configuration

Ids = NDArray[np.int32]


class FoundFields(TypedDict, total=False):
    """Fields of a row from an engine and from its trace; an unknown field is missing.

    ``read_bytes`` and ``flops`` are not fields of a row: the rates follow from them.
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


@dataclass(frozen=True, slots=True)
class Job:
    """Model and configuration that an engine loads.

    Args:
        model: Folder of the checkpoint.
        configuration: Its options.
        context: Positions that its session needs.
        trace: Whether to record every pass, which costs time.
        profile: A profile's file, in place of that of the device.
    """

    model: Path
    configuration: Configuration
    context: int
    trace: bool = False
    profile: Path | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of a loaded engine; its rows have all but the fields that judge its logits.

    Args:
        engine_version: Version of the engine.
        plan_level: Level of the plan that runs.
        device: Name of the device.
        time_kind: ``real``, ``emulated`` or ``simulated``.
        fingerprint: Fingerprint of the device; empty for other engines.
        model_type: Kind and number format of the model.
        model_size: Bytes of the engine's weights, without copies.
        model_n_params: Weights of its linear layers and embeddings.
        computes: Whether the engine computes logits; a simulated device may know shapes and times only.
        exact: Whether independent code computes in float32: the reference of all other engines.
        gate_db: Least signal to noise of its logits; by default the gate of its precision.
        description: The device, or the build of the engine.
        notes: Remarks on its numbers.
        calibration: Identity of the calibration that the plan's integers need; None without integers.
    """

    engine_version: str
    plan_level: str
    device: str
    time_kind: str
    fingerprint: str
    model_type: str
    model_size: int
    model_n_params: int
    computes: bool = True
    exact: bool = False
    gate_db: float | None = None
    description: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    calibration: str | None = None


class BenchEngine(Protocol):
    """A loaded model that runs tests, in the child process.

    Attributes:
        modelled_j: Modelled energy of the latest sample on a simulated device; None on a real one.
    """

    modelled_j: float | None

    @property
    def facts(self) -> Facts:
        """Facts of the engine."""
        ...

    def sample_us(self, case: Case, ids: Ids) -> float:
        """Run a test once.

        Args:
            case: The test; filling the cache to its depth is not timed.
            ids: The token at every position, at least ``case.end``.

        Returns:
            Microseconds of the prompt and the tokens after it.
        """
        ...

    def logits(self, ids: Ids, decoded: int) -> NDArray[np.float32]:
        """Return the logits ``[1 + decoded, vocab]`` after a prompt and after each of the last tokens.

        Args:
            ids: Prompt and tokens.
            decoded: Number of last tokens that are decoded one at a time.
        """
        ...

    def account(self, case: Case) -> FoundFields:
        """Return fields of a row that describe a sample; ``reasons`` explains missing ones."""
        ...

    def trace(self, case: Case, ids: Ids, file: Path | None = None) -> FoundFields:
        """Run a test once; return fields of a row from its trace, and write the trace to the file, if any."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...
