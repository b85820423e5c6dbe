"""Solves a plan without loading a model: finds the profile, and reads the model's shape."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from msgspec.structs import replace

from heterollm.base import ProfileError
from heterollm.engine import fitting_need
from heterollm.kernels.open import open_device
from heterollm.kernels.ops import Precision
from heterollm.model import find_model, op_specs
from heterollm.planning.additions import calibrated_parts
from heterollm.planning.calibrated import calibrated_shadows, calibration_key
from heterollm.planning.core_split import CoreSplit
from heterollm.planning.load_options import LoadOptions, choose_context
from heterollm.planning.passes import shadows_under
from heterollm.planning.planner import Solved, solve_plan, stored_profile
from heterollm.planning.profiled_model import ProfiledModel
from heterollm.planning.unused_options import check_source_effects
from heterollm.profiler.predict import checked
from heterollm.profiler.records import Profile
from heterollm.solver import PlanRequest


def solve_for(model: str | Path, options: LoadOptions, profile: Path | None = None) -> Solved:
    """Return the solver's plan of a model on a profiled device.

    Args:
        model: A local folder or a hub name, of which only the configuration is read, or the name of a known
            model.
        options: Options of the load, whose request holds those of the plan.
        profile: A profile's file, in place of that of the device; the device need not be here.

    Raises:
        ProfileError: There is no profile, or it is damaged.
        HeteroLLMError: The checkpoint, device or an option is not usable.
    """
    config = find_model(model, closest=False).config
    check_source_effects(options, config)
    context = choose_context(config, options.context)
    cores = CoreSplit(options, config, context)
    reason, opened = "", None
    if profile is not None:
        found: Profile | None = checked(Profile.load(profile))
    else:
        opened = open_device(
            options.device,
            gpu_threads=options.gpu_threads,
            npu_threads=options.npu_threads,
            power=options.power,
            choose_threads=cores,
        )
        reason = cores.reason_for(opened)
        found = stored_profile(opened)
        if found is None:
            raise no_profile(opened.name, model, options.precision, options.group_size)
    assert found is not None
    half = found.description.get("activation_dtype") == "float16"
    specs = op_specs(
        config,
        options.precision,
        options.group_size,
        options.symmetric,
        float_bits=16 if half else 32,
        scales=options.scales,
    )
    asked = replace(options.request or PlanRequest(), context=context)
    calibration = calibration_key(options.weights_calibration)
    heads, routing = calibrated_parts(options.calibration, config, options.request)
    shadows = shadows_under(options.request, calibrated_shadows(options.weights_calibration))
    model_of_profile = ProfiledModel(found, config, specs, options.precision, calibration, shadows)
    solved = solve_plan(model_of_profile, asked, heads, routing)
    if opened is not None:
        shadow_channels = {key: one.held for key, one in shadows.items()}
        fitting_need(opened, config, specs, solved.plan, context, hot_channels=shadow_channels)
    return dataclasses.replace(solved, choice=reason) if reason else solved


def no_profile(
    device: str, model: str | Path, precision: Precision = "w4a16", group_size: int = 32
) -> ProfileError:
    """Return the error of a device that was never profiled, for weights of one kind."""
    kind = "" if precision == "w4a16" else f" --precision {precision}"
    kind += "" if group_size == 32 else f" --group-size {group_size}"
    return ProfileError(
        f"The device {device!r} has no profile with these threads that can plan.",
        fix=f"Run `heterollm profile {model} --device {device}{kind}`.",
    )
