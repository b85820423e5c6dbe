"""The inputs of a plan, and the two readers that make them for a device that is here or elsewhere.

The third reader is that of simulations, :func:`heterollm.simulate.inputs.inputs_of_simulation`.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
from msgspec import structs

from heterollm.base import ProfileError
from heterollm.engine import Sync
from heterollm.kernels.ops import Group, OpSpec, Precision
from heterollm.model import ModelConfig, expert_specs, op_specs
from heterollm.planning.calibrated import calibrated_shadows, calibration_key
from heterollm.planning.load_options import LoadOptions
from heterollm.planning.techniques.registry import Evidence, calibrated_evidence
from heterollm.solver import SOLVED_LEVELS, LengthPolicy, Plan, PlanRequest, ShadowChannels

if TYPE_CHECKING:
    from heterollm.kernels.device import Device
    from heterollm.planning.profiled_model import ProfiledModel
    from heterollm.profiler.records import Profile

logger = logging.getLogger(__name__)

ProfileSource: TypeAlias = "Callable[[], Profile | None]"
"""Returns a device's profile; None if it has none."""


@dataclass(frozen=True)
class PlanInputs:
    """All that a plan follows from.

    Args:
        config: The model.
        specs: Every group of it but the experts of a mixture.
        precision: Precision of the linears.
        device: Name of the device, which need not be here.
        wanted: A plan, a plan file, a level, or ``auto``.
        request: Options of the plan, with the positions of a session.
        standard_lengths: Lengths of the device's NPU graphs; empty without an NPU.
        profile: The profile, which is read only for a plan that needs it.
        opened: The opened device, whose waits a plan by rule has; None for one that is not here.
        chosen: Why ``auto`` split the device's cores; empty if it did not.
        calibration: Identity of the calibration, whose ranges integer graphs need; None without one.
        calibration_file: Its file, with which a plan that has shadows is compared.
        shadows: Operators that get a shadow of outliers wherever the NPU computes them in integers.
        evidence: Heads, routing and the like, by the techniques that are asked for.
        length_policy: How ``npu`` and ``layer`` run lengths that the NPU has no graph for.
        sync: How the processors wait for each other, in place of the plan's strategy.
        longest: Longest pass of prompts; None for the default of the plan's level.
    """

    config: ModelConfig
    specs: tuple[OpSpec, ...]
    precision: Precision
    device: str
    wanted: str | Path | Plan
    request: PlanRequest
    standard_lengths: Sequence[int] = ()
    profile: ProfileSource = lambda: None
    opened: Device | None = None
    chosen: str = ""
    calibration: str | None = None
    calibration_file: str | Path | None = None
    shadows: Mapping[tuple[int, Group], ShadowChannels] = field(default_factory=dict)
    evidence: Evidence = field(default_factory=dict)
    length_policy: LengthPolicy = "padding"
    sync: Sync = "auto"
    longest: int | None = None

    @functools.cached_property
    def model(self) -> ProfiledModel | None:
        """The model on the profiled device; None without a profile."""
        # A late import: plans by rule need neither profile nor solver.
        from heterollm.planning.profiled_model import ProfiledModel

        profile = self.profile()
        if profile is None:
            return None
        return ProfiledModel(profile, self.config, self.specs, self.precision, self.calibration, self.shadows)

    @property
    def every_spec(self) -> tuple[OpSpec, ...]:
        """Every group of the model, and the experts of a mixture."""
        return (*self.specs, *expert_specs(self.config, self.specs))

    @property
    def given(self) -> dict[str, Any]:
        """Calibrated values on which the memory of techniques depends."""
        return {"shadow": {key: one.held for key, one in self.shadows.items()}}

    def profiled(self, what: str) -> ProfiledModel:
        """Return the model on the profiled device, which something needs.

        Raises:
            ProfileError: The device has no profile.
        """
        if self.model is not None:
            return self.model
        weights = next(spec.weight for spec in self.specs if spec.group != "head")
        kind = "" if self.precision == "w4a16" else f" --precision {self.precision}"
        kind += f" --group-size {weights.block}" if weights.block not in (0, 32) else ""
        raise ProfileError(
            f"{what} needs a profile of the device {self.device!r} with these threads, and there is none "
            "that can plan.",
            fix=f"Run `heterollm profile MODEL --device {self.device}{kind}` first.",
        )


