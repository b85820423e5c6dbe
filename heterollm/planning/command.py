"""What ``heterollm plan`` does: finds the profile, reads the model's shape, and makes the planner."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from heterollm.base import ProfileError
from heterollm.kernels.open import open_device
from heterollm.kernels.ops import Precision
from heterollm.model import KNOWN_MODELS, ModelConfig, checkpoint_folder, op_specs
from heterollm.planning.load_options import check_options, choose_context
from heterollm.planning.planner import Planner, PlanRequest, stored_profile
from heterollm.profiler.records import Profile

__all__ = ["no_profile", "solve_for"]


def solve_for(
    model: str | Path,
    *,
    device: str = "auto",
    profile: Path | None = None,
    precision: Precision = "w4a16",
    group_size: int = 32,
    symmetric: bool = True,
    context: int | None = None,
    gpu_threads: int | None = None,
    npu_threads: int | None = None,
    request: PlanRequest | None = None,
) -> Planner:
    """Return the planner of a model on a profiled device.

    Args:
        model: A local folder or a hub name, of which only the configuration is read, or the name of a known
            model.
        device: The device whose profile is used, if no file is given.
        profile: A profile's file; the device need not be here.
        precision: Precision of the linears.
        group_size: Weights that share a scale.
        symmetric: Whether 4-bit codes have no zero point of their own.
        context: Positions of a session.
        gpu_threads: Threads of the OpenCL part.
        npu_threads: Threads of the NPU part.
        request: What else the plan is asked to be.

    Raises:
        ProfileError: There is no profile, or it is damaged.
        HeteroLLMError: The checkpoint, device or an option is not usable.
    """
    check_options(model, "auto", precision, group_size, symmetric)
    known = KNOWN_MODELS.get(str(model).lower())
    config = ModelConfig.from_folder(checkpoint_folder(model)) if known is None else known.config
    if profile is not None:
        found: Profile | None = Profile.load(profile)
    else:
        opened = open_device(device, gpu_threads=gpu_threads, npu_threads=npu_threads)
        found = stored_profile(opened)
        if found is None:
            raise no_profile(opened.name, model, precision, group_size)
    assert found is not None
    half = found.description.get("activation_dtype") == "float16"
    specs = op_specs(config, precision, group_size, symmetric, float_bits=16 if half else 32)
    asked = replace(request or PlanRequest(), context=choose_context(config, context))
    return Planner(found, config, specs, precision, asked)


def no_profile(
    device: str, model: str | Path, precision: Precision = "w4a16", group_size: int = 32
) -> ProfileError:
    """Return the error of a device that was never profiled, for weights of one kind."""
    kind = "" if precision == "w4a16" else f" --precision {precision}"
    kind += "" if group_size == 32 else f" --group-size {group_size}"
    return ProfileError(
        f"The device {device!r} has no profile with these threads, and a plan needs one.",
        fix=f"Run `heterollm profile --device {device} --model {model}{kind}`.",
    )
