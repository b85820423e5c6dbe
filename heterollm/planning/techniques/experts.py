"""The technique npumoe: what a calibration says of a mixture's experts, and the groups of them on the NPU.

Experts get what the slices of the linear layers leave of the NPU's memory. Shorter passes than a whole chunk
run the groups of the chunk, at its capacities or at smaller ones, where the NPU is predicted to pay.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from heterollm.base import GIB, CalibrationError, OptionError
from heterollm.model import MixtureBlock, ModelConfig
from heterollm.planning.calibrated import routing_of
from heterollm.solver import (
    EXPERTS_ON_GPU,
    NPU_EXPERTS,
    ExpertPrices,
    ExpertsEntry,
    ExpertsPlacement,
    Plan,
    PlannedExperts,
    PlanRequest,
    estimate_experts,
    place_experts,
)

if TYPE_CHECKING:
    from heterollm.calibration import RoutingCalibration
    from heterollm.planning.profiled_model import ProfiledModel

Ints = NDArray[np.int64]

GAIN_FRACTION: Final = 0.1
"""Least gain of a layer's experts on the NPU, as predictions of different kernels have different errors."""

LENGTH_PARTS: Final = 4
"""Ranges of lengths from a power of two to the next."""

LEAST_TOKENS: Final = 32
"""End of the shortest range of lengths."""

ON_GPU: Final = (
    "The GPU computes all experts: the technique npumoe places popular ones on the NPU, with a calibration "
    "(docs/mixture-of-experts.md)."
)

UNMEASURED: Final = (
    "The profile has no times of experts on the NPU at precision {0}, and the GPU computes all. If the NPU "
    "has such graphs, `heterollm profile MODEL --precision {0} --technique npumoe --update` measures them."
)


def calibrated(
    path: str | Path | None, config: ModelConfig, request: PlanRequest | None
) -> tuple[RoutingCalibration, ...] | None:
    """Return the calibrated routing of each layer with experts; None where ``npumoe`` is not asked for.

    Args:
        path: File of the calibration.
        config: The model.
        request: The request with its techniques.

    Raises:
        CalibrationError: The file cannot be read, is no calibration, or lacks the routing of this model.
        OptionError: The model has no experts that the NPU can compute.
    """
    if request is None or NPU_EXPERTS not in request.techniques:
        return None
    mixtures = suitable_mixtures(config)
    if path is None:
        return None
    found = routing_of(path)
    counted = {one.layer: {len(chunk) for window in one.windows for chunk in window} for one in found}
    if counted != {layer: {block.routing.experts} for layer, block in mixtures.items()}:
        experts = next(iter(mixtures.values())).routing.experts
        raise CalibrationError(
            f"The calibration {path} has no loads of this model's {experts} experts in {len(mixtures)} "
            "layers.",
            fix="Run `heterollm calibrate` for this model, with windows of at least 64 tokens.",
        )
    return found


def suitable_mixtures(config: ModelConfig) -> Mapping[int, MixtureBlock]:
    """Return the mixtures of a model by layer.

    Raises:
        OptionError: There are none, or the NPU's graphs cannot compute their experts.
    """
    mixtures = config.blocks(MixtureBlock)
    reason = ""
    if not mixtures:
        reason = "is for mixtures of experts, and this model has none"
    elif any(block.biased or block.clip for block in mixtures.values()):
        reason = f"has no graphs for experts with biases and a clipped gate, as {config.family}'s"
    elif not all(block.gated for block in mixtures.values()):
        reason = f"has no graphs for experts without a gate, as {config.family}'s"
    if reason:
        raise OptionError(f"The technique {NPU_EXPERTS} {reason}.", fix="Leave it out.")
    return mixtures


def expert_loads(routing: Sequence[RoutingCalibration], tokens: int) -> dict[int, Ints]:
    """Return the tokens of each expert in passes of some length by layer: ``[chunks, experts]``.

    They are sums of the recorded chunks, and scaled where the length is no multiple of those, or longer than
    a window.

    Args:
        routing: The calibrated or assumed routing of each layer with experts.
        tokens: Tokens of a pass.
    """
    return {one.layer: one.scaled_loads(tokens) for one in routing}


def npu_bytes_left(model: ProfiledModel, plan: Plan, request: PlanRequest) -> int | None:
    """Return what the slices of the linear layers leave of the NPU's memory; None without a limit.

    Args:
        model: The model on the profiled device.
        plan: The plan.
        request: The request, with a limit or none.
    """
    limit = model.profile.addressable_bytes if request.npu_gib is None else int(request.npu_gib * GIB)
    if limit is None:
        return None
    return max(0, limit - model.npu_bytes(plan.with_technique(PlannedExperts())))


def placed(
    model: ProfiledModel, plan: Plan, request: PlanRequest, routing: Sequence[RoutingCalibration]
) -> Plan:
    """Return a plan with the experts on the NPU that a request asks for.

    Args:
        model: The model on the profiled device.
        plan: The plan of the linear layers, with chunks one after the other.
        request: The request with its techniques.
        routing: The routing of each layer.
    """
    longest = plan.chunk_length
    prices = model.expert_prices(longest) if NPU_EXPERTS in request.techniques else None
    if prices is None:
        return plan
    left = npu_bytes_left(model, plan, request)
    loads = expert_loads(routing, longest)
    placements = place_experts(tuple(loads.values()), prices, left, request.experts.overflow)
    return with_placements(model, plan, routing, dict(zip(loads, placements, strict=True)), left)


