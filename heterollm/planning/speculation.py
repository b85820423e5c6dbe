"""Predicted times of the decode passes that check guesses."""

from __future__ import annotations

from collections.abc import Sequence

from heterollm.kernels.ops import OpSpec
from heterollm.model import ModelConfig
from heterollm.planning.calibrated import calibrated_shadows, calibration_key
from heterollm.planning.choice import PlanTarget
from heterollm.planning.load_options import LoadOptions
from heterollm.planning.passes import shadows_under
from heterollm.solver import Plan


def predicted_pass_s(
    options: LoadOptions,
    device: PlanTarget,
    config: ModelConfig,
    specs: Sequence[OpSpec],
    plan: Plan,
    longest: int,
) -> list[float] | None:
    """Return the predicted seconds of decode passes of 1 to ``longest`` tokens; None without predictions.

    Args:
        options: Of the load.
        device: The device.
        config: The model.
        specs: Every group of it.
        plan: Its plan.
        longest: Tokens of the longest pass.

    Raises:
        ProfileError: The profile is damaged.
    """
    # A late import: a load without speculative decoding needs no times.
    from heterollm.planning.profiled_model import ProfiledModel

    profile = device.profile()
    if profile is None:
        return None
    calibration = calibration_key(options.weights_calibration)
    shadows = shadows_under(options.request, calibrated_shadows(options.weights_calibration))
    model = ProfiledModel(profile, config, tuple(specs), options.precision, calibration, shadows)
    if not model.has_linears and plan.uses_npu:
        return None
    found = [model.predict(plan, "decode", tokens) for tokens in range(1, longest + 1)]
    if model.missing or any(one is None for one in found):
        return None
    return [one.time_us / 1e6 for one in found if one is not None]
