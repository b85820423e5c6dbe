"""Fields of ``config.json`` that only some architectures of GGUF files have.

``src/models`` in https://github.com/ggml-org/llama.cpp says what an absent field stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from heterollm.model.stored.gguf_file import GgufFile

Fields = Mapping[str, Any]
"""Fields of ``config.json``."""

GEMMA2_WINDOW: Final = 4096
GEMMA2_SOFT_CAPS: Final = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
LARGEST_GEMMA2, LARGEST_GEMMA3 = 46, 62
"""Layers of the largest Gemmas, whose attention llama.cpp scales by the share of a head in the width."""
MELLUM_PERIOD: Final = 4
ROPE_BASE: Final = 10000.0
MOST_LAYERS: Final = 10_000
"""Limit of a list over layers; the check of ``config.json`` refuses more."""


def no_fields(_file: GgufFile, _config: Fields) -> Fields:
    """Return nothing further."""
    return {}


def layer_types(file: GgufFile, absent: int | None = None) -> Fields:
    """Return the kinds of layers, if a pattern states them or stands for an absent one."""
    pattern = file.own("attention.sliding_window_pattern", absent)
    if pattern is not None and not isinstance(pattern, list):
        period = file.count("attention.sliding_window_pattern", default=absent)
        pattern = [at % period != period - 1 for at in range(min(file.count("block_count"), MOST_LAYERS))]
    if pattern is None:
        return {}
    return {"layer_types": ["sliding_attention" if one else "full_attention" for one in pattern]}


def gemma_scale(file: GgufFile, config: Fields, largest: int) -> Fields:
    """Return the scale of a Gemma's scores."""
    wide = config["num_hidden_layers"] == largest
    head = file.count("embedding_length") // config["num_attention_heads"] if wide else config["head_dim"]
    return {"query_pre_attn_scalar": head}


def gemma2(file: GgufFile, config: Fields) -> Fields:
    """Return Gemma 2's window, scale of scores and soft caps."""
    return {
        **gemma_scale(file, config, LARGEST_GEMMA2),
        **{name: file.own(name, cap) or None for name, cap in GEMMA2_SOFT_CAPS.items()},
        "sliding_window": file.own("attention.sliding_window", GEMMA2_WINDOW) or None,
        **layer_types(file),
    }


def gemma3(file: GgufFile, config: Fields) -> Fields:
    """Return Gemma 3's window, scale of scores, soft cap and second RoPE."""
    window = file.own("attention.sliding_window") or None  # 0 in all layers: they see all positions
    return {
        **gemma_scale(file, config, LARGEST_GEMMA3),
        "final_logit_softcapping": file.own("final_logit_softcapping") or None,
        "rope_local_base_freq": file.own("rope.freq_base_swa", ROPE_BASE),
        "sliding_window": window,
        **(layer_types(file) if window else {}),
    }


def one_window(file: GgufFile, _config: Fields) -> Fields:
    """Return the window of all layers."""
    return {"sliding_window": file.own("attention.sliding_window") or None}


def granite(file: GgufFile, config: Fields) -> Fields:
    """Return Granite's multipliers, without which nothing is multiplied; the last is required."""
    return {
        "attention_multiplier": file.number("attention.scale", 0.0) or config["head_dim"] ** -0.5,
        "embedding_multiplier": file.number("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": file.number("residual_scale", 0.0) or 1.0,
        "logits_scaling": file.number("logit_scale"),
    }


def granite_moe(file: GgufFile, config: Fields) -> Fields:
    """Return Granite's multipliers, and the experts that compute every token."""
    width = file.own("expert_shared_feed_forward_length") or 0
    shared = {
        "model_type": "granitemoeshared",
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "shared_intermediate_size": width,
    }
    return {**granite(file, config), **(shared if width else {})}


def minicpm(file: GgufFile, config: Fields) -> Fields:
    """Return MiniCPM's multipliers under Granite's names; older files, of 2B, have none."""
    return {
        "attention_multiplier": config["head_dim"] ** -0.5,
        "embedding_multiplier": file.number("embedding_scale", 12.0),
        "residual_multiplier": file.number("residual_scale", 1.4 / config["num_hidden_layers"] ** 0.5),
        "logits_scaling": file.number("logit_scale", config["hidden_size"] / 256),
    }


def stablelm(file: GgufFile, _config: Fields) -> Fields:
    """Return whether attention and network read one norm, and whether heads have norms."""
    return {
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.entries,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file.entries,
    }


def lfm2(file: GgufFile, config: Fields) -> Fields:
    """Return which layers have attention; the width of networks is final."""
    heads = file.own("attention.head_count_kv")
    layers = min(config["num_hidden_layers"], MOST_LAYERS)
    counts = heads if isinstance(heads, list) else [heads] * layers
    return {
        "layer_types": ["full_attention" if count else "conv" for count in counts],
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": file.count("shortconv.l_cache"),
    }


def expert_width(file: GgufFile, _config: Fields) -> Fields:
    """Return the width of an expert, whose weights are divided by their sum."""
    used, whole = file.count("expert_used_count"), file.own("feed_forward_length")
    width = whole // used if type(whole) is int else None
    return {
        "moe_intermediate_size": file.count("expert_feed_forward_length", default=width),
        "norm_topk_prob": True,
    }


def qwen3_moe(file: GgufFile, config: Fields) -> Fields:
    """Return the width of an expert; no layer has a window."""
    return {**expert_width(file, config), "use_sliding_window": False}


def mellum(file: GgufFile, config: Fields) -> Fields:
    """Return the width of an expert, the layers with a window, and their RoPE, which nothing scales."""
    base, window = config["rope_theta"], file.own("attention.sliding_window") or None
    sliding = {"rope_type": "default", "rope_theta": file.own("rope.freq_base_swa", base)}
    full = {"rope_type": "default", "rope_theta": base, **(config.get("rope_scaling") or {})}
    return {
        **expert_width(file, config),
        "sliding_window": window,
        **(layer_types(file, MELLUM_PERIOD) if window else {}),
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding},
        "rope_scaling": None,
    }


def phimoe(file: GgufFile, config: Fields) -> Fields:
    """Return the window, and the attention factor of either range of positions."""
    scaling = config.get("rope_scaling") or {}
    factor = scaling.get("attention_factor")
    if factor is None:
        return one_window(file, config)
    own = {name: value for name, value in scaling.items() if name != "attention_factor"}
    return {
        **one_window(file, config),
        "rope_scaling": {**own, "short_mscale": factor, "long_mscale": factor},
    }
