"""The technique shadowattn: what a calibration or an assumption says of heads, and the planned attention."""

from __future__ import annotations

from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Final, get_args

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

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
"""Exponent of most heads in simulations: no time depends on it but by the heads that share one."""

ALIKE: Final = 1.0
"""Imbalance of heads that all need as many keys."""

SEED: Final = 23
HALVINGS: Final = 60
WIDEST: Final = 64.0
"""Largest spread of the logarithms of needs that is tried."""

ASSUMED_NATS: Final = 1e-4
"""Mean importance of heads in simulations, below the clamp of equation 3."""

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


def assumed_heads(config: ModelConfig, request: AttentionRequest, imbalance: float = ALIKE) -> AttentionHeads:
    """Return heads of a model that nobody calibrated.

    Needs of keys are log-normal in each layer, as wide as the imbalance asks, and importances proportional to
    them. Scales of key heads are as wide, so that exponents are rounded logarithms of another draw. Draws are
    seeded by the layer. Without an imbalance all heads need as many keys and share one exponent.

    Args:
        config: The model.
        request: The options of the technique.
        imbalance: Largest need of a query head over the mean one of its layer.

    Raises:
        OptionError: The keys are to be shared out by what only a calibration knows, no heads are as
            imbalanced, or a layer has no attention.
    """
    own = config.attention
    if request.keep_by == "importance" and imbalance == ALIKE:
        raise OptionError(
            "Simulations of shapes know no importance of heads.",
            fix="Choose --keep-by mass or uniform, or assume heads that differ: --head-imbalance 2.",
        )
    spread = _spread(own.heads, imbalance)
    factors, scales = (np.exp(spread * _quantiles(count)) for count in (own.heads, own.kv_heads))
    factors /= factors.mean()
    draws = [np.random.default_rng((SEED, layer)) for layer in range(config.layers)]
    needed = [draw.permutation(factors) for draw in draws]
    exponents = [ASSUMED_EXPONENT + np.rint(np.log2(draw.permutation(scales))) for draw in draws]
    half = min(0.5, 1.0 / imbalance)  # no head needs more than all keys
    needs = HeadNeeds(
        (0.5,),
        tuple(tuple((half * factor,) for factor in layer.tolist()) for layer in needed),
        tuple(tuple((ASSUMED_NATS * layer).tolist()) for layer in needed),
        (1.0,) * config.layers,
    )
    keep = keep_ratios(needs, request.keep, request.keep_by)
    return AttentionHeads(keep, tuple(tuple(map(int, layer)) for layer in exponents), _windows(config))


def _quantiles(count: int) -> NDArray[np.float64]:
    """Return so many quantiles of the normal distribution, rising."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((rank + 0.5) / count) for rank in range(count)])


def _spread(heads: int, imbalance: float) -> float:
    """Return the deviation of the logarithms of needs whose largest is so many times the mean one.

    Raises:
        OptionError: So many heads have no such imbalance.
    """
    if not ALIKE <= imbalance <= max(ALIKE, 0.99 * heads):
        raise OptionError(
            f"An imbalance of {imbalance:g} is not possible with {heads} query heads.",
            fix=f"Give --head-imbalance 1 to {max(ALIKE, 0.99 * heads):g}.",
        )
    low, high = 0.0, WIDEST if imbalance > ALIKE else 0.0
    behind = _quantiles(heads) - _quantiles(heads)[-1]
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if np.exp(middle * behind).mean() * imbalance > 1.0 else (low, middle)
    return low


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
