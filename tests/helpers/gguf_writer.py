"""Writes checkpoints as GGUF files, with the gguf package's names, as llama.cpp's converters do."""

import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import NormalDist
from typing import Any, NamedTuple

import gguf
import numpy as np
from safetensors.numpy import load_file

from heterollm.model import ModelConfig, rope_tables
from heterollm.model.stored.gguf_blocks import BLOCK_TYPES
from heterollm.model.stored.gguf_file import GgufFile

Types = gguf.GGMLQuantizationType
Config = dict[str, Any]
Tensors = dict[str, np.ndarray]
Pairs = Iterable[tuple[str, np.ndarray]]

PLAIN: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}
MIXTURES = (
    *("mixtral", "qwen3_moe", "olmoe", "mellum", "phimoe", "granitemoe", "granitemoeshared", "gpt_oss"),
    *("qwen2_moe", "qwen3_5_moe_text", "qwen3_next", "lfm2_moe", "ernie4_5_moe"),
    *("glm4_moe", "dots1", "exaone_moe", "llama4_text"),
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
)
STACKS = {"w1": "gate", "w3": "up", "w2": "down"}
OVERRIDES: dict[str, dict[str, Any]] = {
    # GGUF has no field for these.
    "gemma2": {"query_pre_attn_scalar": 56},
    "gemma3_text": {"query_pre_attn_scalar": 48},
    "mistral": {"sliding_window": None},
    # Its files have rows of zeros behind those of a shorter table.
    "gemma3n_text": {"vocab_size_per_layer_input": 2048},
    "exaone4": {
        "sliding_window": None,
        "layer_types": ["full_attention"] * 2,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "mixtral": {"sliding_window": None},
    # llama.cpp takes mscale for as large as mscale_all_dim.
    "deepseek_v3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "mscale": 0.6,
            "mscale_all_dim": 0.6,
        },
    },
    # llama.cpp assumes these numbers.
    "llama4_text": {
        "attention_chunk_size": 8192,
        "no_rope_layers": None,
        "attention_bias": False,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    "bitnet": {"hidden_act": "silu", "tie_word_embeddings": True},
    "gpt_oss": {"swiglu_limit": 7.0},
    "qwen3_moe": {"attention_bias": False, "use_sliding_window": False},
    "olmoe": {"attention_bias": False, "clip_qkv": None},
    "phimoe": {"router_jitter_noise": 0.01},
    "starcoder2": {"sliding_window": None},
    "nemotron_h": {
        "mlp_bias": False,
        "layers_block_type": ["linear_attention", "full_attention", "moe", "linear_attention"],
    },
    "granitemoehybrid": {"intermediate_size": 208},
    "granitemoehybrid with state spaces": {"intermediate_size": 208},
    "cohere2": {"attention_bias": False},
    # A float32 of the file is equal.
    "olmo": {"attention_bias": False, "clip_qkv": 0.75},
    "hunyuan_v1_dense": {"attention_bias": False},
    "ministral3": {"sliding_window": None},
    "qwen3_5_text": {"attention_bias": False},
    "qwen2_moe": {"decoder_sparse_step": 1, "use_sliding_window": False},
    "lfm2_moe": {"routed_scaling_factor": 1.0},
    "ernie4_5_moe": {"use_bias": False},
    "glm4_moe": {"routed_scaling_factor": 1.75},
    "dots1": {
        "routed_scaling_factor": 1.75,
        "attention_bias": False,
        "sliding_window": None,
        "layer_types": ["full_attention"] * 2,
    },
    "smollm3": {
        "no_rope_layers": [1, 1],
        "use_sliding_window": False,
        "attention_bias": False,
        "mlp_bias": False,
    },
}


# ---- metadata -------------------------------------------------------------------------------------------


