"""The plan of a simulation: a fixed level, or the solver's from a profile of the simulated device."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

from msgspec import structs

from heterollm.base import LABEL, OptionError, Progress, cache_name, own_folder
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import kernel_source_hash, source_hash
from heterollm.kernels.npu import TILE_OF_INTEGERS
from heterollm.kernels.ops import Group, OpSpec
from heterollm.kernels.sim import SIMULATED, clock_of, soc_of
from heterollm.model import ModelConfig, expert_specs, shape_of_specs
from heterollm.planning import (
    ProfiledModel,
    assumed_heads,
    choose_context,
    fastest_in_flight,
    solve_plan,
    with_additions,
)
from heterollm.profiler import SessionOptions, profile_device, profile_for
from heterollm.profiler.records import FenceKey, Key, Profile, Record
from heterollm.simulate.routing import IMBALANCE, AssumedRouting
from heterollm.solver import (
    NPU_EXPERTS,
    RETURN_VALUE,
    SHADOW_ATTENTION,
    SOLVED_LEVELS,
    LengthPolicy,
    PassName,
    PhaseSync,
    Plan,
    PlanLevel,
    PlanRequest,
    RequestedLevel,
    ShadowChannels,
    expert_pass,
    level_plan,
    llm_npu_pass,
    model_shape,
)

if TYPE_CHECKING:
    from heterollm.calibration import RoutingCalibration
    from heterollm.kernels.gpu import Strategy
    from heterollm.simulate.request import SimulationRequest

ASSUMED: Final = "assumed"
"""Identity of a calibration that nobody made: no load has it, so that no load runs the plan."""


def planned(
    device: Device,
    model: str,
    config: ModelConfig,
    specs: Sequence[OpSpec],
    request: SimulationRequest,
    progress: Progress,
    strategy: Strategy,
) -> Plan:
    """Return the plan of a simulation.

    Args:
        device: A simulated device to profile, without a game.
        model: Name of the model.
        config: Its configuration.
        specs: All its groups.
        request: The simulated case.
        progress: Called with a stage's name, steps done and steps in all.
        strategy: How the processors wait for each other.
    """

    def profiled() -> ProfiledModel:
        profile = profile_of(device, model, config, specs, progress, request.passes)
        if request.resolve:
            profile = with_one_strategy(profile, device, strategy)
        calibration = ASSUMED if request.calibrated or request.passes else None
        return ProfiledModel(
            profile, config, tuple(specs), request.precision, calibration, assumed_shadows(specs, request)
        )

    heads = assumed_heads(config, request.attention) if SHADOW_ATTENTION in request.passes else None
    routing, every = _assumed_calibration(config, request), (*specs, *expert_specs(config, specs))
    if request.naive:
        length = own_length(request)
        plan = level_plan(
            "layer",
            specs,
            device=device.name,
            precision=request.precision,
            standard_lengths=(length,),
            chunk_length=length,
        )
    elif request.level in SOLVED_LEVELS or llm_npu_pass(request.passes) is not None:
        asked = plan_request(device, config, request)
        if routing is not None and request.plan_for == "prompt":
            # Only a plan for all lengths needs capacities for the longest chunk.
            others = tuple(name for name in request.passes if name != expert_pass(request.passes))
            plan = solve_plan(profiled(), structs.replace(asked, passes=others), heads).plan
            plan = structs.replace(plan, chunk_length=min(plan.chunk_length, request.prompt), request=asked)
            plan = with_additions(profiled(), plan, asked, None, routing)
        else:
            plan = solve_plan(profiled(), asked, heads, routing).plan
    else:
        by_time = request.length_policy == "auto" and request.level != "gpu"
        policy: LengthPolicy = "padding"
        if by_time or request.length_policy == "pipe":
            policy = cast("LengthPolicy", request.length_policy)
        longest = min(max(device.standard_lengths), config.max_positions)

        def rule(chunk_length: int) -> Plan:
            return level_plan(
                cast("PlanLevel", request.level),
                specs,
                device=device.name,
                precision=request.precision,
                standard_lengths=device.standard_lengths,
                chunk_length=chunk_length,
                length_policy="padding" if request.level == "gpu" else policy,
                length_costs=profiled().npu_us if by_time else None,
            )

        plan = rule(longest)
        if request.in_flight != 1 and plan.uses_npu:
            lengths = [length for length in device.standard_lengths if 1 < length <= longest]
            plans = [rule(length) for length in lengths]
            plan = fastest_in_flight(profiled(), plan, plans, {request.prompt: 1.0}, request.in_flight)
        plan = structs.replace(plan, shape=model_shape(every))
    if (heads or routing) and (request.naive or not plan.request):
        plan = with_additions(profiled(), plan, plan_request(device, config, request), heads, routing)
    return structs.replace(plan, sync=PhaseSync(strategy, strategy)) if plan.uses_npu else plan


def plan_request(device: Device, config: ModelConfig, request: SimulationRequest) -> PlanRequest:
    """Return what the solver is asked for: what a load asks, or a plan for the simulated lengths alone.

    Args:
        device: The device, whose NPU limits what its graphs may take.
        config: The model.
        request: The simulated case.
    """
    level: RequestedLevel = "auto"
    if request.level in SOLVED_LEVELS:
        level = cast("RequestedLevel", request.level)
    if request.plan_for == "prompt":
        prompt = request.prompt
        if request.in_flight == 1 and llm_npu_pass(request.passes) is None:
            prompt = min(prompt, max(device.standard_lengths))
        histogram = {1: float(max(1, request.decode)), prompt: 1.0}
        return PlanRequest(
            config.max_positions,
            level=level,
            histogram=histogram,
            in_flight=request.in_flight,
            passes=request.passes,
            attention=request.attention,
            experts=request.experts,
        )
    context = max(choose_context(config, None), request.prompt + request.decode)
    return PlanRequest(
        context,
        level=level,
        in_flight=request.in_flight,
        passes=request.passes,
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
        request: The simulated case: its pass, the share of the layers without a shadow, and that of the
            channels with outliers.
    """
    if not {"llm.npu:shadow", "llm.npu"}.intersection(request.passes):
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


