"""The plan of a simulation: that of a level, or the solver's, from a profile of the simulated device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, cast

from heterollm.config import ModelConfig
from heterollm.kernels.device import Device
from heterollm.kernels.ops import OpSpec
from heterollm.model_shape import shape_of_specs
from heterollm.passes import Placements
from heterollm.planning import Planner, PlanRequest
from heterollm.profiler.profile import Profile
from heterollm.profiler.records import HandOverKey, LaunchKey
from heterollm.profiler.session import SessionOptions, profile_device, profile_for
from heterollm.progress import Progress
from heterollm.solver import Plan, level_plan
from heterollm.solver.levels import SOLVED_LEVELS, LengthPolicy, PlanLevel, SolvedLevel

if TYPE_CHECKING:
    from heterollm.kernels.waiting import Strategy
    from heterollm.simulate import SimulationRequest

__all__ = ["Planned", "planned", "profile_of", "with_one_strategy"]

LONGEST_CONTEXT: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Planned:
    """Who computes what.

    Args:
        plan: The plan.
        placements: Who computes what at an exact length, where the solver says; None where the plan does.
        planner: What solved it.
    """

    plan: Plan
    placements: Placements | None = None
    planner: Planner | None = None


def planned(
    device: Device,
    model: str,
    config: ModelConfig,
    specs: Sequence[OpSpec],
    request: SimulationRequest,
    progress: Progress,
    strategy: Strategy,
) -> Planned:
    """Return the plan of a simulation.

    Args:
        device: A simulated device to profile: without a game, so that it is what the plan is solved for.
        model: Name of the model.
        config: The model.
        specs: Every group of it.
        request: What is simulated.
        progress: Called with a stage's name, steps done and steps in all.
        strategy: How the parts wait for each other.
    """

    def planner(level: SolvedLevel) -> Planner:
        profile = profile_of(device, model, config, specs, progress)
        if request.resolve:
            profile = with_one_strategy(profile, device, strategy)
        # What comes is known here: this prompt once, and then so many tokens.
        prompt = min(request.prompt, max(device.standard_lengths))
        histogram = {1: float(max(1, request.decode)), prompt: 1.0}
        asked = PlanRequest(config.max_positions, level=level, histogram=histogram)
        return Planner(profile, config, specs, "w4a16", asked)

    if request.level in SOLVED_LEVELS:
        solved = planner(request.level)
        return Planned(solved.plan, solved, solved)
    by_time = request.length_policy == "auto" and request.level != "gpu"
    policy: LengthPolicy = "padding"
    if by_time or request.length_policy == "pipe":
        policy = cast("LengthPolicy", request.length_policy)
    plan = level_plan(
        cast("PlanLevel", request.level),
        specs,
        device=device.name,
        precision="w4a16",
        standard_lengths=device.standard_lengths,
        chunk_length=min(max(device.standard_lengths), config.max_positions),
        length_policy="padding" if request.level == "gpu" else policy,
        length_costs=planner("tensor").length_us if by_time else None,
    )
    return Planned(plan)


def profile_of(
    device: Device, model: str, config: ModelConfig, specs: Sequence[OpSpec], progress: Progress
) -> Profile:
    """Return the profile of a simulated device with a model's shapes in it; made where it is not kept.

    Args:
        device: The device.
        model: Name of the model.
        config: The model.
        specs: Every group of it.
        progress: Called with a stage's name, steps done and steps in all.

    Raises:
        CacheError: The profile cannot be written.
    """
    profile, path = profile_for(device)
    shape = shape_of_specs(config, specs, f"{model}, head of {specs[-1].weight.bits} bits")
    if any(run["finished"] and shape.name in run.get("models", ()) for run in profile.runs.values()):
        return profile
    options = SessionOptions.of(budget_s=None, update=True)
    return profile_device(device, [shape], options, path=path, progress=progress)[0]


def with_one_strategy(profile: Profile, device: Device, strategy: Strategy) -> Profile:
    """Return a profile as it would be if the parts could wait for each other in one way only.

    The driver's way costs its waits and copies on the way back as well.

    Args:
        profile: The profile.
        device: The device.
        strategy: The way.
    """
    from heterollm.kernels.simulated_device import clock_of

    records = {
        key: record
        for key, record in profile.records.items()
        if not isinstance(key, HandOverKey) or key.strategy == strategy
    }
    back = LaunchKey("npu_to_gpu")
    if strategy == "finish" and back in records:
        costs = clock_of(device).costs
        more_us = costs.finish_us + costs.write_us
        samples = tuple(sample + more_us for sample in records[back].samples_us)
        records[back] = replace(records[back], samples_us=samples)
    return Profile(profile.description, records, profile.runs)