def multipliers(writer: Any, config: Config) -> None:
    if writer.arch != "minicpm":  # llama.cpp has no such field there
        writer.add_attention_scale(config["attention_multiplier"])
    writer.add_embedding_scale(config["embedding_multiplier"])
    writer.add_residual_scale(config["residual_multiplier"])
    writer.add_logit_scale(config["logits_scaling"])
    if config.get("shared_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config["shared_intermediate_size"])


def granite_4(writer: Any, config: Config) -> None:
    multipliers(writer, config)
    writer.add_ssm_conv_kernel(4)  # written without recurrent layers, too
    writer.add_ssm_inner_size(256)
    writer.add_rope_scaling_finetuned(True)
    writer.add_head_count_kv([config["num_key_value_heads"]] * config["num_hidden_layers"])


def state_space(writer: Any, config: Config) -> None:
    heads = config["mamba_n_heads"]
    writer.add_ssm_conv_kernel(config["mamba_d_conv"])
    writer.add_ssm_state_size(config["mamba_d_state"])
    writer.add_ssm_group_count(config["mamba_n_groups"])
    writer.add_ssm_inner_size(heads * config["mamba_d_head"])
    writer.add_ssm_time_step_rank(heads)


def granite_hybrid(writer: Any, config: Config) -> None:
    multipliers(writer, config)
    state_space(writer, config)
    writer.add_rope_scaling_finetuned(config["position_embedding_type"] == "rope")


def nemotron_h(writer: Any, config: Config) -> None:
    names = {
        "mamba_n_heads": "mamba_num_heads",
        "mamba_d_head": "mamba_head_dim",
        "mamba_n_groups": "n_groups",
        "mamba_d_state": "ssm_state_size",
        "mamba_d_conv": "conv_kernel",
    }
    state_space(writer, {common: config[own] for common, own in names.items()})
    kinds, has_experts = config["layers_block_type"], "moe" in config["layers_block_type"]
    network = "moe" if has_experts else "mlp"
    width = config["moe_intermediate_size" if has_experts else "intermediate_size"]
    heads = [config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds]
    for name in ("attention.head_count_kv", "feed_forward_length"):
        del writer.kv_data[0][f"{writer.arch}.{name}"]
    writer.add_head_count_kv(heads)
    writer.add_feed_forward_length([width * (kind == network) for kind in kinds])
    if has_experts:
        expert_width(writer, config)
        writer.add_expert_count(config["n_routed_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_shared_feed_forward_length(config["moe_shared_expert_intermediate_size"])
        writer.add_expert_shared_count(config["n_shared_experts"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_group_count(config["n_group"])


def minicpm_multipliers(writer: Any, config: Config) -> None:
    writer.add_embedding_scale(float(config["scale_emb"]))
    writer.add_residual_scale(config["scale_depth"] / config["num_hidden_layers"] ** 0.5)
    writer.add_logit_scale(config["hidden_size"] / config["dim_model_base"])


def window(writer: Any, config: Config) -> None:
    if config["sliding_window"]:
        writer.add_sliding_window(config["sliding_window"])


def soft_caps(writer: Any, config: Config) -> None:
    window(writer, config)
    if config["attn_logit_softcapping"]:
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def pattern(writer: Any, config: Config) -> None:
    writer.add_array(
        f"{writer.arch}.attention.sliding_window_pattern", [k.startswith("s") for k in config["layer_types"]]
    )
    writer.add_float32(
        f"{writer.arch}.rope.freq_base_swa", config["rope_parameters"]["sliding_attention"]["rope_theta"]
    )


def gemma3(writer: Any, config: Config) -> None:
    soft_caps(writer, config)
    pattern(writer, config)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(config["rope_parameters"]["full_attention"]["factor"])


def expert_width(writer: Any, config: Config) -> None:
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def mellum(writer: Any, config: Config) -> None:
    expert_width(writer, config)
    window(writer, config)
    pattern(writer, config)


def outputs_first(tensors: Tensors, _config: Config) -> Pairs:
    """Llama 4's experts, which checkpoints have with inputs first."""
    for name, values in tensors.items():
        match = re.search(r"layers\.(\d+)\..*experts\.(gate_up|down)_proj$", name)
        if not match:
            yield name, values
            continue
        members = ("gate", "up") if match[2] == "gate_up" else ("down",)
        for member, own in zip(members, np.split(values.swapaxes(1, 2), len(members), 1), strict=True):
            yield f"blk.{match[1]}.ffn_{member}_exps.weight", np.ascontiguousarray(own)


def inner_norms(tensors: Tensors, _config: Config) -> Pairs:
    """BitNet's norms, for which the package has the names of another publisher."""
    for name, values in tensors.items():
        match = re.search(r"layers\.(\d+)\..*\.(attn|ffn)_sub_norm\.weight", name)
        yield (f"blk.{match[1]}.{match[2]}_sub_norm.weight" if match else name), values


def by_members(tensors: Tensors, config: Config) -> Pairs:
    """GPT-NeoX's q, k and v, which checkpoints have head by head."""
    for name, values in tensors.items():
        if "query_key_value" in name:
            apart = values.reshape(config["num_attention_heads"], 3, -1, *values.shape[1:])
            values = apart.swapaxes(0, 1).reshape(values.shape)
        yield name, values


def parallel(writer: Any, config: Config) -> None:
    writer.add_parallel_residual(config["use_parallel_residual"])


def convolutions(writer: Any, config: Config) -> None:
    writer.add_shortconv_l_cache(config["conv_L_cache"])


def two_windows(writer: Any, config: Config) -> None:
    window(writer, config)
    if config["sliding_window"]:
        writer.add_sliding_window_pattern([kind.startswith("s") for kind in config["layer_types"]])


def gemma3n(writer: Any, config: Config) -> None:
    two_windows(writer, config)
    sliding = config["rope_parameters"]["sliding_attention"]
    writer.add_float32(f"{writer.arch}.rope.freq_base_swa", sliding["rope_theta"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_altup_active_idx(config["altup_active_idx"])
    writer.add_altup_num_inputs(config["altup_num_inputs"])
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_shared_kv_layers(config["num_kv_shared_layers"])
    deviations = [
        NormalDist().inv_cdf(one) if one else -math.inf for one in config["activation_sparsity_pattern"]
    ]
    writer.add_activation_sparsity_scale(deviations)


def deepseek2(writer: Any, config: Config) -> None:
    """Heads as those of one latent key, in place of those of `write_sizes`."""
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    changed = {"attention.head_count_kv": 1, "attention.key_length": rank + turned}
    changed |= {"attention.value_length": rank, "rope.dimension_count": turned}
    for name, value in changed.items():
        writer.kv_data[0][f"{writer.arch}.{name}"].value = value
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_kv_lora_rank(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + turned)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    first = config.get("mlp_layer_types", ["dense"] * config.get("first_k_dense_replace", 0)).count("dense")
    writer.add_leading_dense_block_count(first)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    softmax = config["model_type"] == "deepseek_v2"
    writer.add_expert_gating_func(
        gguf.ExpertGatingFuncType.SOFTMAX if softmax else gguf.ExpertGatingFuncType.SIGMOID
    )
    if not softmax:
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if config.get("n_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    rope = config["rope_parameters"]
    if rope["rope_type"] == "yarn":
        yarn(writer, rope)
        writer.add_rope_scaling_yarn_log_mul(0.1 * rope["mscale_all_dim"])


def latent_tensors(tensors: Tensors, config: Config) -> Pairs:
    """Keys and values of latent vectors apart and by heads, keys transposed; biases that help to choose."""
    heads, rows = config["num_attention_heads"], config["qk_nope_head_dim"]
    for name, values in expert_biases(tensors, config):
        if name.endswith("kv_b_proj.weight"):
            keys, others = np.split(values.reshape(heads, -1, values.shape[-1]), [rows], axis=1)
            yield name.replace("kv_b_proj", "k_b_proj"), np.ascontiguousarray(keys.swapaxes(1, 2))
            yield name.replace("kv_b_proj", "v_b_proj"), np.ascontiguousarray(others)
        else:
            yield name, values


def stacked_streams(tensors: Tensors, _config: Config) -> Pairs:
    """Gemma 3n's linears that open and close streams in stacks, and a scale with an ending."""
    for module in ("altup_projections", "altup_unembed_projections"):
        names = sorted(name for name in tensors if name.startswith(f"model.{module}."))
        yield f"model.{module}.weight", np.stack([tensors.pop(name) for name in names])
    for name, values in tensors.items():
        yield f"{name}.weight" if name.endswith("_scale") else name, values


def gemma4(writer: Any, config: Config) -> None:
    """Heads of layers without a window in place of those of `write_sizes`, and what stops parts of them."""
    two_windows(writer, config)
    full, sliding = (config["rope_parameters"][f"{one}_attention"] for one in ("full", "sliding"))
    kinds, own = config["layer_types"], config["per_layer_config"]
    whole = next(own.get(str(layer), {}) for layer, kind in enumerate(kinds) if kind.startswith("f"))
    wide = whole.get("head_dim", config["head_dim"])
    changed = {"attention.key_length": wide, "attention.value_length": wide, "rope.dimension_count": wide}
    for name, value in changed.items():
        writer.kv_data[0][f"{writer.arch}.{name}"].value = value
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    writer.add_uint32(f"{writer.arch}.rope.dimension_count_swa", config["head_dim"])
    writer.add_float32(f"{writer.arch}.rope.freq_base_swa", sliding["rope_theta"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_embedding_length_per_layer_input(config.get("hidden_size_per_layer_input") or 0)
    shared = config.get("num_kv_shared_layers", 0)
    writer.add_shared_kv_layers(shared)
    if "num_key_value_heads" in whole:
        counts = whole["num_key_value_heads"], config["num_key_value_heads"]
        heads = [counts[kind.startswith("s")] for kind in kinds]
        del writer.kv_data[0][f"{writer.arch}.attention.head_count_kv"]
        writer.add_head_count_kv(heads)
    if config.get("enable_moe_block"):
        expert_width(writer, config)
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
    if config.get("use_double_wide_mlp"):
        width = config["intermediate_size"]
        del writer.kv_data[0][f"{writer.arch}.feed_forward_length"]
        writer.add_feed_forward_length([width] * (len(kinds) - shared) + [2 * width] * shared)
    turning = int(wide * full["partial_rotary_factor"] / 2)
    divisors = [1.0] * turning + [1e30] * (wide // 2 - turning)
    writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))


def olmo(writer: Any, config: Config) -> None:
    writer.add_clamp_kqv(config["clip_qkv"])


def cohere2(writer: Any, config: Config) -> None:
    two_windows(writer, config)
    writer.add_logit_scale(config["logit_scale"])


def olmo3(writer: Any, config: Config) -> None:
    two_windows(writer, config)
    full, sliding = (config["rope_parameters"][f"{one}_attention"] for one in ("full", "sliding"))
    writer.add_float32(f"{writer.arch}.rope.freq_base_swa", sliding["rope_theta"])
    yarn(writer, full)


def yarn(writer: Any, rope: Config) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def ministral3(writer: Any, config: Config) -> None:
    rope = config["rope_parameters"]
    yarn(writer, rope)
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def hunyuan(writer: Any, config: Config) -> None:
    """The base that alpha stretches, in place of that of `write_rope`."""
    rope, dim = config["rope_parameters"], config["head_dim"]
    base = rope["rope_theta"] * rope["alpha"] ** (dim / (dim - 2))
    writer.kv_data[0][f"{writer.arch}.rope.freq_base"].value = base
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    writer.add_rope_scaling_factor(1)


def delta_net(writer: Any, config: Config) -> None:
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
    recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    if recurrent != [(layer + 1) % 2 != 0 for layer in range(len(recurrent))]:
        writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)
    else:
        writer.add_full_attention_interval(2)
    if "num_experts" in config:
        shared_expert(writer, config)


def shared_expert(writer: Any, config: Config) -> None:
    expert_width(writer, config)
    writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])


def lfm2_moe(writer: Any, config: Config) -> None:
    convolutions(writer, config)
    expert_width(writer, config)
    writer.add_leading_dense_block_count(config["num_dense_layers"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def ernie_moe(writer: Any, config: Config) -> None:
    expert_width(writer, config)
    writer.add_interleave_moe_layer_step(config["moe_layer_interval"])
    writer.add_leading_dense_block_count(config["moe_layer_start_index"])
    writer.add_expert_shared_count(config["moe_num_shared_experts"])


def llama4(writer: Any, config: Config) -> None:
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    writer.add_interleave_moe_layer_step(config["interleave_moe_layer_step"])


def sigmoid_moe(writer: Any, config: Config) -> None:
    expert_width(writer, config)
    dense = config.get("mlp_layer_types", ()).count("dense")
    writer.add_leading_dense_block_count(config.get("first_k_dense_replace", dense))
    writer.add_expert_shared_count(config.get("n_shared_experts") or config["num_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config["model_type"] == "exaone_moe":
        two_windows(writer, config)


# ---- tensors --------------------------------------------------------------------------------------------


def as_they_are(tensors: Tensors, _config: Config) -> Pairs:
    return tensors.items()


def permuted(values: np.ndarray, heads: int) -> np.ndarray:
    """The rows of q or k as LlamaModel.permute orders them."""
    split = values.reshape(heads, 2, len(values) // heads // 2, *values.shape[1:])
    return split.swapaxes(1, 2).reshape(values.shape)


def in_pairs(tensors: Tensors, config: Config) -> Pairs:
    """q and k of Llama and others whose RoPE rotates neighbours in llama.cpp, and not in transformers."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, values in tensors.items():
        module = name.split(".")[-2]
        yield name, permuted(values, heads[module]) if module in heads else values


def one_more(tensors: Tensors, _config: Config) -> Pairs:
    """Norms with 1 + w in place of w."""
    for name, values in tensors.items():
        yield name, values + np.float32(1) if name.endswith("norm.weight") else values


def without_groups(tensors: Tensors, config: Config) -> Pairs:
    """InternLM2's wqkv, taken apart."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for name, values in tensors.items():
        if "wqkv" not in name:
            yield name, values
            continue
        layer, ending = name.split(".")[2], name.rpartition(".")[2]
        groups = values.reshape(kv_heads, heads // kv_heads + 2, -1, *values.shape[1:])
        q, k, v = (part.reshape(-1, *values.shape[1:]) for part in np.split(groups, [-2, -1], 1))
        yield f"blk.{layer}.attn_q.{ending}", permuted(q, heads)
        yield f"blk.{layer}.attn_k.{ending}", permuted(k, kv_heads)
        yield f"blk.{layer}.attn_v.{ending}", v


def granite_experts(tensors: Tensors, config: Config) -> Pairs:
    """Granite's stacks of gate and up, taken apart."""
    dense = not config.get("num_local_experts")
    for name, values in in_pairs(tensors, config):
        layer = name.split(".")[2] if ".layers." in name else ""
        if "input_linear" in name:
            ending = "exps" if "sparse" in name else "shexp"
            for member, half in zip(("gate", "up"), np.split(values, 2, -2), strict=True):
                yield f"blk.{layer}.ffn_{member}{'' if dense else f'_{ending}'}.weight", half
        elif dense and "shared_mlp.output_linear" in name:
            yield f"blk.{layer}.ffn_down.weight", values
        else:
            yield name, values


def space_tensors(pairs: Pairs, groups: int) -> Pairs:
    """State spaces, whose vectors have further axes."""
    for name, values in pairs:
        own = name.replace(".dt_bias", ".dt_proj.bias")
        if name.endswith("A_log"):
            yield own, -np.exp(values)[:, None]
        elif name.endswith(".D"):
            yield own, values[:, None]
        elif re.search(r"(mamba|mixer)\.norm\.weight$", name):
            yield own, values.reshape(groups, -1)
        else:
            yield own, values.squeeze() if name.endswith("conv1d.weight") else values


def granite_spaces(tensors: Tensors, config: Config) -> Pairs:
    return space_tensors(granite_experts(tensors, config), config["mamba_n_groups"])


def falcon_tensors(tensors: Tensors, config: Config) -> Pairs:
    """Falcon-H1's factors, folded into the weights."""
    inputs = config["attention_in_multiplier"]
    gate, down = config["mlp_multipliers"]
    width, shared = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    parts = np.repeat(
        config["ssm_multipliers"], [width, width, shared, shared, config["mamba_n_heads"]]
    ).astype(np.float32)
    factors = {
        "q_proj": inputs,
        "k_proj": inputs * config["key_multiplier"],
        "v_proj": inputs,
        "o_proj": config["attention_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"] * parts[:, None],
        "out_proj": config["ssm_out_multiplier"],
        "gate_proj": gate,
        "down_proj": down,
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    own = {name: values * factors.get(name.split(".")[-2], 1) for name, values in tensors.items()}
    for name, values in space_tensors(own.items(), config["mamba_n_groups"]):
        yield name, np.float32(values)


def nemotron_tensors(tensors: Tensors, config: Config) -> Pairs:
    """State spaces, and experts of a layer in one stack."""
    names = {"mixer.gate.e_score_correction_bias": "exp_probs_b.bias"}
    for name, values in space_tensors(tensors.items(), config["n_groups"]):
        match = re.fullmatch(r"backbone\.layers\.(\d+)\.(.+)", name)
        own = names.get(match[2]) if match else None
        yield (f"blk.{match[1]}.{own}" if match and own else name), values


def gpt_oss(writer: Any, config: Config) -> None:
    window(writer, config)
    writer.add_expert_feed_forward_length(config["intermediate_size"])
    yarn(writer, config["rope_parameters"])


def alternating(tensors: Tensors, _config: Config) -> Pairs:
    """gpt-oss' stacks, whose gate and up alternate and whose inputs come first."""
    for name, values in tensors.items():
        match = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias)?", name)
        if match is None:
            yield f"{name}.weight" if name.endswith(".sinks") else name, values
            continue
        members = ("gate", "up") if match[2] == "gate_up" else ("down",)
        for first, member in enumerate(members):
            own = values[..., first :: len(members)]
            ending, own = ("bias", own) if match[3] else ("weight", own.swapaxes(1, 2))
            yield f"blk.{match[1]}.ffn_{member}_exps.{ending}", np.ascontiguousarray(own)


def flat_taps(tensors: Tensors, _config: Config) -> Pairs:
    for name, values in tensors.items():
        yield name, values[:, 0] if "conv.conv" in name else values


def in_turns(values: np.ndarray, config: Config, axis: int = 0, width: int = 0) -> np.ndarray:
    """Value heads of Qwen3.5: the first of each key head, then the second of each."""
    keys, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    moved = np.moveaxis(values, axis, 0)
    split = moved.reshape(keys, heads // keys, width or config["linear_value_head_dim"], *moved.shape[1:])
    return np.moveaxis(split.swapaxes(0, 1).reshape(moved.shape), 0, axis)


def delta_tensors(tensors: Tensors, config: Config) -> Pairs:
    """Qwen3.5's delta nets and norms."""
    keys = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"]
    for name, values in one_more(tensors, config):
        if name.endswith("linear_attn.norm.weight"):
            values = tensors[name]
        elif name.endswith(("in_proj_qkv.weight", "conv1d.weight")):
            values = values.squeeze() if "conv1d" in name else values
            values = np.concatenate([values[:keys], in_turns(values[keys:], config)])
        elif name.endswith("in_proj_z.weight"):
            values = in_turns(values, config)
        elif name.endswith(("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias")):
            values = in_turns(values, config, width=1)
        elif name.endswith("out_proj.weight"):
            values = in_turns(values, config, axis=1)
        yield from named_delta(name, values)


def named_delta(name: str, values: np.ndarray) -> Pairs:
    if name.endswith("A_log"):
        values = -np.exp(values)
    name = name.replace(".dt_bias", ".dt_proj.bias")
    if name.endswith("shared_expert_gate.weight"):
        values = values.squeeze()
    stack = re.fullmatch(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj", name)
    if stack is None:
        yield name, values
    elif stack[2] == "down":
        yield f"blk.{stack[1]}.ffn_down_exps.weight", values
    else:
        for member, half in zip(("gate", "up"), np.split(values, 2, 1), strict=True):
            yield f"blk.{stack[1]}.ffn_{member}_exps.weight", np.ascontiguousarray(half)


def qwen3_next(tensors: Tensors, config: Config) -> Pairs:
    """Qwen3-Next's linears by key heads, taken apart."""
    keys, values_of = config["linear_num_key_heads"], config["linear_num_value_heads"]
    widths = [config["linear_key_head_dim"]] * 2 + [values_of // keys * config["linear_value_head_dim"]]
    for name, values in one_more(tensors, config):
        if name.endswith("in_proj_qkvz.weight"):
            layer = name.split(".")[2]
            parts = np.split(values.reshape(keys, -1, values.shape[1]), np.cumsum(widths), 1)
            *qkv, z = (part.reshape(-1, values.shape[1]) for part in parts)
            yield f"blk.{layer}.attn_qkv.weight", np.concatenate(qkv)
            yield f"blk.{layer}.attn_gate.weight", z
            continue
        if name.endswith("linear_attn.norm.weight"):
            values = tensors[name]
        yield from named_delta(name, values.squeeze() if "conv1d" in name else values)


def shared_gate(tensors: Tensors, _config: Config) -> Pairs:
    for name, values in tensors.items():
        yield name, values.squeeze() if "shared_expert_gate" in name else values


def expert_biases(tensors: Tensors, config: Config) -> Pairs:
    """Biases that help to choose experts, beside flat convolutions."""
    for name, values in flat_taps(tensors, config):
        match = re.search(r"layers\.(\d+)\..*(expert_bias|correction_bias)$", name)
        yield (f"blk.{match[1]}.exp_probs_b.bias", values.squeeze()) if match else (name, values)


def scalars(tensors: Tensors, _config: Config) -> Pairs:
    """Gemma 4's scalars of layers, and factors of routers and experts, which are stacked."""
    owns = {
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        "experts.gate_up_proj": "ffn_gate_up_exps.weight",
        "experts.down_proj": "ffn_down_exps.weight",
        "layer_scalar": "layer_output_scale.weight",
    }
    for name, values in tensors.items():
        layer, _, below = name.removeprefix("model.layers.").partition(".")
        yield f"blk.{layer}.{owns[below]}" if below in owns else name, values


class Converter(NamedTuple):
    """What llama.cpp's converter of a model type writes.

    Args:
        stated: Value of ``general.architecture``.
        metadata: Adds the fields that other architectures lack.
        tensors: Yields the tensors, under the checkpoint's names or llama.cpp's.
        epsilon: Field of ``config.json`` for the number added in norms.
        centered: Whether it is written as that of LayerNorm.
        names: The architecture with the package's names, where it lacks the own one.
    """

    stated: str
    metadata: Callable[[Any, Config], None] = lambda _writer, _config: None
    tensors: Callable[[Tensors, Config], Pairs] = as_they_are
    epsilon: str = "rms_norm_eps"
    centered: bool = False
    names: str = ""


CONVERTERS = {
    "llama": Converter("llama", tensors=in_pairs),
    "mistral": Converter("mistral3", tensors=in_pairs),
    "smollm3": Converter("smollm3", tensors=in_pairs),
    "apertus": Converter("apertus"),
    "bitnet": Converter("bitnet", tensors=inner_norms),
    "arcee": Converter("arcee", tensors=in_pairs),
    "internlm2": Converter("internlm2", tensors=without_groups),
    "minicpm": Converter("minicpm", minicpm_multipliers, in_pairs),
    "qwen2": Converter("qwen2"),
    "qwen3": Converter("qwen3"),
    "phi": Converter("phi2", epsilon="layer_norm_eps", centered=True),
    "phi3": Converter("phi3", window),
    "gemma": Converter("gemma", tensors=one_more),
    "gemma2": Converter("gemma2", soft_caps, one_more),
    "gemma3_text": Converter("gemma3", gemma3, one_more),
    "gemma3n_text": Converter("gemma3n", gemma3n, stacked_streams),
    "gemma4_text": Converter("gemma4", gemma4, scalars),
    "gemma4_unified_text": Converter("gemma4", gemma4, scalars),
    "granite": Converter("granite", multipliers, in_pairs),
    "stablelm": Converter("stablelm", parallel, epsilon="layer_norm_eps", centered=True),
    "seed_oss": Converter("seed_oss"),
    "ernie4_5": Converter("ernie4_5"),
    "glm": Converter("chatglm"),
    "glm4": Converter("glm4"),
    "gpt_neox": Converter("gptneox", parallel, by_members, "layer_norm_eps", centered=True),
    "starcoder2": Converter("starcoder2", epsilon="norm_epsilon", centered=True),
    "nemotron": Converter("nemotron", tensors=one_more, epsilon="norm_eps", centered=True),
    "exaone": Converter("exaone"),
    "olmo": Converter("olmo", olmo, in_pairs, centered=True),
    "olmo2": Converter("olmo2"),
    "olmo3": Converter("olmo2", olmo3),
    "exaone4": Converter("exaone4", two_windows),
    "cohere2": Converter("cohere2", cohere2, epsilon="layer_norm_eps", centered=True),
    "ministral3": Converter("mistral3", ministral3, in_pairs),
    "hunyuan_v1_dense": Converter("hunyuan-dense", hunyuan),
    "qwen3_5_text": Converter("qwen35", delta_net, delta_tensors),
    "lfm2": Converter("lfm2", convolutions, flat_taps, "norm_eps"),
    "mixtral": Converter("llama", tensors=in_pairs),
    "qwen3_moe": Converter("qwen3moe", expert_width),
    "olmoe": Converter("olmoe"),
    "qwen2_moe": Converter("qwen2moe", shared_expert, shared_gate),
    "qwen3_5_moe_text": Converter("qwen35moe", delta_net, delta_tensors),
    "qwen3_next": Converter("qwen3next", delta_net, qwen3_next),
    "lfm2_moe": Converter("lfm2moe", lfm2_moe, expert_biases, "norm_eps"),
    "glm4_moe": Converter("glm4moe", sigmoid_moe, expert_biases),
    **{
        kind: Converter("deepseek2", deepseek2, latent_tensors)
        for kind in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
    },
    "dots1": Converter("dots1", sigmoid_moe, expert_biases),
    "exaone_moe": Converter("exaone-moe", sigmoid_moe, expert_biases),
    "llama4_text": Converter("llama4", llama4, outputs_first),
    "ernie4_5_moe": Converter("ernie4_5-moe", ernie_moe, expert_biases),
    "mellum": Converter("mellum", mellum, names="qwen3moe"),
    "phimoe": Converter("phimoe", window),
    "gpt_oss": Converter("gpt-oss", gpt_oss, alternating),
    "granitemoe": Converter("granitemoe", multipliers, granite_experts),
    "granitemoeshared": Converter("granitemoe", multipliers, granite_experts),
    "granitemoehybrid": Converter("granite", granite_4, granite_experts),
    "falcon_h1": Converter("falcon-h1", state_space, falcon_tensors),
    "nemotron_h": Converter("nemotron_h_moe", nemotron_h, nemotron_tensors, "layer_norm_epsilon"),
    "granitemoehybrid with state spaces": Converter("granitehybrid", granite_hybrid, granite_spaces),
}
"""By model type, which other words may follow."""


def write_gguf(
    folder: Path,
    path: Path,
    kind: Types = Types.F16,
    head: Types = Types.F16,
    others: Iterable[tuple[str, Types]] = (),
    stated: str = "",
) -> Path:
    """Write a checkpoint as GGUF.

    Args:
        folder: The checkpoint.
        path: The file.
        kind: Type of the weights.
        head: Type of embedding and head.
        others: Pairs of a part of tensors' names and their type.
        stated: The architecture, where another has the same tensors.
    """
    config = json.loads((folder / "config.json").read_text())
    config.setdefault("num_hidden_layers", len(config.get("layers_block_type", ())))
    named = config["model_type"]
    with_spaces = f"{named} with state spaces"
    has_spaces = with_spaces in CONVERTERS and "linear_attention" in config["layer_types"]
    converter = CONVERTERS[with_spaces if has_spaces else named]
    if stated:
        converter = converter._replace(stated=stated)
    writer = gguf.GGUFWriter(path, converter.stated)
    write_sizes(writer, config)
    epsilon = config.get(converter.epsilon, 1e-5)
    (writer.add_layer_norm_eps if converter.centered else writer.add_layer_norm_rms_eps)(epsilon)
    write_rope(writer, config, folder)
    converter.metadata(writer, config)
    write_tokenizer(writer, folder)
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(
        numbers[converter.names or converter.stated], config["num_hidden_layers"]
    )
    loaded = load_file(folder / "model.safetensors")
    floats = {name: values.astype(np.float32) for name, values in loaded.items()}
    write_xielu(writer, floats)
    for name, values in converter.tensors(stacked(floats), config):
        if name == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue
        own = name if name.startswith("blk.") else names.get_name(name, (".weight", ".bias"))
        assert own, f"the package has no name for {name}"
        write_tensor(writer, own, values, kind, head, others)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_xielu(writer: Any, floats: Tensors) -> None:
    """Write the numbers of activations, which are no tensors in the file."""
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        owns = [one for one in floats if one.endswith(f".act_fn.{name}")]
        if owns:
            getattr(writer, f"add_xielu_{name}")([float(floats.pop(own).item()) for own in sorted(owns)])


def write_sizes(writer: Any, config: Config) -> None:
    heads = config["num_attention_heads"]
    key_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    width = config.get("intermediate_size_mlp") or config["intermediate_size"]
    if "conv" in config.get("layer_types", ()):
        key_heads = [0 if kind == "conv" else key_heads for kind in config["layer_types"]]
    if "mamba_d_state" in config and "linear_attention" in config.get("layer_types", ()):
        key_heads = [0 if kind == "linear_attention" else key_heads for kind in config["layer_types"]]
    if config["model_type"] == "lfm2":
        multiple = config["block_multiple_of"]
        width = int(config["block_ffn_dim_multiplier"] * int(2 * width / 3))
        width = multiple * ((width + multiple - 1) // multiple)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(width)
    if config["model_type"] in MIXTURES or config.get("num_local_experts"):
        names = ("num_local_experts", "moe_num_experts", "n_routed_experts", "num_experts")
        writer.add_expert_count(next(filter(None, (config.get(name) for name in names))))
        writer.add_expert_used_count(config.get("moe_k") or config["num_experts_per_tok"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)


def write_rope(writer: Any, config: Config, folder: Path) -> None:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {"rope_theta": config.get("rope_theta", 10000.0)}
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1)))
    if rope.get("rope_type") == "llama3":
        loaded = ModelConfig.from_folder(folder).rope
        wavelengths = rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
        _, sin = rope_tables(loaded, head_dim, 2)
        factors = 1 / (np.arcsin(np.clip(sin[1].astype(np.float64), -1, 1)) * wavelengths)
        writer.add_tensor("rope_freqs.weight", factors.astype(np.float32))
    if rope.get("rope_type") == "longrope":
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
        original = rope.get("original_max_position_embeddings") or config["original_max_position_embeddings"]
        writer.add_rope_scaling_orig_ctx_len(original)
        writer.add_rope_scaling_attn_factors(longrope_factor(config["max_position_embeddings"], original))


def longrope_factor(context: int, original: int) -> float:
    return math.sqrt(1 + math.log(context / original) / math.log(original))


OVERRIDES["phimoe"]["rope_parameters"] = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "original_max_position_embeddings": 32,
    "short_factor": [1.5 + 0.2 * pair for pair in range(16)],
    "long_factor": [1.5 + 0.2 * pair for pair in range(16)],
    **dict.fromkeys(("short_mscale", "long_mscale"), longrope_factor(2048, 32)),
}


def write_tensor(
    writer: Any, own: str, values: np.ndarray, kind: Types, head: Types, others: Iterable[tuple[str, Types]]
) -> None:
    kept = ("gate_inp", "altup_router", "altup_predict", "altup_correct")
    module = own.split(".")[-2]
    if values.ndim == 1 or own.endswith("exps.bias") or "conv" in module or any(one in own for one in kept):
        writer.add_tensor(own, values)
        return
    chosen = head if own in ("token_embd.weight", "output.weight") else kind
    chosen = next((other for part, other in others if part in own), chosen)
    if chosen in (Types.Q4_K, Types.Q6_K):
        data = random_blocks(BLOCK_TYPES[chosen], math.prod(values.shape[:-1]), values.shape[-1])
        data = data.reshape(*values.shape[:-1], -1)
    else:
        data = gguf.quantize(values, chosen)
    writer.add_tensor(own, data, raw_dtype=chosen)


def stacked(tensors: Tensors) -> Tensors:
    """The tensors with each layer's experts as one, under llama.cpp's names."""
    found, stacks = {}, {}
    for name, values in tensors.items():
        match = re.fullmatch(r"(?:model|backbone)\.layers\.(\d+)\..*experts\.\d+\.(\w+)\.weight", name)
        if match:
            member = STACKS.get(match[2], match[2].removesuffix("_proj"))
            stacks.setdefault(f"blk.{match[1]}.ffn_{member}_exps.weight", {})[name] = values
        else:
            found[name] = values
    numbered = {
        own: sorted(parts, key=lambda name: int(name.rpartition("experts.")[2].partition(".")[0]))
        for own, parts in stacks.items()
    }
    return found | {own: np.stack([tensors[name] for name in names]) for own, names in numbered.items()}


def write_tokenizer(writer: Any, folder: Path) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    vocab = {**content["model"]["vocab"], **special}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(sorted(vocab, key=vocab.get))
    writer.add_token_types([3 if token in special else 1 for token in sorted(vocab, key=vocab.get)])
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    if "eos_token" in config:
        writer.add_eos_token_id(vocab[config["eos_token"]])
    writer.add_chat_template("{% for m in messages %}[{{ m['content'] }}]{% endfor %}")


def random_blocks(kind: Any, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random bytes, with scales in the range of trained weights."""
    rng = np.random.default_rng(seed)
    data = rng.integers(0, 256, (rows * columns // kind.block, kind.block_bytes), np.uint8)
    places = {
        **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
        "Q2_K": (80, 82),
        "Q3_K": (108,),
        "Q6_K": (208,),
        "TQ1_0": (52,),
        "TQ2_0": (64,),
        "MXFP4": (),
    }
    if kind.name == "MXFP4":
        data[:, 0] = rng.integers(115, 125, len(data))
    for place in places.get(kind.name, (0,)):
        scales = (rng.uniform(0.5, 2, len(data)) * 1e-2).astype(np.float16)
        data[:, place : place + 2] = scales.view(np.uint8).reshape(-1, 2)
    return data.reshape(rows, -1)


# ---- changed files --------------------------------------------------------------------------------------

GLOBAL = ("xielu", "general", "tokenizer", "split", "quantize", "mradermacher", "llama")
"""Name spaces that are not short here."""


def key(name: str, stated: str) -> str:
    """The full name of a field; names of the architecture's own are short here."""
    return name if name.partition(".")[0] in GLOBAL else f"{stated}.{name}"


def rewritten(
    source: Path, target: Path, changes: dict[str, Any], tensors: dict[str, Any] | None = None
) -> Path:
    """Write a GGUF file again with other metadata and tensors; None removes one."""
    file = GgufFile.open(source)
    stated = str(file.metadata["general.architecture"])
    values = {**file.metadata, **{key(name, stated): value for name, value in changes.items()}}
    writer = gguf.GGUFWriter(target, stated)
    alignment = values.pop("general.alignment", None)
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    del values["general.architecture"]
    for name, value in values.items():
        if value is not None:
            add_value(writer, name, value)
    kept = {name: file.bits(name).view("<f4").reshape(entry.shape) for name, entry in file.entries.items()}
    for name, data in {**kept, **(tensors or {})}.items():
        if data is not None:
            writer.add_tensor(name, np.asarray(data, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def add_value(writer: Any, name: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(name, value)
    elif isinstance(value, int):
        (writer.add_int32 if value < 0 else writer.add_uint32)(name, value)
    elif isinstance(value, float):
        writer.add_float32(name, value)
    else:
        (writer.add_string if isinstance(value, str) else writer.add_array)(name, value)
