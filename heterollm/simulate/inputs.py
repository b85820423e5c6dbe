"""The inputs of a simulation's plan: a profile of the simulated device, and an assumed calibration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from heterollm.base import Progress
from heterollm.kernels.device import Device
from heterollm.kernels.npu import TILE_OF_INTEGERS
from heterollm.kernels.ops import Group, OpSpec
from heterollm.model import ModelConfig
from heterollm.planning import ALIKE, PlanInputs, assumed_heads, choose_context, suitable_mixtures
from heterollm.simulate.profile import profile_of
from heterollm.simulate.request import SYNC_CHOICES
from heterollm.simulate.routing import IMBALANCE, AssumedRouting
from heterollm.solver import (
    LEVELS,
    LLM_NPU,
    NPU_ATTENTION,
    NPU_EXPERTS,
    SHADOW_ATTENTION,
    SOLVED_LEVELS,
    PlanRequest,
    ShadowChannels,
)

if TYPE_CHECKING:
    from heterollm.profiler.records import Profile
    from heterollm.simulate.request import SimulationRequest

ASSUMED: Final = "assumed"
"""Identity of a calibration that nobody made: no load has it, so that no load runs the plan."""


def inputs_of_simulation(
    device: Device,
    model: str,
    config: ModelConfig,
    specs: Sequence[OpSpec],
    request: SimulationRequest,
    progress: Progress,
) -> PlanInputs:
    """Return the inputs of a simulation's plan.

    Args:
        device: A simulated device to profile, without a game.
        model: Name of the model.
        config: Its configuration.
        specs: All its groups.
        request: The simulated case.
        progress: Called with a stage's name, steps done and steps in all.

    Raises:
        OptionError: The model cannot have what the case assumes.
    """
    # llm.npu makes the plan of level layer.
    wanted = "auto" if request.level == "layer" and LLM_NPU in request.techniques else request.level
    routing = None
    if NPU_EXPERTS in request.techniques:
        mixtures, assumed = suitable_mixtures(config), assumed_routing(config, request)
        assert assumed is not None  # times of values that are computed have no such plan
        routing = assumed.calibrated(mixtures)

    def profile() -> Profile:
        return profile_of(device, model, config, specs, progress, request.techniques)

    longest = None
    if wanted in LEVELS:
        longest = min(max(device.standard_lengths), config.max_positions)
    elif routing is not None and request.plan_for == "prompt":
        # Only a plan for all lengths needs capacities for the longest chunk.
        longest = request.prompt
    heads = None
    if SHADOW_ATTENTION in request.techniques:
        heads = assumed_heads(config, request.attention, request.head_imbalance or ALIKE)
    evidence = {"attention": heads, "experts": routing}
    return PlanInputs(
        config,
        tuple(specs),
        request.precision,
        device.name,
        wanted,
        _plan_request(device, config, request, wanted),
        device.standard_lengths,
        profile,
        calibration=ASSUMED
        if request.calibrated or {*request.techniques} - {NPU_ATTENTION} or request.precision == "w8a8"
        else None,
        shadows=assumed_shadows(specs, request),
        evidence={name: own for name, own in evidence.items() if own is not None},
        length_policy="padding" if request.length_policy == "online" else request.length_policy,
        sync=SYNC_CHOICES[request.sync],
        longest=longest,
    )


def _plan_request(
    device: Device, config: ModelConfig, request: SimulationRequest, wanted: str
) -> PlanRequest:
    """Return what the solver is asked for: what a load asks, or a plan for the simulated lengths alone."""
    context, histogram = max(choose_context(config, None), request.prompt + request.decode), None
    if request.plan_for == "prompt":
        prompt = request.prompt
        if request.in_flight == 1 and LLM_NPU not in request.techniques:
            prompt = min(prompt, max(device.standard_lengths))
        context, histogram = config.max_positions, {1: float(max(1, request.decode)), prompt: 1.0}
    if wanted in LEVELS:
        histogram = {request.prompt: 1.0}
    return PlanRequest(
        context,
        level=wanted if wanted in SOLVED_LEVELS else "auto",
        histogram=histogram,
        in_flight=request.in_flight,
        techniques=request.techniques,
        attention=request.attention,
        experts=request.experts,
    )


def assumed_shadows(
    specs: Sequence[OpSpec], request: SimulationRequest
) -> dict[tuple[int, Group], ShadowChannels]:
    """Return the operators whose outliers are assumed to matter: those of the first and last layers.

    Such layers have the most important outliers (llm.npu, section 3.3).

    Args:
        specs: All groups of the model.
        request: The simulated case: its technique, the share of the layers without a shadow, and that of the
            channels with outliers.
    """
    if LLM_NPU not in request.techniques:
        return {}
    layers = sorted({spec.layer for spec in specs if spec.layer >= 0})
    kept = round((1.0 - request.pruned) * len(layers))
    outer = sorted(layers, key=lambda layer: min(layer, layers[-1] - layer))[:kept]
    own = [spec for spec in specs if spec.layer in outer]
    counts = {(spec.layer, spec.group): round(request.outlier_share * spec.columns) for spec in own}
    return {key: ShadowChannels(count, count) for key, count in counts.items()}


def assumed_routing(config: ModelConfig, request: SimulationRequest) -> AssumedRouting | None:
    """Return the assumed loads of a mixture's experts; None for other models, and where values are computed.

    Raises:
        OptionError: The mixture cannot be so imbalanced.
    """
    if config.mixture is None or request.numerics:
        return None
    imbalance = IMBALANCE if request.imbalance is None else request.imbalance
    return AssumedRouting(config.mixture.routing, imbalance)


def own_length(request: SimulationRequest) -> int:
    """Return the length of graphs that are built for the prompt: its own, or whole tiles of integers."""
    tile = TILE_OF_INTEGERS["static_int8"] if request.precision == "w8a8" else 1
    return -(-request.prompt // tile) * tile
