"""Puts a row together from samples, what the engine said, and where it all ran."""

from __future__ import annotations

import os
import statistics
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import heterollm
from heterollm.benchmarks.cases import Case, Configuration
from heterollm.benchmarks.conditions import commit_of, processor_name, versions
from heterollm.benchmarks.engine import Facts
from heterollm.benchmarks.quality import Quality
from heterollm.benchmarks.rows import FIELD_NAMES, BenchRow, Sample, identity, timings
from heterollm.benchmarks.work import Ceilings, Work, achieved

__all__ = ["State", "common_fields", "make_row"]

COUNTED: Final = ("gpu_share", "padded_tokens", "predicted_ms")
TRACED: Final = (
    "traced_ms",
    "gpu_busy_ms",
    "npu_busy_ms",
    "overlap_ms",
    "overlap_fraction",
    "hand_over_ms",
    "hand_overs",
)


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
    fields: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    test_time: str = ""
    traced: dict[str, Any] = field(default_factory=dict)


def common_fields(model: str, seed: int, repetitions: int) -> dict[str, Any]:
    """Return the fields that all rows of a run share: where it ran, and with what.

    Args:
        model: Name of the checkpoint: rows are published, and where it lay is nobody's concern.
        seed: Of the token ids.
        repetitions: Samples of each test.
    """
    return {
        "build_commit": commit_of(Path(__file__).resolve().parent),
        "heterollm_version": heterollm.__version__,
        "cpu_info": processor_name(),
        "model_filename": model,
        "versions": versions(),
        "seed": seed,
        "repetitions": repetitions,
        "run": uuid.uuid4().hex[:16],
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def make_row(
    configuration: Configuration,
    case: Case,
    state: State,
    common: dict[str, Any],
    *,
    facts: Facts | None,
    quality: Quality | None,
    others: dict[str, Any],
) -> BenchRow:
    """Return the row of a test with a configuration.

    Args:
        configuration: How it ran.
        case: The test.
        state: What is known of it.
        common: What all rows share.
        facts: What the engine said of itself; None if it never loaded.
        quality: How near its logits are to the reference's.
        others: Further fields.
    """
    found: dict[str, Any] = dict.fromkeys(FIELD_NAMES)
    found |= common | others | identity(configuration, case)
    found |= timings(state.samples, case.tokens)
    found |= _of_engine(configuration, facts)
    found |= _of_account(state)
    simulated = facts is not None and facts.time_kind == "simulated"
    joules = [sample.energy_j for sample in state.samples if sample.energy_j is not None]
    found |= {
        "energy": ("modelled" if simulated else "measured") if joules else "absent",
        "energy_j": statistics.median(joules) if joules else None,
        "error": state.error,
        "test_time": state.test_time,
    }
    if found["interrupted"] is not None:
        count = f"{len(state.samples)} of {found['repetitions']} samples"
        found["notes"] += (f"{case.name} has {count}: interrupted by {found['interrupted']}",)
    if facts is not None and not facts.computes:
        found["reasons"]["logits_sqnr_db"] = "This simulated device computes no values."
    if quality is not None:
        found |= quality.to_dict()
        if found["logits_sqnr_db"] is None:
            found["reasons"]["logits_sqnr_db"] = "The logits equal the reference's to the last bit."
    return BenchRow(**found)


def _of_engine(configuration: Configuration, facts: Facts | None) -> dict[str, Any]:
    if facts is None:
        return {"plan_level": configuration.plan_level, "description": {}, "notes": ()}
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
        "notes": tuple(facts.notes),
    }


def _of_account(state: State) -> dict[str, Any]:
    given = state.fields | state.traced
    reasons: dict[str, str] = dict(given.get("reasons", {}))
    found: dict[str, Any] = {name: given.get(name) for name in (*COUNTED, *TRACED)}
    for name in ("cut_groups", "operators"):
        found[name] = tuple(given[name]) if name in given else None
    if state.samples and "flops" in given:
        middle_us = statistics.median(sample.time_us for sample in state.samples)
        known = "ceiling_gbps" in given
        ceilings = Ceilings(given["ceiling_gbps"], given["ceiling_gflops"]) if known else None
        found |= achieved(Work(given["read_bytes"], given["flops"]), middle_us, ceilings)
    if found["traced_ms"] is None:
        reasons |= dict.fromkeys(TRACED, "Not traced.")
    return found | {"reasons": reasons}
