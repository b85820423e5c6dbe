"""Solves a plan of a model on a profiled device, once for equal inputs."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec import structs

from heterollm.base import GIB, OptionError, ProfileError, Progress, silent
from heterollm.engine import HEAD_ROWS
from heterollm.kernels.ops import ffn_specs
from heterollm.planning.auto import Candidate, compared, predicted, rule_plans, weights_of, words
from heterollm.planning.kept import kept_plan, plan_path
from heterollm.planning.notes import plan_notes
from heterollm.planning.planned import Planned
from heterollm.planning.profiled_model import ProfiledModel
from heterollm.planning.techniques.llm_npu import (
    check_technique,
    faster_plan,
    llm_npu_plan,
    request_of_solver,
)
from heterollm.planning.techniques.npu_attention import missing_bytes
from heterollm.planning.techniques.registry import Evidence, with_techniques
from heterollm.solver import (
    BEST_TECHNIQUES,
    CHUNK_LENGTH,
    LLM_NPU,
    TECHNIQUE_OPTIONS,
    TECHNIQUES,
    Objective,
    PhaseSync,
    Plan,
    PlanRequest,
    Technique,
    best_strategy,
    default_chunk_length,
    model_shape,
    power_of,
    relative_time,
    with_shadows,
)

if TYPE_CHECKING:
    from heterollm.planning.lengths import LengthChoice
    from heterollm.solver import Solver

NO_EVIDENCE: Final[Evidence] = MappingProxyType({})


def solve_plan(
    model: ProfiledModel,
    request: PlanRequest,
    evidence: Evidence = NO_EVIDENCE,
    longest: int | None = None,
    report: Progress = silent,
) -> Planned:
    """Return the plan of a model by a profile; it is solved once for equal inputs, and kept.

    Args:
        model: The model on the profiled device.
        request: Options of the plan.
        evidence: Facts of the model, by the techniques that are asked for.
        longest: Longest pass that attention and experts are placed for; None for the plan's.
        report: Called with the plans solved and their number where techniques are compared.

    Raises:
        ProfileError: The profile lacks measurements that a plan, or the requested level, needs.
        OptionError: The request is not legal.
        PlanError: No processor can compute a group.
    """
    if BEST_TECHNIQUES in request.techniques:
        return _best_of_techniques(model, request, evidence, longest, report)
    calibrated, routed = model.calibration is not None, "experts" in evidence
    check_technique(request, model.precision, request.level, calibrated=calibrated, routed=routed)
    _check_level(model, request)
    every = solver_of(model, request)
    choice = _length_choice(model, request, every)
    solver = every
    if choice is not None and every.limits is not None:
        limits = replace(every.limits, standard_lengths=choice.chosen.lengths)
        solver = replace(every, limits=limits)
    histogram = request.histogram
    inputs = {
        "specs": model.specs,
        "shape": model.shape,
        "precision": model.precision,
        "calibration": model.calibration,
        "head rows": HEAD_ROWS,
        "chunk length": CHUNK_LENGTH,
        "request": structs.replace(request, histogram=None),
        "memory": (model.profile.addressable_bytes, model.profile.domain_bytes),
        "evidence": hashlib.sha256(msgspec.json.encode(dict(evidence), order="deterministic")).hexdigest(),
        "histogram": None if histogram is None else sorted(histogram.items()),
    }
    if model.shadows:
        inputs["shadows"] = sorted(model.shadows.items())
    if longest is not None:
        inputs["longest"] = longest

    def add(plan: Plan) -> Plan:
        chunk_length = min(plan.chunk_length, longest or plan.chunk_length)
        return with_techniques(model, structs.replace(plan, chunk_length=chunk_length), request, evidence)

    plan = kept_plan(plan_path(model.profile, inputs), lambda: _with_room(model, request, solver, add))
    notes = plan_notes(model, plan, request)
    if request.level == "auto":
        notes = (words(_candidates(model, request, plan, solver)), *notes)
    return Planned(plan, notes, model, choice, evidence)


def _best_of_techniques(
    model: ProfiledModel, request: PlanRequest, evidence: Evidence, longest: int | None, report: Progress
) -> Planned:
    """Return the plan that is predicted to be fastest: the plain one, or one with techniques it can have."""
    weights = weights_of(request, () if model.limits is None else model.limits.standard_lengths)
    plain = solve_plan(model, structs.replace(request, techniques=()), NO_EVIDENCE, longest)
    plans: dict[tuple[Technique, ...], Planned] = {(): plain}
    notes: list[str] = []
    counts = range(1, len(TECHNIQUES) + 1)
    every = [names for count in counts for names in itertools.combinations(TECHNIQUES, count)]
    unknown: set[Technique] = set()
    for done, names in enumerate(every, 1):
        report("Planning", done, len(every) + 1)
        if unknown.intersection(names):
            continue
        own = {name: found for name, found in evidence.items() if TECHNIQUE_OPTIONS[name][0] in names}
        try:
            found = solve_plan(model, structs.replace(request, techniques=names), own, longest)
        except OptionError:  # the weights, the calibration or the level cannot have them
            continue
        except ProfileError as error:
            notes.append(f"{' and '.join(names)}: not compared. {error.message}")
            unknown.update(names)
        else:
            plans[names] = found
    candidates = {names: predicted(model, one.plan, weights) for names, one in plans.items()}
    if not candidates[()].known:
        return replace(plain, notes=(*notes, *plain.notes))
    before_us = candidates[()].times_us
    times = {
        names: relative_time(weights, before_us, one.times_us.__getitem__)
        for names, one in candidates.items()
    }
    fastest = min(times, key=times.__getitem__)
    shown = ", ".join(f"{' and '.join(names) or 'none'} {time:.2f}" for names, time in times.items())
    chosen = f"Techniques: {' and '.join(fastest) or 'none'}. Predicted times of prompts and tokens: {shown}."
    # The words of level auto stay first, where the choice of threads replaces them.
    said, first = plans[fastest].notes, int(request.level == "auto")
    return replace(plans[fastest], notes=(*said[:first], chosen, *notes, *said[first:]))


def _candidates(
    model: ProfiledModel, request: PlanRequest, plan: Plan, solver: Solver
) -> list[tuple[float, Candidate]]:
    """Return the solver's plan and those of the rule levels with relative times, the best first."""
    lengths = () if model.limits is None else model.limits.standard_lengths
    weights = weights_of(request, lengths)
    plans = [plan, *(one for one in rule_plans(model, request, solver) if one.level != plan.level)]
    return compared([predicted(model, one, weights) for one in plans], weights)


