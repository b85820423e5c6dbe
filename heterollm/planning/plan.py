"""Makes every plan: a given one, one from a file, that of a level, or the solver's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from msgspec import structs

from heterollm.base import OptionError, PlanError, Progress, silent
from heterollm.planning.calibrated import check_shadows
from heterollm.planning.inputs import PlanInputs
from heterollm.planning.planned import Planned
from heterollm.planning.techniques.llm_npu import fastest_in_flight
from heterollm.planning.techniques.registry import technique_notes, with_techniques
from heterollm.solver import (
    LEVELS,
    NPU_ATTENTION,
    SOLVED_LEVELS,
    PhaseSync,
    Plan,
    PlanLevel,
    best_strategy,
    default_chunk_length,
    level_plan,
    model_shape,
    with_shadows,
)

UNPROFILED: Final = (
    "auto: gpu, since {} has no profile with these threads; `--profile quick` measures it first, in about a "
    "minute, and `heterollm profile MODEL` in more detail"
)


def make_plan(inputs: PlanInputs, report: Progress = silent) -> Planned:
    """Return the plan of some inputs; called on the engine thread of an opened device.

    Args:
        inputs: All that the plan follows from.
        report: Called with the plans solved and their number where several are compared.

    Raises:
        OptionError: The wanted plan is neither a level nor a file, or the level or the request is not legal.
        PlanError: The plan is damaged, or made for another model, device, precision or calibration; or no
            processor can compute a group.
        ProfileError: The profile is damaged, or lacks measurements that the plan needs.
        CalibrationError: The calibration cannot be read.
    """
    wanted, found = inputs.wanted, None
    if isinstance(wanted, str) and wanted in ("auto", *SOLVED_LEVELS):
        found = _solved(inputs, report)
    elif isinstance(wanted, str) and wanted in LEVELS:
        found = _by_rule(inputs, wanted)
    else:
        found = Planned(_given(inputs, wanted))
    plan, notes = found.plan, found.notes
    if inputs.sync != "auto" and (plan.uses_npu or inputs.sync == "operator"):
        plan = structs.replace(plan, sync=PhaseSync(inputs.sync, inputs.sync))
    notes += tuple(note for record in plan.techniques for note in record.notes)
    return replace(found, plan=plan, notes=notes)


def read_plan(plan: str | Path | Plan) -> Plan:
    """Return a plan, or that of a file.

    Raises:
        OptionError: There is no such file.
        PlanError: The file is damaged.
    """
    if isinstance(plan, Plan):
        return plan
    path = Path(plan)
    try:
        found = path.is_file()
    except OSError:  # such as a name that is too long
        found = False
    if not found:
        raise OptionError(
            f"{str(path)!r:.200} is neither a plan level nor a plan file.",
            fix=f"Choose auto, {', '.join((*LEVELS, *SOLVED_LEVELS))}, or the path of a plan.",
        )
    return Plan.load(path)


def _solved(inputs: PlanInputs, report: Progress) -> Planned:
    """Return the solver's plan; without a profile ``auto`` is the rule of the GPU."""
    if inputs.model is None and inputs.wanted == "auto" and not inputs.request.techniques:
        return replace(_by_rule(inputs, "gpu"), notes=(UNPROFILED.format(inputs.device),))
    # A late import: plans by rule need no solver.
    from heterollm.planning.planner import solve_plan

    techniques = inputs.request.techniques
    model = inputs.profiled(
        f"The technique {techniques[0]}" if techniques else f"Plan level {inputs.wanted!r}"
    )
    found = solve_plan(model, inputs.request, inputs.evidence, inputs.longest, report)
    if not inputs.chosen:
        return found
    own = found.notes[1:] if inputs.request.level == "auto" else found.notes
    return replace(found, notes=(inputs.chosen, *own))


def _by_rule(inputs: PlanInputs, level: PlanLevel) -> Planned:
    """Return the plan of a level, with the attention and the experts of techniques."""
    on_npu = level != "gpu"
    lengths = inputs.standard_lengths if on_npu else ()
    longest = inputs.longest or default_chunk_length(lengths, inputs.request.context)
    policy = inputs.length_policy if on_npu else "padding"
    costs = inputs.model.npu_us if policy == "auto" and inputs.model is not None else None

    def rule(chunk_length: int) -> Plan:
        return level_plan(
            level,
            inputs.specs,
            device=inputs.device,
            precision=inputs.precision,
            standard_lengths=inputs.standard_lengths,
            chunk_length=chunk_length,
            length_policy=policy,
            length_costs=costs,
        )

    plan, request = rule(longest), inputs.request
    if request.in_flight != 1 and plan.uses_npu:
        prompts = {length: weight for length, weight in (request.histogram or {}).items() if length > 1}
        plans = [rule(length) for length in lengths if 1 < length <= longest]
        model = inputs.profiled("Several chunks in flight")
        plan = fastest_in_flight(model, plan, plans, prompts, request.in_flight)
    plan = structs.replace(with_shadows(plan, inputs.shadows), shape=model_shape(inputs.every_spec))
    if plan.uses_npu:
        calibration = inputs.calibration if plan.has_integer_forms else None
        plan = structs.replace(plan, sync=_waits(inputs), calibration=calibration)
    if not inputs.evidence and NPU_ATTENTION not in request.techniques:
        return Planned(plan)
    model = inputs.profiled(f"The technique {request.techniques[0]}")
    plan = with_techniques(model, plan, request, inputs.evidence)
    return Planned(plan, technique_notes(model, plan, request), model, evidence=inputs.evidence)


def _waits(inputs: PlanInputs) -> PhaseSync:
    """Return how processors wait under a level that follows a rule."""
    if inputs.opened is None or inputs.sync != "auto":
        return PhaseSync()
    from heterollm.engine import default_sync

    best = None if inputs.model is None else best_strategy(inputs.model.profile)
    return default_sync(inputs.opened, best)


def _given(inputs: PlanInputs, wanted: str | Path | Plan) -> Plan:
    """Return a plan that is made already, if it is for these inputs."""
    plan, what = read_plan(wanted), "The plan" if isinstance(wanted, Plan) else str(wanted)
    stated = {"shape": model_shape(inputs.every_spec), "device": inputs.device, "precision": inputs.precision}
    for field, value in stated.items():
        if getattr(plan, field) != value:
            raise PlanError(
                f"{what} was made for {field} {getattr(plan, field)!r}, and this is {value!r}.",
                fix="Choose a level, or make a plan for this model, device and precision.",
            )
    calibration = inputs.calibration
    if plan.calibration != calibration and (plan.calibration is not None or plan.has_integer_forms):
        made = f"made with the calibration {plan.calibration}" if plan.calibration else "names no calibration"
        weights = "--precision w8a8" if inputs.precision == "w8a8" else "--scales stepped"
        given = f"the calibration {calibration} is given" if calibration else "none is given"
        raise PlanError(
            f"{what} {'was ' if plan.calibration else ''}{made}, and {given}.",
            fix="Give the calibration of the plan with --calibration FILE, or make a plan with this one: "
            f"`heterollm plan MODEL {weights} --calibration FILE -o PLAN`.",
        )
    check_shadows(plan, inputs.calibration_file)
    return plan
