"""Predicted times of the decode passes that check guesses."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from heterollm.planning.inputs import PlanInputs
    from heterollm.solver import Plan


def predicted_pass_s(inputs: PlanInputs, plan: Plan, longest: int) -> list[float] | None:
    """Return the predicted seconds of decode passes of 1 to ``longest`` tokens; None without predictions.

    Args:
        inputs: The model on its device.
        plan: Its plan.
        longest: Tokens of the longest pass.

    Raises:
        ProfileError: The profile is damaged.
    """
    model = inputs.model
    if model is None or (plan.uses_npu and not model.has_linears):
        return None
    found = [model.predict(plan, "decode", tokens) for tokens in range(1, longest + 1)]
    if model.missing or any(one is None for one in found):
        return None
    return [one.time_us / 1e6 for one in found if one is not None]
