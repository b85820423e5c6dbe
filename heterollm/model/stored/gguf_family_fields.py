"""Fields of ``config.json`` that only some architectures of GGUF files have.

``src/models`` in https://github.com/ggml-org/llama.cpp says what an absent field stands for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from heterollm.base import UnsupportedModelError
from heterollm.model.stored.gguf_delta import read_delta_heads
from heterollm.model.stored.gguf_file import GgufFile

Fields = Mapping[str, Any]
"""Fields of ``config.json``."""

MELLUM_PERIOD: Final = 4
GPT_OSS_PERIOD: Final = 2
PERIOD: Final = 4
"""Layers of which one has no window in Cohere 2, OLMo 3 and EXAONE 4, if the file does not say."""
LARGEST_EXAONE4: Final = 64
EXAONE4_WINDOW: Final = 4096
DELTA_PERIOD: Final = 4
SOFTMAX: Final = 1
"""The function of the scores of experts, by llama.cpp's number."""
ROPE_BASE: Final = 10000.0
MAVERICK_EXPERTS: Final = 128
"""Experts of the Llama 4 whose heads have no norms."""
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


def two_ropes(file: GgufFile, config: Fields) -> Fields:
    """Return the RoPE of layers without a window, and one that nothing scales for the others."""
    base = config["rope_theta"]
    sliding = {"rope_type": "default", "rope_theta": file.own("rope.freq_base_swa", base)}
    full = {"rope_type": "default", "rope_theta": base, **(config.get("rope_scaling") or {})}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}, "rope_scaling": None}


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


def plain_rope(_file: GgufFile, config: Fields) -> Fields:
    """Return the rotary embedding without a scaling, which the model type has by default."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": config["rope_theta"]}}


def silu(_file: GgufFile, _config: Fields) -> Fields:
    """Return the activation of a type that has another one by default."""
    return {"hidden_act": "silu"}


def gpt_neox(file: GgufFile, config: Fields) -> Fields:
    """Return GPT-NeoX's own names of the rotary embedding, and whether blocks stand side by side."""
    return {
        "rotary_pct": config["partial_rotary_factor"],
        "rotary_emb_base": config["rope_theta"],
        "use_parallel_residual": file.own("use_parallel_residual"),
    }


def stablelm(file: GgufFile, _config: Fields) -> Fields:
    """Return whether attention and network read one norm, and whether heads have norms."""
    return {
        "use_parallel_residual": "blk.0.ffn_norm.weight" not in file.entries,
        "qk_layernorm": "blk.0.attn_q_norm.weight" in file.entries,
    }


def expert_width(file: GgufFile) -> Fields:
    """Return the width of an expert."""
    used, whole = file.count("expert_used_count"), file.own("feed_forward_length")
    width = whole // used if type(whole) is int else None
    return {"moe_intermediate_size": file.count("expert_feed_forward_length", default=width)}


def ernie_moe(file: GgufFile, config: Fields) -> Fields:
    """Return which layers have experts, and how many of these compute every token."""
    return {
        **expert_width(file),
        "moe_k": config["num_experts_per_tok"],
        "num_experts_per_tok": None,
        "moe_layer_start_index": file.own("leading_dense_block_count") or 0,
        "moe_layer_end_index": -1,
        "moe_layer_interval": file.count("interleave_moe_layer_step", default=1),
        "moe_num_shared_experts": file.own("expert_shared_count") or 0,
    }


def llama4(file: GgufFile, config: Fields) -> Fields:
    """Return the widths of Llama 4; llama.cpp assumes the chunks, and which layers have positions."""
    return {
        "intermediate_size": file.count("expert_feed_forward_length"),
        "intermediate_size_mlp": config["intermediate_size"],
        "interleave_moe_layer_step": file.count("interleave_moe_layer_step"),
        "use_qk_norm": config["num_local_experts"] != MAVERICK_EXPERTS,
    }


