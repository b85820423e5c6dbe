"""The experts of a plan: which of them the NPU holds, at which predicted times, and what does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from heterollm.base import format_bytes
from heterollm.planning import expert_loads, npu_bytes_left
from heterollm.report.console import table
from heterollm.solver import (
    EXPERTS_ON_GPU,
    NPU_EXPERTS,
    PlannedExperts,
    PlanRequest,
    estimate_experts,
    place_experts,
)

if TYPE_CHECKING:
    from heterollm.calibration import RoutingCalibration
    from heterollm.planning import ProfiledModel
    from heterollm.solver import ExpertPrices, ExpertsPlacement, Plan


def experts_report(
    model: ProfiledModel, plan: Plan, routing: Sequence[RoutingCalibration] | None, *, explain: bool
) -> list[RenderableType]:
    """Return what a plan does with the experts of a mixture; nothing without the technique npumoe.

    Args:
        model: The model on the profiled device.
        plan: The plan.
        routing: The routing of each layer; None without the technique.
        explain: Whether to show the groups of each layer, and what a budget leaves out.
    """
    if routing is None or (prices := model.expert_prices(plan.chunk_length)) is None:
        return []
    parts: list[RenderableType] = (
        [Text(experts_words(model, plan))] if plan.technique(PlannedExperts).is_active else []
    )
    if explain:
        parts += [experts_table(plan, routing, prices), Text(budget_words(model, plan, routing, prices))]
    return parts


def experts_words(model: ProfiledModel, plan: Plan) -> str:
    """Return a sentence about the experts on the NPU."""
    found = plan.technique(PlannedExperts)
    least = min(entry.lengths[0] for entry in found.entries)
    overflow = found.entries[0].placement.overflow
    beyond = {
        "gpu": "the GPU computes tokens beyond a capacity",
        "drop": "tokens beyond a capacity are dropped",
        "pad": "capacities hold all calibrated tokens",
    }[overflow]
    layers = {layer for entry in found.entries for layer in range(entry.layers[0], entry.layers[1] + 1)}
    graphs = found.npu_bytes(model.every_spec, model.profile.graph_memory)
    return (
        f"The NPU computes experts of {len(layers)} of {len(model.experts)} layers in passes of {least} to "
        f"{plan.chunk_length} tokens, in graphs of {format_bytes(graphs)}; {beyond}. The GPU computes the "
        "others at the same time, and all of them in decode."
    )


def experts_table(plan: Plan, routing: Sequence[RoutingCalibration], prices: ExpertPrices) -> Table:
    """Return the groups of each layer in whole chunks, with their costs over the calibrated loads."""
    title = f"Experts on the NPU in passes of {plan.chunk_length} tokens, predicted from the calibration"
    columns = ("layer", "experts @ capacity, by graph", ">of the tokens", ">padding", ">overflow")
    made = table(*columns, ">ms", ">all on GPU, ms", title=title)
    for layer, loads in expert_loads(routing, plan.chunk_length).items():
        placement = plan.technique(PlannedExperts).of(plan.chunk_length, layer)
        found, alone = (estimate_experts(one, loads, prices) for one in (placement, EXPERTS_ON_GPU))
        held = [expert for group in placement.groups for expert in group.experts]
        share = loads[:, held].sum() / max(1, loads.sum())
        made.add_row(
            str(layer),
            "\n".join(_group_words(placement)) or "none",
            f"{share:.0%}",
            f"{found.padding_share:.0%}",
            f"{found.overflow_share:.1%}",
            f"{found.time_us / 1e3:.2f}",
            f"{alone.time_us / 1e3:.2f}",
        )
    return made


def budget_words(
    model: ProfiledModel, plan: Plan, routing: Sequence[RoutingCalibration], prices: ExpertPrices
) -> str:
    """Return a sentence about the memory of linear layers and experts, and about what it leaves out."""
    request = plan.request or PlanRequest()
    planned = plan.technique(PlannedExperts)
    experts = planned.npu_bytes(model.every_spec, model.profile.graph_memory)
    linears, left = model.npu_bytes(plan) - experts, npu_bytes_left(model, plan, request)
    words = (
        f"NPU graphs take {format_bytes(linears)} for linear layers and {format_bytes(experts)} for experts"
    )
    if left is None:
        return f"{words}; there is no limit."
    words = f"{words}; linear layers leave {format_bytes(left)}"
    if NPU_EXPERTS not in request.techniques:
        return f"{words}."
    loads = expert_loads(routing, plan.chunk_length)
    every = tuple(loads.values())
    wanted = [
        estimate_experts(one, own, prices)
        for one, own in zip(place_experts(every, prices, None), every, strict=True)
    ]
    most = sum(one.graph_bytes for one in wanted)
    if most <= left:
        return f"{words}, and all experts that pay fit."
    now_us = sum(
        estimate_experts(planned.of(plan.chunk_length, layer), own, prices).time_us
        for layer, own in loads.items()
    )
    return (
        f"{words}. Without the limit graphs of experts of {format_bytes(most)} would be predicted best: "
        f"{sum(one.time_us for one in wanted) / 1e3:.2f} ms of experts in place of {now_us / 1e3:.2f}."
    )


def _group_words(placement: ExpertsPlacement) -> list[str]:
    return [f"{', '.join(map(str, group.experts))} @ {group.capacity}" for group in placement.groups]
