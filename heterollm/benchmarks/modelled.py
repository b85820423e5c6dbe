"""Rows of simulated cases."""

from __future__ import annotations

from typing import Any

import msgspec

import heterollm
from heterollm.benchmarks.rows import Account, Asked, BenchRow, Modelled, Sample, Setup, Times, times_of
from heterollm.simulate import GROUP_SIZE, SimulationRequest, SimulationResult
from heterollm.solver import NPU_EXPERTS, SHADOW_ATTENTION


def modelled_row(
    request: SimulationRequest, result: SimulationResult | None = None, error: str | None = None
) -> BenchRow:
    """Return the row of a simulated case.

    Args:
        request: The case.
        result: Its result; None if it failed.
        error: Why it failed.
    """
    found: dict[str, Any] = {} if result is None else result.to_dict()
    names = request.techniques
    conditions = {
        "soc": request.soc,
        "plan_for": request.plan_for,
        "in_flight": request.in_flight,
        "gpu_load": None if request.load is None else str(request.load),
        "what_if": dict(request.overrides),
        "head_bits": request.head_bits,
        "every_form": request.forms,
        "calibrated": request.calibrated,
        "attention": msgspec.to_builtins(request.attention) if SHADOW_ATTENTION in names else None,
        "overflow": request.experts.overflow if NPU_EXPERTS in names else None,
        "imbalance": request.imbalance,
        "head_imbalance": request.head_imbalance,
        "pruned": request.pruned,
        "outlier_share": request.outlier_share,
    }
    level = request.level if result is None else result.plan.level
    sample = None if result is None else Sample(result.elapsed_us)
    return BenchRow(
        label=" ".join((request.level, *names, f"sync {request.sync}", request.precision)),
        test="+".join((f"pp{request.prompt}", *([f"tg{request.decode}"] if request.decode else []))),
        engine="self",
        plan_level=level,
        precision=request.precision,
        time_kind="simulated",
        asked=Asked(
            n_prompt=request.prompt,
            n_gen=request.decode,
            n_depth=0,
            asked_level=request.level,
            length_policy=request.length_policy,
            sync=request.sync,
            group_size=GROUP_SIZE,
            technique="+".join(names),
            repetitions=1,
        ),
        setup=Setup(
            heterollm_version=heterollm.__version__,
            device=None if result is None else result.device,
            fingerprint=None if result is None else result.fingerprint,
            model_filename=request.model,
            model_type=None if result is None else result.model,
        ),
        times=Times(samples_ns=()) if sample is None else times_of([sample], request.prompt + request.decode),
        account=Account() if result is None else Account(energy="modelled", energy_j=result.joules),
        modelled=msgspec.convert(conditions | found, Modelled),
        error=error,
        notes=(result.note,) if result is not None and result.note else (),
    )
