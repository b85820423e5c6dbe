"""Chooses the plan of a load: a given one, one from a file, that of a level, or the solver's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from msgspec import structs

from heterollm.base import OptionError, PlanError
from heterollm.kernels.ops import Group, OpSpec, Precision
from heterollm.model import ModelConfig, expert_specs
from heterollm.planning.additions import addition_notes, calibrated_parts, with_additions
from heterollm.planning.calibrated import calibrated_shadows, calibration_key, check_shadows
from heterollm.planning.experts import drop_notes
from heterollm.planning.load_options import CHUNK_LENGTH, LoadOptions
from heterollm.planning.passes import shadows_under
from heterollm.solver import (
    LEVELS,
    SOLVED_LEVELS,
    LengthCosts,
    LengthPolicy,
    PhaseSync,
    Plan,
    PlanRequest,
    level_plan,
    model_shape,
    with_shadows,
)

if TYPE_CHECKING:
    from heterollm.kernels.device import Device
    from heterollm.kernels.gpu import Strategy
    from heterollm.planning.profiled_model import ProfiledModel
    from heterollm.profiler.records import Profile

UNPROFILED: Final = (
    "auto: gpu, since {} has no profile with these threads; `--profile quick` measures it first, in about a "
    "minute, and `heterollm profile MODEL` in more detail"
)


@dataclass(frozen=True, slots=True)
class PlanSources:
    """Sources of plans and times that need a profile, each asked only when it is needed.

    Args:
        solve: Returns the solver's plan of a level or of ``auto``; None where the device has no profile.
        length_costs: Returns the predicted times for the policy ``auto``; None where the device has no
            profile.
        sync: Returns how the processors wait under a level that follows a rule.
    """

    solve: Callable[[str], Plan | None] = lambda _level: None
    length_costs: Callable[[], LengthCosts | None] = lambda: None
    sync: Callable[[], PhaseSync] = PhaseSync


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """The device that a plan is for, which need not be here.

    Args:
        name: Its name.
        standard_lengths: Lengths of its NPU graphs; empty without an NPU.
        profile: Returns its profile; None if it has none.
        sync: Returns how its processors wait, with the best strategy of the profile or None.
        chosen: Why ``auto`` split the cores as they are; empty if it did not choose.
    """

    name: str
    standard_lengths: Sequence[int]
    profile: Callable[[], Profile | None]
    sync: Callable[[Strategy | None], PhaseSync] = lambda _best: PhaseSync()
    chosen: str = ""

    @classmethod
    def of(cls, device: Device, chosen: str = "", profile: str | Path | None = None) -> PlanTarget:
        """Return an opened device, why ``auto`` split its cores, and a profile in place of its own."""
        # A late import: rule levels need neither profile nor solver.
        from heterollm.engine import default_sync
        from heterollm.planning.planner import stored_profile

        return cls(
            device.name,
            device.standard_lengths,
            lambda: stored_profile(device, profile),
            lambda best: default_sync(device, best),
            chosen,
        )


def plan_for(
    options: LoadOptions, device: PlanTarget, config: ModelConfig, specs: tuple[OpSpec, ...], context: int
) -> tuple[Plan, tuple[str, ...]]:
    """Return the plan of a load, and notes on what the profile lacks; called on the engine thread.

    Args:
        options: Of the load.
        device: The device.
        config: The model.
        specs: Every group of it.
        context: Positions of a session.

    Raises:
        OptionError: As :func:`choose_plan`, or the request is not legal.
        PlanError: As :func:`choose_plan` and :func:`check_shadows`.
        ProfileError: The profile is damaged, or lacks measurements that the level needs.
    """
    # A late import: rule levels need neither profile nor solver.
    from heterollm.planning.planner import solve_plan
    from heterollm.planning.profiled_model import ProfiledModel
    from heterollm.solver import best_strategy

    notes: list[str] = []
    calibration = calibration_key(options.weights_calibration)
    shadows = shadows_under(options.request, calibrated_shadows(options.weights_calibration))

    def profiled() -> ProfiledModel | None:
        profile = device.profile()
        if profile is None:
            return None
        return ProfiledModel(profile, config, specs, options.precision, calibration, shadows)

    def solve(level: str) -> Plan | None:
        model = profiled()
        request = structs.replace(options.request or PlanRequest(), context=context, level=level)
        if model is None:
            if request.passes:
                raise no_profile(device.name, f"The pass {request.passes[0]}")
            if level == "auto":
                notes.append(UNPROFILED.format(device.name))
            return None
        solved = solve_plan(model, request, *calibrated_parts(options.calibration, config, request))
        if choice := device.chosen or solved.choice:
            notes.append(choice)
        notes.extend(solved.notes)
        return solved.plan

    def length_costs() -> LengthCosts | None:
        model = profiled()
        return None if model is None else model.npu_us

    def sync() -> PhaseSync:
        profile = device.profile()
        return device.sync(None if profile is None else best_strategy(profile))

    plan = choose_plan(
        options.plan,
        specs,
        experts=expert_specs(config, specs),
        device=device.name,
        standard_lengths=device.standard_lengths,
        precision=options.precision,
        context=context,
        length_policy=options.length_policy,
        sources=PlanSources(solve, length_costs, sync),
        calibration=calibration,
        shadows=shadows,
    )
    check_shadows(plan, options.weights_calibration)
    if options.plan in LEVELS and options.request is not None:
        heads, routing = calibrated_parts(options.calibration, config, options.request)
        if heads is not None or routing is not None:
            model = profiled()
            if model is None:
                raise no_profile(device.name, f"The pass {options.request.passes[0]}")
            request = structs.replace(options.request, context=context)
            plan = with_additions(model, plan, request, heads, routing)
            notes.extend(addition_notes(model, plan, request))
    notes.extend(note for note in drop_notes(plan) if note not in notes)
    if options.sync != "auto":
        plan = structs.replace(plan, sync=PhaseSync(options.sync, options.sync))
    return plan, tuple(notes)


def no_profile(device: str, what: str) -> OptionError:
    """Return the error of a plan that needs the profile of a device."""
    return OptionError(
        f"{what} needs a profile of the device {device!r} with these threads.",
        fix=f"Run `heterollm profile MODEL --device {device}` first.",
    )


def choose_plan(
    plan: str | Path | Plan,
    specs: Sequence[OpSpec],
    *,
    experts: Sequence[OpSpec] = (),
    device: str,
    standard_lengths: Sequence[int],
    precision: Precision,
    context: int,
    length_policy: LengthPolicy = "padding",
    sources: PlanSources | None = None,
    calibration: str | None = None,
    shadows: Collection[tuple[int, Group]] = (),
) -> Plan:
    """Return the plan to run: the given one, one from a file, that of a level, or the solver's.

    Args:
        plan: A plan, a level, ``tensor`` or ``block`` (the solver's, from the device's profile), ``auto``
            (the fastest by the profile, or ``gpu`` as long as the device has none), or a plan file.
        specs: The model's groups.
        experts: The experts of each layer of a mixture.
        device: Name of the device that runs it.
        standard_lengths: Lengths of its NPU graphs; empty without an NPU.
        precision: Precision of the linears.
        context: Positions of a session.
        length_policy: How ``npu`` and ``layer`` run lengths that the NPU has no graph for.
        sources: Where solved plans, costs of lengths and ways of waiting come from.
        calibration: Identity of the calibration; None without one.
        shadows: Operators to which the calibration gives a shadow of outliers, in plans of a level.

    Raises:
        OptionError: It is neither a level nor a file, or the level or the policy needs an NPU or a profile.
        PlanError: The plan is damaged, or made for another model, device, precision or calibration.
    """
    others, shape = sources or PlanSources(), model_shape((*specs, *experts))
    if isinstance(plan, Plan):
        return _checked(plan, "The plan", shape, device, precision, calibration)
    if isinstance(plan, str) and plan in ("auto", *SOLVED_LEVELS):
        solved = others.solve(plan)
        if solved is not None:
            return solved
        if plan != "auto":
            raise no_profile(device, f"Plan level {plan!r}")
        plan = "gpu"
    if plan in LEVELS:
        found = level_plan(
            plan,
            specs,
            device=device,
            precision=precision,
            standard_lengths=standard_lengths,
            chunk_length=min(context, CHUNK_LENGTH if plan == "gpu" else max(standard_lengths, default=1)),
            length_policy="padding" if plan == "gpu" else length_policy,
            length_costs=others.length_costs() if length_policy == "auto" else None,
        )
        found = structs.replace(with_shadows(found, shadows), shape=shape)
        if not found.uses_npu:
            return found
        key = calibration if found.has_integer_forms else None
        return structs.replace(found, sync=others.sync(), calibration=key)
    return _checked(read_plan(plan), str(plan), shape, device, precision, calibration)


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


def _checked(plan: Plan, what: str, shape: str, device: str, precision: str, calibration: str | None) -> Plan:
    wanted = {"shape": shape, "device": device, "precision": precision}
    for field, value in wanted.items():
        stated = getattr(plan, field)
        if stated != value:
            raise PlanError(
                f"{what} was made for {field} {stated!r}, and this is {value!r}.",
                fix="Choose a level, or make a plan for this model, device and precision.",
            )
    if plan.calibration != calibration and (plan.calibration is not None or plan.has_integer_forms):
        made = f"made with the calibration {plan.calibration}" if plan.calibration else "names no calibration"
        weights = "--precision w8a8" if precision == "w8a8" else "--scales stepped"
        given = f"the calibration {calibration} is given" if calibration else "none is given"
        raise PlanError(
            f"{what} {'was ' if plan.calibration else ''}{made}, and {given}.",
            fix="Give the calibration of the plan with --calibration FILE, or make a plan with this one: "
            f"`heterollm plan MODEL {weights} --calibration FILE -o PLAN`.",
        )
    return plan
