"""The technique npu-attention: attention of prompts on the NPU where it is predicted to gain.

NPUMoE computes a mixture's attention so (section 3.2); here it goes with any plan that uses the NPU. Graphs
get what the linear layers and the experts leave of the NPU's memory: where that is little, those of shorter
passes are left out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from heterollm.base import GIB, OptionError
from heterollm.engine import HEAD_ROWS, attention_obstacle, keys_limit
from heterollm.solver import (
    LLM_NPU,
    NPU_ATTENTION,
    Plan,
    PlannedAttention,
    PlanRequest,
    pass_sizes,
    plan_npu_attention,
)

if TYPE_CHECKING:
    from heterollm.model import ModelConfig
    from heterollm.planning.profiled_model import ProfiledModel

LEAST_TOKENS: Final = 32
"""Fewest tokens of a pass with attention on the NPU: a tile."""

IN_ORDER: Final = (
    "Chunks of prompts run one after the other: attention on the NPU does not combine with several at once."
)


def placed(model: ProfiledModel, plan: Plan, request: PlanRequest) -> Plan:
    """Return a plan with the attention on the NPU that a request asks for.

    Args:
        model: The model on the profiled device.
        plan: The plan, with chunks one after the other.
        request: The request with its techniques.

    Raises:
        ProfileError: The profile has no times of attention on the NPU.
        OptionError: The device has no NPU, or no layer can attend there.
    """
    if NPU_ATTENTION not in request.techniques:
        return plan
    if model.limits is None:
        raise OptionError(
            f"The technique {NPU_ATTENTION} needs an NPU: the profile of {model.profile.device} has none.",
            fix="Leave it out.",
        )
    limits = _limits(model.config)
    if not any(limit != 0 for limit in limits):
        reasons = {attention_obstacle(model.config, layer) for layer in range(model.config.layers)}
        raise OptionError(
            f"The NPU attends in no layer of {model.config.family}: one {' or '.join(sorted(reasons))}.",
            fix=f"Leave {NPU_ATTENTION} out of the techniques.",
        )
    least = LEAST_TOKENS
    while least <= plan.chunk_length:
        record = _record(model, plan, request, limits, least)
        if _fits(model, plan, request, record):
            return plan.with_technique(record)
        least = 2 * least - 1 if least > LEAST_TOKENS else LEAST_TOKENS + 1
    return plan


def missing_bytes(model: ProfiledModel, plan: Plan, request: PlanRequest) -> int:
    """Return the bytes that graphs of attention of whole chunks lack beside a plan; 0 where it has some.

    Args:
        model: The model on the profiled device.
        plan: The plan, with the attention that has room.
        request: The request with its techniques.
    """
    if NPU_ATTENTION not in request.techniques or plan.technique(PlannedAttention).on_npu:
        return 0
    record = _record(model, plan, request, _limits(model.config), plan.chunk_length // 2 + 1)
    return record.npu_bytes(model.every_spec, model.profile.graph_memory)


def notes(model: ProfiledModel, plan: Plan, request: PlanRequest) -> tuple[str, ...]:
    """Return notes on the layers whose attention stays on the GPU, with the reasons.

    Args:
        model: The model on the profiled device.
        plan: The plan with its attention.
        request: The request with its techniques.
    """
    if NPU_ATTENTION not in request.techniques:
        return ()
    several = (IN_ORDER,) if request.in_flight != 1 or LLM_NPU in request.techniques else ()
    if not plan.technique(PlannedAttention).on_npu:
        return (
            *several,
            "Attention stays on the GPU: by the profile the NPU gains too little in sessions of up to "
            f"{request.context} tokens, or has no memory left for its graphs. Leave {NPU_ATTENTION} out.",
        )
    found: dict[str, list[int]] = {}
    for layer, limit in enumerate(_limits(model.config)):
        if limit is not None:
            reason = attention_obstacle(model.config, layer) or f"has a window of {limit} positions"
            found.setdefault(reason, []).append(layer)
    kept = tuple(
        f"The GPU attends in {len(layers)} of {model.config.layers} layers"
        f"{' in longer sessions' if reason.startswith('has a window') else ''}: such a layer {reason}."
        for reason, layers in found.items()
    )
    return several + kept


def _limits(config: ModelConfig) -> list[int | None]:
    """Return the most keys of each layer for which the NPU can attend; 0 where it cannot, None for any."""
    return [
        0 if attention_obstacle(config, layer) else keys_limit(config, layer)
        for layer in range(config.layers)
    ]


def _record(
    model: ProfiledModel, plan: Plan, request: PlanRequest, limits: list[int | None], least: int
) -> PlannedAttention:
    """Return attention on the NPU in passes from some length on, where it is predicted to gain."""
    chunk, costs = plan.chunk_length, model.attention_costs
    return PlannedAttention(
        plan_npu_attention(limits, costs, context=request.context, chunk_length=chunk, least=least)
    )


def _fits(model: ProfiledModel, plan: Plan, request: PlanRequest, record: PlannedAttention) -> bool:
    """Return whether the graphs of attention fit the NPU's memory beside those of a plan.

    An NPU whose memory is too small even for those opens those of each pass again: then the largest pass
    must fit.
    """
    bound = model.profile.addressable_bytes if request.npu_gib is None else int(request.npu_gib * GIB)
    if bound is None:
        return True
    specs, memory = model.every_spec, model.profile.graph_memory
    left = bound - model.npu_bytes(plan)
    if left > 0:
        return record.npu_bytes(specs, memory) <= left
    whole = plan.chunk_length
    sizes = pass_sizes(plan.with_technique(record), specs, memory, "prefill", whole, HEAD_ROWS)
    return sum(sizes) <= bound
