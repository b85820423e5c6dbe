"""Puts a row together from samples, what the engine said, and where it all ran."""

from __future__ import annotations

import os
import statistics
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import heterollm
from heterollm.benchmarks.cases import Case, Configuration
from heterollm.benchmarks.conditions import commit_of, processor_name, versions
from heterollm.benchmarks.engine import Facts
from heterollm.benchmarks.quality import Quality
from heterollm.benchmarks.row_fields import (
    AccountFields,
    EngineFields,
    FoundFields,
    LoadFields,
    QualityFields,
    RateFields,
    RunFields,
)
from heterollm.benchmarks.rows import BenchRow, Sample, identity, timings
from heterollm.benchmarks.work import NO_RATES, Ceilings, Work, achieved

__all__ = ["State", "make_row", "run_fields"]

TRACED: Final = (
    "traced_ms",
    "gpu_busy_ms",
    "npu_busy_ms",
    "overlap_ms",
    "overlap_fraction",
    "hand_over_ms",
    "hand_overs",
)
NO_QUALITY: Final[QualityFields] = {
    "quality_reference": None,
    "logits_sqnr_db": None,
    "quality_gate_db": None,
    "top_1_agreement": None,
    "quality_passed": None,
}


@dataclass(slots=True)
class State:
    """What is known so far of a test with a configuration.

    Args:
        samples: In the order of the rounds.
        fields: What the engine says that a sample does.
        traced: What its trace shows.
        error: Why there are no more samples.
        test_time: When the first was taken.
    """

    samples: list[Sample] = field(default_factory=list)
    fields: FoundFields = field(default_factory=FoundFields)
    error: str | None = None
    test_time: str = ""
    traced: FoundFields = field(default_factory=FoundFields)


def run_fields(model: str, seed: int) -> RunFields:
    """Return the fields that all rows of a run share: where it ran, and with what.

    Args:
        model: Name of the checkpoint: rows are published, and where it lay is nobody's concern.
        seed: Of the token ids.
    """
    return {
        "build_commit": commit_of(Path(__file__).resolve().parent),
        "heterollm_version": heterollm.__version__,
        "cpu_info": processor_name(),
        "model_filename": model,
        "versions": versions(),
        "seed": seed,
        "run": uuid.uuid4().hex[:16],
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def make_row(
    configuration: Configuration,
    case: Case,
    state: State,
    run: RunFields,
    load: LoadFields,
    *,
    facts: Facts | None,
    quality: Quality | None,
) -> BenchRow:
    """Return the row of a test with a configuration.

    Args:
        configuration: How it ran.
        case: The test.
        state: What is known of it.
        run: Fields that all rows share.
        load: How it got its samples.
        facts: What the engine said of itself; None if it never loaded.
        quality: How near its logits are to the reference's.
    """
    given: FoundFields = {**state.fields, **state.traced}
    simulated = facts is not None and facts.time_kind == "simulated"
    joules = [sample.energy_j for sample in state.samples if sample.energy_j is not None]
    notes = () if facts is None else tuple(facts.notes)
    if load["interrupted"] is not None:
        count = f"{len(state.samples)} of {load['repetitions']} samples"
        notes += (f"{case.name} has {count}: interrupted by {load['interrupted']}",)
    return BenchRow(
        **run,
        **load,
        **identity(configuration, case),
        **timings(state.samples, case.tokens),
        **_of_engine(configuration, facts),
        **_of_account(given),
        **_rates(given, state.samples),
        **(NO_QUALITY if quality is None else quality.fields()),
        energy=("modelled" if simulated else "measured") if joules else "absent",
        energy_j=statistics.median(joules) if joules else None,
        error=state.error,
        test_time=state.test_time,
        notes=notes,
        reasons=_reasons(given, facts, quality),
    )


def _of_engine(configuration: Configuration, facts: Facts | None) -> EngineFields:
    if facts is None:
        return {
            "engine_version": None,
            "plan_level": configuration.plan_level,
            "device": None,
            "time_kind": None,
            "fingerprint": None,
            "model_type": None,
            "model_size": None,
            "model_n_params": None,
            "description": {},
        }
    return {
        "engine_version": facts.engine_version,
        "plan_level": facts.plan_level,
        "device": facts.device,
        "time_kind": facts.time_kind,
        "fingerprint": facts.fingerprint or None,
        "model_type": facts.model_type,
        "model_size": facts.model_size,
        "model_n_params": facts.model_n_params,
        "description": facts.description,
    }


def _of_account(given: FoundFields) -> AccountFields:
    return {
        "gpu_share": given.get("gpu_share"),
        "cut_groups": tuple(given["cut_groups"]) if "cut_groups" in given else None,
        "padded_tokens": given.get("padded_tokens"),
        "predicted_ms": given.get("predicted_ms"),
        "traced_ms": given.get("traced_ms"),
        "gpu_busy_ms": given.get("gpu_busy_ms"),
        "npu_busy_ms": given.get("npu_busy_ms"),
        "overlap_ms": given.get("overlap_ms"),
        "overlap_fraction": given.get("overlap_fraction"),
        "hand_over_ms": given.get("hand_over_ms"),
        "hand_overs": given.get("hand_overs"),
        "operators": tuple(given["operators"]) if "operators" in given else None,
    }


def _rates(given: FoundFields, samples: Sequence[Sample]) -> RateFields:
    if not samples or "flops" not in given:
        return NO_RATES
    middle_us = statistics.median(sample.time_us for sample in samples)
    known = "ceiling_gbps" in given
    ceilings = Ceilings(given["ceiling_gbps"], given["ceiling_gflops"]) if known else None
    return achieved(Work(given["read_bytes"], given["flops"]), middle_us, ceilings)


def _reasons(given: FoundFields, facts: Facts | None, quality: Quality | None) -> dict[str, str]:
    """Return why fields are missing."""
    reasons = dict(given.get("reasons", {}))
    if given.get("traced_ms") is None:
        reasons |= dict.fromkeys(TRACED, "Not traced.")
    if facts is not None and not facts.computes:
        reasons["logits_sqnr_db"] = "This simulated device computes no values."
    if quality is not None and quality.fields()["logits_sqnr_db"] is None:
        reasons["logits_sqnr_db"] = "The logits equal the reference's to the last bit."
    return reasons