def sigmoid_moe(file: GgufFile) -> Fields:
    """Return the widths, weights and first layers of mixtures whose routers have a sigmoid and a bias."""
    return {
        **expert_width(file),
        "first_k_dense_replace": file.own("leading_dense_block_count") or 0,
        "norm_topk_prob": bool(file.own("expert_weights_norm", False)),
        "routed_scaling_factor": file.number("expert_weights_scale", 0.0) or 1.0,
    }


def dots1(file: GgufFile, _config: Fields) -> Fields:
    """Return the fields of a mixture by sigmoid, and the number of shared experts."""
    return {**sigmoid_moe(file), "n_shared_experts": file.count("expert_shared_count")}


def deepseek2(file: GgufFile, config: Fields) -> Fields:
    """Return the sizes of latent attention, its RoPE, and a mixture by sigmoid, or by softmax as in V2."""
    turned, scaling = file.count("rope.dimension_count"), config.get("rope_scaling")
    if scaling:
        # llama.cpp takes mscale for equal to mscale_all_dim, of which the file has a tenth.
        growth = 10 * file.number("rope.scaling.yarn_log_multiplier", 0.0)
        scaling = {**scaling, "attention_factor": 1.0, **({"mscale_all_dim": growth} if growth else {})}
    found = {
        **dots1(file, config),
        "q_lora_rank": file.count("attention.q_lora_rank") if file.own("attention.q_lora_rank") else None,
        "kv_lora_rank": file.count("attention.kv_lora_rank"),
        "qk_nope_head_dim": file.count("attention.key_length_mla", "attention.key_length") - turned,
        "qk_rope_head_dim": turned,
        "v_head_dim": file.count("attention.value_length_mla", "attention.value_length"),
        "partial_rotary_factor": 1.0,
        "rope_scaling": scaling,
        "n_group": file.count("expert_group_count", default=1),
        "topk_group": file.count("expert_group_used_count", default=1),
    }
    if file.own("expert_gating_func", SOFTMAX) != SOFTMAX:
        return found
    if found.pop("norm_topk_prob"):
        raise UnsupportedModelError(
            f"{file.path}: deepseek2.expert_weights_norm with scores by softmax is not supported."
        )
    grouped = {"topk_method": "group_limited_greedy"} if found["n_group"] > 1 else {}
    return {**found, **grouped, "model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"]}


def glm4_moe(file: GgufFile, config: Fields) -> Fields:
    """Return the fields of a mixture by sigmoid, and whether heads have norms."""
    return {**dots1(file, config), "use_qk_norm": "blk.0.attn_q_norm.weight" in file.entries}


def exaone_moe(file: GgufFile, _config: Fields) -> Fields:
    """Return the fields of a mixture by sigmoid, and the layers with a window, which alone have positions."""
    return {
        **sigmoid_moe(file),
        "num_shared_experts": file.count("expert_shared_count"),
        "sliding_window": file.count("attention.sliding_window"),
        **layer_types(file, PERIOD),
    }


def delta_net(file: GgufFile, config: Fields) -> Fields:
    """Return the layers with a gated delta net instead of attention, and its heads."""
    layers = min(config["num_hidden_layers"], MOST_LAYERS)
    recurrent = file.own("attention.recurrent_layers")
    if not isinstance(recurrent, list):
        period = file.count("full_attention_interval", default=DELTA_PERIOD)
        recurrent = [(at + 1) % period for at in range(layers)]
    heads = read_delta_heads(file, in_turns=False)
    return {
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurrent[:layers]],
        "linear_num_key_heads": heads.keys,
        "linear_num_value_heads": heads.values,
        "linear_key_head_dim": heads.key_dim,
        "linear_value_head_dim": heads.value_dim,
        "linear_conv_kernel_dim": file.count("ssm.conv_kernel"),
    }