def _assumed_calibration(
    config: ModelConfig, request: SimulationRequest
) -> tuple[RoutingCalibration, ...] | None:
    """Return assumed records of the routing of each layer for the pass ``npumoe``; None without it.

    Raises:
        OptionError: The model has no experts, or they cannot be so imbalanced.
    """
    if (name := expert_pass(request.passes)) is None:
        return None
    if (assumed := assumed_routing(config, request)) is None:
        raise OptionError(
            f"The pass {name} is for mixtures of experts, and this model has none.", fix="Leave it out."
        )
    return assumed.calibrated(config.layers)


def own_length(request: SimulationRequest) -> int:
    """Return the length of graphs that are built for the prompt: its own, or whole tiles of integers."""
    tile = 1 if llm_npu_pass(request.passes) is None else TILE_OF_INTEGERS["static_int8"]
    return -(-request.prompt // tile) * tile


def profile_of(
    device: Device,
    model: str,
    config: ModelConfig,
    specs: Sequence[OpSpec],
    progress: Progress,
    passes: Sequence[PassName] = (),
) -> Profile:
    """Return the profile of a simulated device with a model's shapes; measure it unless the cache has it.

    Args:
        device: The device.
        model: Name of the model.
        config: Its configuration.
        specs: All its groups.
        progress: Called with a stage's name, steps done and steps in all.
        passes: Passes whose operators are measured, too.

    Raises:
        CacheError: The profile cannot be written.
    """
    shape = shape_of_specs(config, specs, model)
    # A file for each model, purpose and version of what measures and is measured: predictors are fitted to
    # all records of a file.
    measuring = [source_hash(f"heterollm.{name}", (".py",)) for name in ("profiler.measure", "kernels.sim")]
    made_by = (shape.specs, kernel_source_hash(), *measuring)
    key = hashlib.sha256(repr(made_by).encode()).hexdigest()[:16]
    sparse, experts = SHADOW_ATTENTION in passes, expert_pass(passes) is not None
    measured = [name for name, asked in ((SHADOW_ATTENTION, sparse), (NPU_EXPERTS, experts)) if asked]
    words = " ".join((model, *measured, LABEL, device.name.removeprefix(SIMULATED)))
    path = own_folder("profiles") / LABEL / f"{cache_name(words, device.fingerprint() + key)}.json"
    profile = profile_for(device, path)[0]
    if any(run["finished"] for run in profile.runs.values()):
        return profile
    options = SessionOptions.of(budget_s=None, update=True, sparse_attention=sparse, expert_graphs=experts)
    return profile_device(device, [shape], options, path=path, progress=progress)[0]


def with_one_strategy(profile: Profile, device: Device, strategy: Strategy) -> Profile:
    """Return a profile as if the processors could wait for each other by one strategy only.

    The driver's wait and copy cost the same on the way back, whether or not the GPU is busy.

    Args:
        profile: The profile.
        device: The device.
        strategy: The strategy.
    """
    costs = clock_of(device).costs
    copies = strategy == "finish" and bool(soc_of(device).hand_over.driver_copies)
    back_us = costs.finish_us + costs.write_us if copies else 0.0
    records: dict[Key, Record] = {}
    for key, record in profile.records.items():
        if not isinstance(key, FenceKey):
            records[key] = record
        elif key.strategy == strategy:
            records[key] = replace(record, values={**record.values, RETURN_VALUE: back_us})
    return Profile(profile.description, records, profile.runs)
