"""The technique shadowattn: what a calibration or an assumption says of heads, and the planned attention."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final, get_args

from msgspec import structs

from heterollm.base import CalibrationError, OptionError
from heterollm.model import AttentionBlock, LatentAttentionBlock, ModelConfig
from heterollm.planning.calibrated import calibrated_needs, calibrated_scales
from heterollm.solver import (
    SHADOW_ATTENTION,
    AttentionHeads,
    AttentionRequest,
    Estimator,
    HeadNeeds,
    Plan,
    PlannedAttention,
    PlanRequest,
    SparseAttention,
    keep_ratios,
    plan_attention,
)

if TYPE_CHECKING:
    from heterollm.planning.profiled_model import ProfiledModel

ASSUMED_EXPONENT: Final = 8
"""Exponent of all heads in simulations: no time depends on it but by the heads that share one."""

ON_GPU: Final = (
    "The profile has no NPU graphs of attention scores: the GPU estimates them where attention is sparse. "
    "If the NPU has such graphs, `heterollm profile MODEL --technique shadowattn --update` measures them."
)


def calibrated(
    path: str | Path | None, config: ModelConfig, request: PlanRequest | None
) -> AttentionHeads | None:
    """Return the heads of a calibrated model for ``shadowattn``; None where it is not asked for.

    Args:
        path: File of the calibration.
        config: The model.
        request: The request with its techniques.

    Raises:
        CalibrationError: The file cannot be read, is no calibration, or one of another model.
        OptionError: The calibration lacks what the rule needs, or a layer has no attention.
    """
    if path is None or request is None or SHADOW_ATTENTION not in request.techniques:
        return None
    asked, windows = request.attention, _windows(config)
    scales = calibrated_scales(path, asked.buckets)
    exponents = tuple(
        tuple(head.exponent for head in scales.get(layer, ())) for layer in range(config.layers)
    )
    keep = keep_ratios(calibrated_needs(path), asked.keep, asked.keep_by)
    own = config.attention
    if {*map(len, exponents)} != {own.kv_heads} or {*map(len, keep)} != {own.heads}:
        raise CalibrationError(
            f"The calibration {path} has no attention heads of this model: {config.layers} layers with "
            f"{own.heads} query heads and {own.kv_heads} key heads.",
            fix="Run `heterollm calibrate` for this model.",
        )
    return AttentionHeads(keep, exponents, windows)


def assumed_heads(config: ModelConfig, request: AttentionRequest) -> AttentionHeads:
    """Return heads of a model that nobody calibrated: all need as many keys, and share one exponent.

    Args:
        config: The model.
        request: The options of the technique.

    Raises:
        OptionError: The keys are to be shared out by what only a calibration knows, or a layer has no
            attention.
    """
    if request.keep_by == "importance":
        raise OptionError(
            "Simulations of shapes know no importance of heads.", fix="Choose --keep-by mass or uniform."
        )
    alike = ((0.5,),) * config.attention.heads
    needs = HeadNeeds((0.5,), (alike,) * config.layers)
    keep = keep_ratios(needs, request.keep, request.keep_by)
    exponents = ((ASSUMED_EXPONENT,) * config.attention.kv_heads,) * config.layers
    return AttentionHeads(keep, exponents, _windows(config))


def placed(model: ProfiledModel, plan: Plan, request: PlanRequest, heads: AttentionHeads) -> Plan:
    """Return a plan with the attention that a request asks for.

    Args:
        model: The model on the profiled device.
        plan: The plan, with chunks one after the other.
        request: The request with its techniques.
        heads: The heads of the model.

    Raises:
        ProfileError: The profile has no times of sparse attention.
        OptionError: The NPU is to estimate scores, and has no such graphs.
    """
    if SHADOW_ATTENTION not in request.techniques:
        return plan
    asked, costs = request.attention, model.attention_costs
    estimators: tuple[Estimator, ...] = get_args(Estimator)
    if asked.estimator != "auto":
        estimators = (asked.estimator,)
    elif plan.level == "gpu" or not costs.estimates_on_npu:
        estimators = ("gpu",)
    if asked.estimator == "npu" and not costs.estimates_on_npu:
        raise OptionError(
            f"The device {model.profile.device} has no NPU with graphs of attention scores in its profile.",
            fix="Run `heterollm profile MODEL --technique shadowattn --update`, or let the GPU estimate: "
            "--estimator auto or gpu.",
        )
    attention = plan_attention(
        heads,
        costs,
        context=request.context,
        chunk_length=plan.chunk_length,
        estimators=estimators,
        buckets=asked.buckets,
        pipeline=asked.pipeline,
    )
    plan = plan.with_technique(PlannedAttention(attention))
    return structs.replace(plan, calibration=model.calibration)


def notes(model: ProfiledModel, plan: Plan, request: PlanRequest) -> tuple[str, ...]:
    """Return a note if a plan's attention is not what the technique was asked for, with the reason.

    Args:
        model: The model on the profiled device.
        plan: The plan with its attention.
        request: The request with its techniques.
    """
    if SHADOW_ATTENTION not in request.techniques:
        return ()
    if not plan.technique(PlannedAttention).is_active:
        return (
            "Attention stays dense: by the profile sparse attention gains too little in sessions of up to "
            f"{request.context} tokens. Try a larger --context or a smaller --keep, or leave it out.",
        )
    on_npu = plan.level == "gpu" or request.attention.estimator != "auto"
    return () if on_npu or model.attention_costs.estimates_on_npu else (ON_GPU,)


def dense_prompt_notes(plan: Plan, prompt: int) -> tuple[str, ...]:
    """Return a note if a plan has sparse attention, and none of it in the passes of a prompt.

    Args:
        plan: The plan.
        prompt: Tokens of the prompt, all of them computed in an empty session.
    """
    lengths = []
    for entry in plan.technique(PlannedAttention).entries:
        if not isinstance(entry.placement, SparseAttention):
            continue
        passes = ((tokens, first + tokens) for first, tokens in plan.chunks(prompt))
        if any(entry.serves(tokens, keys, entry.layers[0]) for tokens, keys in passes):
            return ()
        for first in range(0, entry.keys[1], plan.chunk_length):
            tokens = max(entry.lengths[0], entry.keys[0] - first)
            if tokens <= min(entry.lengths[1], entry.keys[1] - first, plan.chunk_length):
                lengths.append(first + tokens)
    if not lengths:
        return ()
    return (
        f"Attention in this prompt of {prompt} tokens was dense: by the profile sparse attention gains too "
        f"little. Prompts from {min(lengths)} tokens on can gain: `heterollm plan --explain` shows where.",
    )


def _windows(config: ModelConfig) -> tuple[int, ...]:
    """Return the window of each layer.

    Raises:
        OptionError: A layer has no attention, heads unlike those of others, or sinks.
    """
    if len(config.blocks(AttentionBlock)) < config.layers:
        raise OptionError(
            f"Only some layers of {config.family} have attention.",
            fix=f"Leave {SHADOW_ATTENTION} out of the techniques.",
        )
    if not config.has_alike_heads:
        raise OptionError(
            f"Layers of {config.family} have different heads, or keys of other layers.",
            fix=f"Leave {SHADOW_ATTENTION} out of the techniques.",
        )
    blocks = config.blocks(AttentionBlock).values()
    reason = (
        f"Attention of {config.family} has sinks, which sparse attention lacks."
        if any(block.sinks for block in blocks)
        else f"Layers of {config.family} attend to chunks of positions."
        if any(block.chunked for block in blocks)
        else f"Heads of {config.family} share latent vectors, which sparse attention does not estimate."
        if config.blocks(LatentAttentionBlock)
        else None
    )
    if reason is not None:
        raise OptionError(reason, fix=f"Leave {SHADOW_ATTENTION} out of the techniques.")
    return tuple(block.window for block in blocks)
