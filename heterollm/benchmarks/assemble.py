"""Assembles a row from samples, the engine's facts and the conditions of the run."""

from __future__ import annotations

import os
import statistics
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec

import heterollm
from heterollm.benchmarks.cases import Case, Configuration
from heterollm.benchmarks.conditions import commit_of, processor_name, versions
from heterollm.benchmarks.engine import Facts, FoundFields
from heterollm.benchmarks.rows import (
    Account,
    BenchRow,
    LogitsCheck,
    Sample,
    Setup,
    TraceTimes,
    asked_of,
    times_of,
)
from heterollm.benchmarks.work import Ceilings, Rates, Work, achieved

TRACED: Final = tuple(name for name in TraceTimes.__struct_fields__ if name != "operators")
ACCOUNTED: Final = ("gpu_share", "cut_groups", "padded_tokens", "predicted_ms")


@dataclass(slots=True)
class State:
    """Results so far of a test with a configuration.

    Args:
        samples: Samples in the order of the rounds.
        fields: Fields of the row from the engine.
        error: Why there are no more samples.
        test_time: Time of the first sample.
        traced: Fields of the row from its trace.
    """

    samples: list[Sample] = field(default_factory=list)
    fields: FoundFields = field(default_factory=FoundFields)
    error: str | None = None
    test_time: str = ""
    traced: FoundFields = field(default_factory=FoundFields)


@dataclass(frozen=True, slots=True)
class BenchRun:
    """Common fields of all rows of a run: conditions, seed of the token ids, and a unique name."""

    setup: Setup
    seed: int
    name: str | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """Loads of the model of a test, and the requested samples.

    Args:
        loads: Number of times that the model was loaded.
        memory_bytes: Memory of the model.
        repetitions: Requested samples.
        interrupted: Why there are fewer samples.
    """

    loads: int
    memory_bytes: int | None
    repetitions: int
    interrupted: str | None


def run_of(model: str, seed: int) -> BenchRun:
    """Return the common fields of all rows of a run that begins now.

    Args:
        model: Name of the checkpoint; published rows do not show its folder.
        seed: Seed of the token ids.
    """
    setup = Setup(
        build_commit=commit_of(Path(__file__).resolve().parent),
        heterollm_version=heterollm.__version__,
        cpu_info=processor_name(),
        model_filename=model,
        versions=versions(),
        load_average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    )
    return BenchRun(setup, seed, uuid.uuid4().hex[:16])


def make_row(
    configuration: Configuration,
    case: Case,
    state: State,
    run: BenchRun,
    load: Loaded,
    *,
    facts: Facts | None,
    quality: LogitsCheck | None,
) -> BenchRow:
    """Return the row of a test with a configuration.

    Args:
        configuration: The configuration.
        case: The test.
        state: Its results.
        run: Common fields of all rows.
        load: Loads of the model, and the requested samples.
        facts: The engine's facts; None if it never loaded.
        quality: Distance of its logits from the reference's.
    """
    given: FoundFields = {**state.fields, **state.traced}
    notes = () if facts is None else tuple(facts.notes)
    if load.interrupted is not None:
        count = f"{len(state.samples)} of {load.repetitions} samples"
        notes += (f"{case.name} has {count}: interrupted by {load.interrupted}",)
    traced = {name: value for name, value in given.items() if name in TraceTimes.__struct_fields__}
    return BenchRow(
        label=configuration.label,
        test=case.name,
        engine=configuration.engine,
        plan_level=configuration.plan_level if facts is None else facts.plan_level,
        precision=configuration.precision,
        time_kind=None if facts is None else facts.time_kind,
        run=run.name,
        asked=asked_of(configuration, case, seed=run.seed, repetitions=load.repetitions),
        setup=_setup(run, state, facts),
        times=times_of(state.samples, case.tokens),
        account=_account(given, state.samples, load, facts),
        trace=msgspec.convert(traced, TraceTimes),
        quality=quality or LogitsCheck(),
        error=state.error,
        interrupted=load.interrupted,
        notes=notes,
        reasons=_reasons(given, facts, quality),
    )


def _setup(run: BenchRun, state: State, facts: Facts | None) -> Setup:
    setup = msgspec.structs.replace(run.setup, test_time=state.test_time)
    if facts is None:
        return setup
    return msgspec.structs.replace(
        setup,
        engine_version=facts.engine_version,
        device=facts.device,
        fingerprint=facts.fingerprint or None,
        calibration=facts.calibration,
        model_type=facts.model_type,
        model_size=facts.model_size,
        model_n_params=facts.model_n_params,
        description=facts.description,
    )


def _account(given: FoundFields, samples: Sequence[Sample], load: Loaded, facts: Facts | None) -> Account:
    simulated = facts is not None and facts.time_kind == "simulated"
    joules = [sample.energy_j for sample in samples if sample.energy_j is not None]
    known: dict[str, object] = {name: value for name, value in given.items() if name in ACCOUNTED}
    known |= _rates(given, samples) or {}
    known |= {
        "energy": ("modelled" if simulated else "measured") if joules else "absent",
        "energy_j": statistics.median(joules) if joules else None,
        "memory_bytes": load.memory_bytes,
        "loads": load.loads,
    }
    return msgspec.convert(known, Account)


def _rates(given: FoundFields, samples: Sequence[Sample]) -> Rates | None:
    if not samples or "flops" not in given:
        return None
    middle_us = statistics.median(sample.time_us for sample in samples)
    known = "ceiling_gbps" in given
    ceilings = Ceilings(given["ceiling_gbps"], given["ceiling_gflops"]) if known else None
    return achieved(Work(given["read_bytes"], given["flops"]), middle_us, ceilings)


def _reasons(given: FoundFields, facts: Facts | None, quality: LogitsCheck | None) -> dict[str, str]:
    """Return reasons for missing fields."""
    reasons = dict(given.get("reasons", {}))
    if given.get("traced_ms") is None:
        reasons |= dict.fromkeys(TRACED, "Not traced.")
    if facts is not None and not facts.computes:
        reasons["logits_sqnr_db"] = "This simulated device computes no values."
    if quality is not None and quality.logits_sqnr_db is None:
        reasons["logits_sqnr_db"] = "The logits equal the reference's to the last bit."
    return reasons