def with_placements(
    model: ProfiledModel,
    plan: Plan,
    routing: Sequence[RoutingCalibration],
    placements: Mapping[int, ExpertsPlacement],
    left: int | None,
    *,
    forced: bool = False,
) -> Plan:
    """Return a plan with placements of experts in passes of whole chunks, and of less where that gains.

    Args:
        model: The model on the profiled device.
        plan: The plan of the linear layers.
        routing: The routing of each layer.
        placements: Those of whole chunks, by layer.
        left: Bytes that the NPU has for them; None without a limit.
        forced: Whether whole chunks have them even if they do not gain.
    """
    ranges = list(_ranges(plan.chunk_length))
    every = {tokens: model.expert_prices(tokens) for pair in ranges for tokens in pair}
    prices = {tokens: own for tokens, own in every.items() if own is not None}
    loads = {tokens: expert_loads(routing, tokens) for tokens in prices}
    for shrinks in (True, False):  # smaller capacities take memory, too
        entries = [
            entry
            for layer, placement in placements.items()
            for entry in _entries(
                *(layer, placement, ranges, prices),
                {tokens: own[layer] for tokens, own in loads.items()},
                forced=forced,
                shrinks=shrinks,
            )
        ]
        found = PlannedExperts(tuple(entries))
        if left is None or found.npu_bytes(model.every_spec, model.profile.graph_memory) <= left:
            break
    return plan.with_technique(found)


def notes(model: ProfiledModel, plan: Plan, request: PlanRequest) -> tuple[str, ...]:
    """Return notes on experts that are not where the user may expect them, with the reason.

    Args:
        model: The model on the profiled device.
        plan: The plan with its experts.
        request: The request with its techniques.
    """
    if not model.experts:
        return ()
    if NPU_EXPERTS not in request.techniques:
        return (ON_GPU,) if model.limits is not None else ()
    if model.expert_prices(plan.chunk_length) is None:
        return (UNMEASURED.format(model.precision),)
    if not plan.technique(PlannedExperts).is_active:
        return (
            "Experts stay on the GPU: by the profile and the calibrated loads the NPU gains too little in "
            f"passes of up to {plan.chunk_length} tokens.",
        )
    return ()


# -- helpers -----------------------------------------------------------------------------------------


def _ranges(longest: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of lengths of passes, the longest first."""
    top, size = longest, longest
    while top > LEAST_TOKENS:
        for part in range(LENGTH_PARTS - 1, -1, -1):
            low = (size + size * part // LENGTH_PARTS) // 2
            yield low + 1, top
            top = low
        size = top
    yield 1, top


def _entries(
    layer: int,
    placement: ExpertsPlacement,
    ranges: Sequence[tuple[int, int]],
    prices: dict[int, ExpertPrices],
    loads: dict[int, Ints],
    *,
    forced: bool,
    shrinks: bool,
) -> Iterator[ExpertsEntry]:
    """Yield the entries of a layer: for passes of the longest range, and for shorter ones while they gain.

    Args:
        layer: The layer.
        placement: That of whole chunks.
        ranges: Ranges of lengths, the longest first.
        prices: By length of passes.
        loads: By length of passes, ``[chunks, experts]``.
        forced: Whether the longest range has the placement even if it does not gain.
        shrinks: Whether shorter passes may have graphs of smaller capacities.
    """

    def time_us(own: ExpertsPlacement, tokens: int) -> float:
        return estimate_experts(own, loads[tokens], prices[tokens]).time_us

    opened: ExpertsEntry | None = None
    for first, (low, top) in enumerate(ranges if placement.groups else ()):
        tried = [placement]
        if shrinks and first:
            tried.append(_shrunk(placement, prices[top].capacities, top / ranges[0][1]))
        limits_us = {n: (1 - GAIN_FRACTION) * time_us(EXPERTS_ON_GPU, n) for n in (low, top)}
        gaining = [
            own
            for own in tried
            if (forced and not first)
            or (
                (own.overflow != "pad" or _holds(own, loads[top]))
                and all(time_us(own, tokens) < limit_us for tokens, limit_us in limits_us.items())
            )
        ]
        if not gaining:
            break
        best_us, best = min(((time_us(own, top), own) for own in gaining), key=lambda pair: pair[0])
        best = structs.replace(best, predicted_us=round(best_us, 3))
        shortest_us = round(time_us(best, low), 3)
        if opened is not None and opened.placement.groups == best.groups:
            opened = structs.replace(opened, lengths=(low, opened.lengths[1]), shortest_us=shortest_us)
            continue
        if opened is not None:
            yield opened
        opened = ExpertsEntry((low, top), (layer, layer), best, shortest_us)
    if opened is not None:
        yield opened


def _shrunk(placement: ExpertsPlacement, capacities: Sequence[int], share: float) -> ExpertsPlacement:
    """Return a placement whose capacities hold a share of what they did."""
    groups = tuple(
        structs.replace(
            group,
            capacity=next((own for own in capacities if own >= share * group.capacity), group.capacity),
        )
        for group in placement.groups
    )
    return structs.replace(placement, groups=groups)


def _holds(placement: ExpertsPlacement, loads: Ints) -> bool:
    """Whether no load exceeds the capacity of an expert on the NPU."""
    capacities = np.array(placement.capacities(loads.shape[1]))
    return bool((loads.max(axis=0) <= capacities)[capacities > 0].all())