def solver_of(model: ProfiledModel, request: PlanRequest) -> Solver:
    """Return the solver of a model: all standard lengths, passes as long as the device allows.

    Raises:
        OptionError: The request is not legal.
    """
    from heterollm.solver import Budget, Solver

    lengths = () if model.limits is None else model.limits.standard_lengths
    return Solver(
        model.specs,
        model.limits,
        model.costs,
        Objective(
            energy_weight=request.energy_weight,
            power=power_of(model.profile),
            gpu_share=request.gpu_share,
            forbidden=request.forbidden,
            errors=model.costs.errors,
        ),
        Budget(
            model.profile.addressable_bytes if request.npu_gib is None else int(request.npu_gib * GIB),
            model.profile.graph_memory,
        ),
        chunk_length=default_chunk_length(lengths, request.context),
        head_rows=HEAD_ROWS,
        level="tensor" if request.level == "tensor" or not model.has_ffn else "block",
    )


def _with_room(
    model: ProfiledModel, request: PlanRequest, solver: Solver, add: Callable[[Plan], Plan]
) -> Plan:
    """Return a plan whose linear layers leave attention on the NPU some memory, if that is faster."""
    plan, limit = _fitting(model, request, solver, add), solver.budget.npu_bytes
    missing = missing_bytes(model, plan, request)
    if not missing or limit is None:
        return plan
    budget = replace(solver.budget, npu_bytes=max(0, limit - missing))
    other = _fitting(model, request, replace(solver, budget=budget), add)
    weights = weights_of(request, () if model.limits is None else model.limits.standard_lengths)
    return compared([predicted(model, one, weights) for one in (plan, other)], weights)[0][1].plan


def _fitting(model: ProfiledModel, request: PlanRequest, solver: Solver, add: Callable[[Plan], Plan]) -> Plan:
    """Return a plan whose contexts fit the NPU's process domains.

    The solver adds sizes up. Where contexts then leave too much of a domain empty, it gets a budget that is
    less by their largest one for each domain but one: what finds no place in any domain exceeds that.
    """
    plan = _solve(model, request, solver, add)
    limit, domain_bytes, largest = solver.budget.npu_bytes, model.profile.domain_bytes, 0
    further = (limit - 1) // domain_bytes if limit and domain_bytes else 0
    while limit and further and not model.fits(plan, solver.budget):
        if (found := max(model.context_sizes(plan))) <= largest:
            break  # a technique took more than the budget
        largest = found
        budget = replace(solver.budget, npu_bytes=max(0, limit - further * largest))
        plan = _solve(model, request, replace(solver, budget=budget), add)
    return plan


def _solve(model: ProfiledModel, request: PlanRequest, solver: Solver, add: Callable[[Plan], Plan]) -> Plan:
    best, prompts = best_strategy(model.profile), _prompts(model, request)
    asked = request_of_solver(request)
    base = _base(model, asked, solver, prompts)
    plan, level = add(base), base.level
    if plan.schedule is not None and any(record.is_active for record in plan.techniques):
        # Techniques may take the time that other chunks were to fill.
        one_by_one = add(_base(model, structs.replace(asked, in_flight=1), solver, prompts))
        plan = faster_plan(model, one_by_one, plan, prompts)
    if request.level == "auto":
        plan = _candidates(model, request, plan, solver)[0][1].plan
        level = "tensor" if plan.level in ("block", "fused") and not plan.has_ffn else plan.level
        level = level if plan.uses_npu else "gpu"
    return structs.replace(
        with_shadows(plan, model.shadows),
        level=level,
        sync=PhaseSync(best, best) if best is not None and plan.uses_npu else PhaseSync(),
        request=request,
        calibration=model.calibration,
        shape=model_shape(model.every_spec),
        threads=model.threads,
    )


