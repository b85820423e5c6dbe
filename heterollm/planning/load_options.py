"""What a user may ask for when a model is loaded: checked, and turned into a context and a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, get_args

from heterollm.base import OptionError, PlanError
from heterollm.kernels.ops import OpSpec, Precision
from heterollm.model import ModelConfig
from heterollm.solver import (
    LENGTH_POLICIES,
    LEVELS,
    SOLVED_LEVELS,
    LengthCosts,
    LengthPolicy,
    Plan,
    level_plan,
    model_shape,
)

__all__ = [
    "check_length_policy",
    "check_options",
    "choose_context",
    "choose_plan",
]

DEFAULT_CONTEXT: Final = 4096
CHUNK_LENGTH: Final = 512
"""Longest pass where no NPU graph says otherwise: enough that the weights are read rarely."""


def check_options(
    model: object, plan: object, precision: object, group_size: object, symmetric: object
) -> None:
    """Refuse what cannot be loaded whatever the checkpoint holds.

    Raises:
        OptionError: An argument is not legal; the message names it.
    """
    if not isinstance(model, str | Path) or not str(model):
        raise OptionError(f"The model is {model!r}.", fix="Give a folder or a hub name.")
    if not isinstance(plan, str | Path | Plan):
        raise OptionError(f"The plan is {plan!r}.", fix="Give a level, the path of a plan, or a plan.")
    if precision not in get_args(Precision):
        raise OptionError(
            f"There is no precision {precision!r}.", fix=f"Choose {' or '.join(get_args(Precision))}."
        )
    if type(group_size) is not int or group_size not in (32, 64, 128):
        raise OptionError(f"group_size is {group_size!r}.", fix="Choose 32, 64 or 128.")
    if not isinstance(symmetric, bool):
        raise OptionError(f"symmetric is {symmetric!r}.", fix="Choose True or False.")


def check_length_policy(policy: object) -> None:
    """Refuse what is no way to run lengths that the NPU has no graph for.

    Raises:
        OptionError: It is none.
    """
    if policy not in LENGTH_POLICIES:
        raise OptionError(
            f"There is no length policy {policy!r:.80}.", fix=f"Choose among {', '.join(LENGTH_POLICIES)}."
        )


def choose_context(config: ModelConfig, context: int | None) -> int:
    """Return the positions of a session; by default the model's limit, at most 4096.

    Raises:
        OptionError: It is outside what the model was made for.
    """
    if context is None:
        return min(config.max_positions, DEFAULT_CONTEXT)
    if type(context) is not int:
        raise OptionError(f"context is {context!r}, but must be a whole number of positions.")
    if not 1 <= context <= config.max_positions:
        raise OptionError(
            f"A context of {context} is outside what the model was made for, 1 to {config.max_positions}."
        )
    return context


def choose_plan(
    plan: str | Path | Plan,
    specs: Sequence[OpSpec],
    *,
    device: str,
    standard_lengths: Sequence[int],
    precision: Precision,
    context: int,
    solve: Callable[[str], Plan | None] = lambda _level: None,
    length_policy: LengthPolicy = "padding",
    length_costs: Callable[[], LengthCosts | None] = lambda: None,
) -> Plan:
    """Return the plan to run: the given one, one from a file, that of a level, or the solver's.

    Args:
        plan: A plan, a level, ``tensor`` or ``block`` (the solver's, from the device's profile), ``auto``
            (the better of the two, or ``gpu`` as long as the device has no profile), or a plan file.
        specs: The model's groups.
        device: Name of the device that runs it.
        standard_lengths: Lengths of its NPU graphs; empty without an NPU.
        precision: Precision of the linears.
        context: Positions of a session.
        solve: Returns the solver's plan of a level or of ``auto``; None where the device has no profile.
        length_policy: How ``npu`` and ``layer`` run lengths that the NPU has no graph for.
        length_costs: Returns what the policy ``auto`` goes by; None where the device has no profile.

    Raises:
        OptionError: It is neither a level nor a file, or the level or the policy needs an NPU or a profile.
        PlanError: The plan is damaged, or made for another model, device or precision.
    """
    if isinstance(plan, Plan):
        return _checked(plan, "The plan", specs, device, precision)
    if isinstance(plan, str) and plan in ("auto", *SOLVED_LEVELS):
        solved = solve(plan)
        if solved is not None:
            return solved
        if plan != "auto":
            raise OptionError(
                f"Plan level {plan!r} needs a profile of the device {device!r} with these threads.",
                fix=f"Run `heterollm profile --device {device}` with this model first.",
            )
        plan = "gpu"
    if plan in LEVELS:
        return level_plan(
            plan,
            specs,
            device=device,
            precision=precision,
            standard_lengths=standard_lengths,
            chunk_length=min(context, CHUNK_LENGTH if plan == "gpu" else max(standard_lengths, default=1)),
            length_policy="padding" if plan == "gpu" else length_policy,
            length_costs=length_costs() if length_policy == "auto" else None,
        )
    path = Path(plan)
    try:
        found = path.is_file()
    except OSError:  # such as a name that is too long
        found = False
    if not found:
        raise OptionError(
            f"{str(plan)!r:.200} is neither a plan level nor a plan file.",
            fix=f"Choose auto, {', '.join((*LEVELS, *SOLVED_LEVELS))}, or the path of a plan.",
        )
    return _checked(Plan.load(path), str(path), specs, device, precision)


def _checked(plan: Plan, what: str, specs: Sequence[OpSpec], device: str, precision: str) -> Plan:
    wanted = {"shape": model_shape(specs), "device": device, "precision": precision}
    for field, value in wanted.items():
        stated = getattr(plan, field)
        if stated != value:
            raise PlanError(
                f"{what} was made for {field} {stated!r}, and this is {value!r}.",
                fix="Choose a level, or make a plan for this model, device and precision.",
            )
    return plan