def inputs_of_load(
    options: LoadOptions, config: ModelConfig, context: int, device: Device, *, chosen: str = ""
) -> PlanInputs:
    """Return the inputs of a load's plan; called on the engine thread.

    Args:
        options: Of the load.
        config: The model.
        context: Positions of a session.
        device: The opened device.
        chosen: Why ``auto`` split its cores.

    Raises:
        HeteroLLMError: The calibration cannot be read, or is not for this model or its techniques.
    """
    return _inputs(
        *(options, config, context, device.name, lambda: stored_profile(device, options.profile)),
        float_bits=32 if device.activation_dtype == np.float32 else 16,
        standard_lengths=device.standard_lengths,
        opened=device,
        chosen=chosen,
    )


def inputs_of_file(
    options: LoadOptions,
    config: ModelConfig,
    context: int,
    profile: Profile | None,
    *,
    device: str = "",
    standard_lengths: Sequence[int] = (),
) -> PlanInputs:
    """Return the inputs of a plan for a device that is not here, by a profile of it.

    Args:
        options: Of the load that is planned for.
        config: The model.
        context: Positions of a session.
        profile: The profile; None for plans by rule.
        device: Name of the device; by default that of the profile.
        standard_lengths: Lengths of the device's NPU graphs, for plans by rule.

    Raises:
        HeteroLLMError: As :func:`inputs_of_load`.
    """
    half = profile is None or profile.description.get("activation_dtype") == "float16"
    return _inputs(
        *(options, config, context, device or (profile.device if profile else ""), lambda: profile),
        float_bits=16 if half else 32,
        standard_lengths=standard_lengths,
    )


def _inputs(
    options: LoadOptions,
    config: ModelConfig,
    context: int,
    device: str,
    profile: ProfileSource,
    *,
    float_bits: Literal[16, 32],
    standard_lengths: Sequence[int],
    opened: Device | None = None,
    chosen: str = "",
) -> PlanInputs:
    weights, wanted = options.weights_calibration, options.plan
    request = structs.replace(options.request or PlanRequest(), context=context)
    if isinstance(wanted, str) and wanted in ("auto", *SOLVED_LEVELS):
        request = structs.replace(request, level=wanted)
    return PlanInputs(
        config,
        op_specs(
            *(config, options.precision, options.group_size, options.symmetric),
            float_bits=float_bits,
            scales=options.scales,
        ),
        options.precision,
        device,
        wanted,
        request,
        standard_lengths,
        profile,
        opened,
        chosen,
        calibration=calibration_key(weights),
        calibration_file=weights,
        shadows=calibrated_shadows(weights),
        evidence=calibrated_evidence(options.calibration, config, request),
        length_policy=options.length_policy,
        sync=options.sync,
    )


def stored_profile(device: Device, file: str | Path | None = None) -> Profile | None:
    """Return the profile of an opened device; None if it has none, or none that can plan yet.

    A first profile that was stopped, or that another process is still measuring, holds too few linear layers
    to predict others from at first. From then on it counts, whatever its last run did.

    Args:
        device: The device.
        file: A file in place of the device's own.

    Raises:
        ProfileError: The file is damaged, or of another device.
    """
    from heterollm.profiler.predict import checked, fitted_predictor
    from heterollm.profiler.records import Profile, profile_path

    described = device.description()
    if file is not None:
        return checked(Profile.load(Path(file), expected=described))
    path: Path = profile_path(device.name, device.fingerprint())
    if not path.exists():
        return None
    profile = checked(Profile.load(path, expected=described))
    if not any(run["finished"] for run in profile.runs.values()):
        try:
            fitted_predictor(profile)
        except ProfileError as error:
            logger.warning("The profile is unfinished, and plans cannot use it yet: %s", error)
            return None
    return profile