def shared_expert(file: GgufFile) -> Fields:
    """Return the widths of an expert and of the one that computes every token; all layers have them."""
    return {
        **expert_width(file),
        "shared_expert_intermediate_size": file.count(
            "expert_shared_feed_forward_length", "feed_forward_length"
        ),
    }


def delta_net_moe(file: GgufFile, config: Fields) -> Fields:
    """Return the layers with a gated delta net, and the widths of experts."""
    return {**delta_net(file, config), **shared_expert(file)}


def qwen2_moe(file: GgufFile, _config: Fields) -> Fields:
    """Return the widths of experts, whose weights are not divided by their sum; no layer has a window."""
    return {**shared_expert(file), "norm_topk_prob": False, "use_sliding_window": False}


def cohere2(file: GgufFile, _config: Fields) -> Fields:
    """Return the layers with a window, which alone have positions, and the factor of the logits."""
    return {
        "sliding_window": file.count("attention.sliding_window"),
        **layer_types(file, PERIOD),
        "logit_scale": file.number("logit_scale"),
    }


def olmo(file: GgufFile, _config: Fields) -> Fields:
    """Return the limit of queries, keys and values, and the number added in norms, which is fixed."""
    return {"rms_norm_eps": 1e-5, "clip_qkv": file.own("attention.clamp_kqv") or None}


def olmo2(file: GgufFile, config: Fields) -> Fields:
    """Return OLMo 3's windows, and the RoPE of those layers, which nothing scales; OLMo 2 has none."""
    window = file.own("attention.sliding_window") or None
    if window is None:
        return {}
    return {
        "model_type": "olmo3",
        "architectures": ["Olmo3ForCausalLM"],
        "sliding_window": window,
        **layer_types(file, PERIOD),
        **two_ropes(file, config),
    }


def exaone4(file: GgufFile, config: Fields) -> Fields:
    """Return the layers with a window, which alone have positions then; small models have none."""
    largest = config["num_hidden_layers"] == LARGEST_EXAONE4
    window = file.own("attention.sliding_window", EXAONE4_WINDOW if largest else None) or None
    return {"sliding_window": window, **(layer_types(file, PERIOD) if window else {})}


def mistral3(file: GgufFile, config: Fields) -> Fields:
    """Return how queries of Ministral 3 grow with the position; those of Mistral do not."""
    beta = file.number("attention.temperature_scale", 0.0)
    if not beta:
        return {}
    context = config["max_position_embeddings"]
    scaling = config.get("rope_scaling") or {"rope_type": "default"}
    original = scaling.get("original_max_position_embeddings") or context
    return {
        "model_type": "ministral3",
        "architectures": ["Ministral3ForCausalLM"],
        "rope_scaling": {
            **scaling,
            "original_max_position_embeddings": original,
            "llama_4_scaling_beta": beta,
        },
    }


def qwen3_moe(file: GgufFile, _config: Fields) -> Fields:
    """Return the width of an expert, whose weights are divided by their sum; no layer has a window."""
    return {**expert_width(file), "norm_topk_prob": True, "use_sliding_window": False}


def gpt_oss(file: GgufFile, config: Fields) -> Fields:
    """Return the layers with a window; yarn's range is not rounded, as in the model, unlike llama.cpp."""
    scaling = config.get("rope_scaling")
    return {
        "sliding_window": file.count("attention.sliding_window"),
        **layer_types(file, GPT_OSS_PERIOD),
        "rope_parameters": {"rope_type": "default"},
        "rope_scaling": {**scaling, "truncate": False} if scaling else None,
    }


def mellum(file: GgufFile, config: Fields) -> Fields:
    """Return the width of an expert, the layers with a window, and their RoPE, which nothing scales."""
    window = file.own("attention.sliding_window") or None
    return {
        **expert_width(file),
        "norm_topk_prob": True,
        "sliding_window": window,
        **(layer_types(file, MELLUM_PERIOD) if window else {}),
        **two_ropes(file, config),
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