def _base(model: ProfiledModel, request: PlanRequest, solver: Solver, prompts: Mapping[int, float]) -> Plan:
    """Return the plan that attention and experts are added to."""
    if LLM_NPU not in request.techniques or model.limits is None:
        return _solved(model, request, solver, prompts)
    plan = llm_npu_plan(model, request, prompts, solver.budget)
    if request.level == "auto":
        return plan
    solved = _solved(model, request, solver, prompts)
    fits = model.fits(plan, solver.budget)
    return faster_plan(model, solved, plan, prompts) if fits else solved


def _solved(model: ProfiledModel, request: PlanRequest, solver: Solver, prompts: Mapping[int, float]) -> Plan:
    """Return the solver's plan: at levels fused and auto that of level fused where it is faster."""
    plan = _solved_at(solver, model, request, prompts)
    if request.level not in ("fused", "auto") or not model.has_fused or solver.limits is None:
        return plan
    weights = weights_of(request, solver.limits.standard_lengths)
    fused = _solved_at(replace(solver, level="fused"), model, request, prompts)
    mixed = (_of_phases(first, second) for first, second in ((plan, fused), (fused, plan)))
    fitting = (one for one in mixed if model.fits(one, solver.budget))
    plans = [predicted(model, one, weights) for one in (plan, fused, *fitting)]
    return compared(plans, weights)[0][1].plan


def _of_phases(prefill: Plan, decode: Plan) -> Plan:
    """Return a plan with the prefill of one plan and the decode of another."""
    entries = tuple(
        entry
        for plan, phase in ((prefill, "prefill"), (decode, "decode"))
        for entry in plan.entries
        if entry.phase == phase
    )
    return structs.replace(prefill, level="fused", entries=entries, slices=())


def _solved_at(
    solver: Solver, model: ProfiledModel, request: PlanRequest, prompts: Mapping[int, float]
) -> Plan:
    """Return the plan of a solver's level."""
    from heterollm.solver import plan_chunks, plan_flights, with_norms

    labels, weights = {"device": model.profile.device, "precision": model.precision}, request.histogram
    plan, slices = solver.solve(**labels, weights=weights)
    if max(prompts, default=0) > solver.chunk_length:
        plan, slices = plan_chunks(solver, plan, slices, prompts, model.costs.at, weights)
    if solver.level == "fused":
        normed = with_norms(plan, model.specs)
        plan = normed if model.fits(normed, solver.budget) else plan
    if request.in_flight != 1 and plan.uses_npu:
        plan = plan_flights(solver, plan, slices, request.in_flight, prompts, model.costs.at, weights)
    return plan


def _length_choice(model: ProfiledModel, request: PlanRequest, solver: Solver) -> LengthChoice | None:
    """Return the standard lengths that are worth building; None without a build budget or an NPU."""
    from heterollm.planning.lengths import BuildCosts, choose

    budget_s, histogram = request.build_budget_s, request.histogram
    if budget_s is None or model.limits is None:
        return None
    if histogram is None:
        raise OptionError(
            "Standard lengths are chosen for the prompts that come, and none were named.",
            fix="Name them with --histogram, such as 1:200,64:10,256:3.",
        )
    builds = BuildCosts.of(model.profile, free=not model.profile.graphs_by_length)
    labels = {"device": model.profile.device, "precision": model.precision}
    return choose(solver, histogram, builds, budget_s * 1e6, **labels)


def _prompts(model: ProfiledModel, request: PlanRequest) -> dict[int, float]:
    """Return the weights of the prompts that the chunk length is chosen for."""
    if request.histogram is None and model.limits is None:
        return {}
    lengths = () if model.limits is None else model.limits.standard_lengths
    return {tokens: weight for tokens, weight in weights_of(request, lengths).items() if tokens > 1}


def _check_level(model: ProfiledModel, request: PlanRequest) -> None:
    """Refuse a level requested by name that would give the plan of another level.

    Raises:
        OptionError: The model has no operator that the level places.
        ProfileError: The profile lacks measurements that the level needs.
    """
    if request.level == "auto" or model.limits is None:
        return
    if not model.has_linears:
        raise model.unmeasured("linear layers")
    if request.level in ("block", "fused") and not ffn_specs(model.specs):
        raise OptionError(
            f"The model's layers have no feed-forward network that level {request.level} can place as one "
            "operator.",
            fix="Choose --plan tensor.",
        )
    if request.level in ("block", "fused") and not model.has_ffn:
        raise model.unmeasured("feed-forward networks")
    if request.level == "fused" and not model.has_fused:
        raise OptionError(
            f"Level fused can fuse nothing of a layer: {model.unfused}.",
            fix="Choose --plan block.",
        )
