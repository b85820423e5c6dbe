"""The table of config.json's fields, row by row, against transformers' configuration classes and models.

A field that is read changes the logits, which stay those of transformers; one without effect changes
neither; a refused one is named. A row without a value below fails.
"""

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from own_code import OWN_CODE

from heterollm.base import HeteroLLMError, UnsupportedModelError
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.llm import LLM
from heterollm.model import ModelConfig, read_sampling_defaults
from heterollm.model.families import CONFIG_FIELDS, FAMILIES
from heterollm.model.fields.rope import ROPE_FIELDS
from heterollm.model.fields.table import Field, FieldTable

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
import muse_model  # noqa: E402

muse_model.register()

LEAST_DB = 90
IDS = [int(one) for one in np.random.default_rng(3).integers(3, 150, 44)]
COMMON: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GEMMA4: dict[str, Any] = {
    "global_head_dim": 32,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
GEMMA4_KINDS = ("gemma4_text", "gemma4_unified_text")
OWN: dict[str, dict[str, Any]] = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16, "sliding_window_pattern": 2},
    "gemma3n_text": {
        **{
            name: value
            for name, value in GEMMA4.items()
            if name not in ("global_head_dim", "rope_parameters")
        },
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 256,
        "laurel_rank": 16,
        "rope_theta": 1000.0,
        "rope_local_base_freq": 100.0,
    },
    "muse_glimmer_text": {"rope_theta": 1000.0},
    "gemma4_text": {
        **GEMMA4,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 256,
        "num_experts": 4,
        "top_k_experts": 1,
        "moe_intermediate_size": 32,
    },
    "gemma4_unified_text": GEMMA4,
    "mixtral": {"rope_theta": 10_000.0},
    "smollm3": {"no_rope_layer_interval": 2, "rope_theta": 10_000.0},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "phimoe": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 0.7},
    "mellum": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": False,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10_000.0}
            for kind in ("full_attention", "sliding_attention")
        },
    },
    "granitemoehybrid": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
        "layer_types": ["linear_attention", "full_attention"],
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*-E",
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "n_groups": 1,
        "ssm_state_size": 16,
        "n_routed_experts": 4,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 48,
    },
    "falcon_h1": {"mamba_d_ssm": 128, "mamba_n_heads": 4, "mamba_d_state": 16},
    **{
        kind: {
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 24,
            # In transformers another name of the part that rotates.
            "head_dim": ...,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "first_k_dense_replace": 1,
            **({"n_group": 1, "topk_group": 1} if kind == "deepseek_v3" else {}),
        }
        for kind in ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
    },
    "stablelm": {"num_key_value_heads": 4},
    "gpt_neox": {"rotary_pct": 1.0},
    "opt": {"ffn_dim": 96},
    **{kind: {"rope_theta": 10_000.0} for kind in ("starcoder2", "arcee")},
    **{kind: {"partial_rotary_factor": 1.0, "rope_theta": 10_000.0} for kind in ("phi", "nemotron")},
    "lfm2": {"full_attn_idxs": [1], "block_multiple_of": 16, "rope_theta": 10_000.0},
    "qwen3_5_text": {
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "partial_rotary_factor": 1.0,
    },
    "qwen3_5_moe_text": {
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "partial_rotary_factor": 1.0,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    },
    "qwen3_next": {
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "partial_rotary_factor": 1.0,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "norm_topk_prob": False,
    },
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_layer_start_index": 0,
        "rope_theta": 10_000.0,
    },
    "dots1": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
    },
    "exaone_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": False,
    },
    "glm4_moe": {
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "partial_rotary_factor": 1.0,
        "rope_theta": 10_000.0,
        "norm_topk_prob": False,
    },
    "cohere2": {"sliding_window_pattern": 2},
    "llama4_text": {
        "num_local_experts": 4,
        "intermediate_size_mlp": 64,
        "no_rope_layer_interval": 2,
        "floor_scale": 16,
        "attn_scale": 0.3,
        "use_qk_norm": False,
        "rope_theta": 10_000.0,
    },
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
        "norm_topk_prob": False,
        "use_expert_bias": False,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "rope_theta": 10_000.0,
    },
    "ernie4_5": {"rope_theta": 10_000.0},
    **{kind: {"partial_rotary_factor": 1.0, "attention_bias": False} for kind in ("glm", "glm4")},
    "internlm3": {"rope_theta": 10_000.0},
    "lfm3": {"layer_types": ["conv", "sliding_attention"]},
    "cwm": {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
}
# Fields beside the one in question, in both models: a window that is in use, or a scaling.
USED = {"use_sliding_window": True, "max_window_layers": 0}
WINDOW = {**USED, "sliding_window": 8}
YARN = {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}}
ALIKE = {name: [1.0 + 0.1 * one for one in range(8)] for name in ("short_factor", "long_factor")}
"""Factors for PhiMoE, whose long ones transformers leaves out, and the model's own code does not."""
LONG = {"short_factor": [1.0 + 0.1 * one for one in range(8)], "long_factor": [2.0 + one for one in range(8)]}
GROUPS: dict[str, Any] = {"n_group": 4, "topk_group": 1, "n_routed_experts": 8, "num_experts": 8}
GROUPED: dict[str, Any] = {**GROUPS, "topk_method": "group_limited_greedy"}
BESIDE: dict[str, dict[str, Any]] = {
    "n_group": {**GROUPS, "n_group": 1},
    "topk_group": GROUPS,
    "sliding_window": USED,
    "use_sliding_window": {"sliding_window": 8, "max_window_layers": 0},
    "max_window_layers": WINDOW,
    "layer_types": WINDOW,
    "sliding_window_pattern": WINDOW,
    "rope_local_base_freq": WINDOW,
    "original_max_position_embeddings": YARN,
}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000.0}
NESTED = {"full_attention": LINEAR, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
VALUES: dict[str, Any] = {
    "vocab_size": 192,
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 0.01,
    "tie_word_embeddings": True,
    "bos_token_id": 5,
    "eos_token_id": [3, 4],
    "pad_token_id": 6,
    "rope_parameters": LINEAR,
    "rope_scaling": {"type": "linear", "factor": 4.0},
    "rope_theta": 300.0,
    "original_max_position_embeddings": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "silu",
    "attention_bias": True,
    "mlp_bias": True,
    "use_qkv_bias": True,
    "use_bias": True,
    "attention_out_bias": True,
    **dict.fromkeys(("layer_norm_eps", "norm_eps", "norm_epsilon"), 0.01),
    "rotary_pct": 0.5,
    "rotary_emb_base": 300.0,
    "enable_bias": False,
    "ffn_dim": 128,
    "word_embed_proj_dim": 32,
    "activation_function": "silu",
    "global_head_dim": 48,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 1,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 320,
    "altup_active_idx": 1,
    "qk_scale_factor": 1.5,
    "post_norm_eps": 0.25,
    "output_multiplier": 0.7,
    "altup_num_inputs": 3,
    "altup_correct_scale": False,
    "laurel_rank": 32,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.8],
    "enable_moe_block": True,
    "n_routed_experts": 6,
    "num_shared_experts": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 2,
    **dict.fromkeys(("n_group", "topk_group"), 2),
    "top_k_experts": 2,
    "conv_L_cache": 4,
    "conv_bias": True,
    "full_attn_idxs": [0],
    "block_ff_dim": 144,
    "block_auto_adjust_ff_dim": False,
    "block_ffn_dim_multiplier": 1.5,
    "block_multiple_of": 48,
    "tie_embedding": True,
    "full_attention_interval": 1,
    "linear_conv_kernel_dim": 3,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 8,
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), 2),
    **dict.fromkeys(("ssm_state_size", "conv_kernel"), 3),
    "mamba_head_dim": 24,
    "use_conv_bias": False,
    "mlp_hidden_act": "silu",
    "moe_shared_expert_intermediate_size": 32,
    "q_lora_rank": 32,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "rope_interleave": False,
    "topk_method": "group_limited_greedy",
    "mamba_d_ssm": 96,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    **dict.fromkeys(("key_multiplier", "attention_in_multiplier", "attention_out_multiplier"), 0.6),
    **dict.fromkeys(("ssm_in_multiplier", "ssm_out_multiplier", "lm_head_multiplier"), 1.7),
    "ssm_multipliers": [0.9, 0.7, 1.4, 1.6, 0.5],
    "mlp_multipliers": [0.8, 1.7],
    "layers_block_type": ["full_attention", "linear_attention", "mlp", "moe"],
    "hybrid_override_pattern": "E-M*",
    "mamba_d_state": 24,
    "mamba_d_head": 16,
    "mamba_d_conv": 3,
    "mamba_expand": 4,
    "mamba_conv_bias": False,
    "sliding_window": 8,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "layer_types": ["sliding_attention", "full_attention"],
    "mlp_layer_types": ["dense", "sparse"],
    "sliding_window_pattern": 1,
    "rope_local_base_freq": 50.0,
    "no_rope_layer_interval": 1,
    "no_rope_layers": [0, 1],
    "partial_rotary_factor": 0.5,
    "query_pre_attn_scalar": 4,
    "attn_logit_softcapping": 1.0,
    "final_logit_softcapping": 1.0,
    "num_layers": 3,
    "layer_rope_theta": [300.0, 0],
    "layer_norm_epsilon": 0.01,
    "num_local_experts": 6,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "qkv_bias": False,
    "bias": True,
    **dict.fromkeys(("use_sandwich_norm", "use_attention_gate"), False),
    "logit_scale": 0.5,
    "swiglu_limit": 0.1,
    "swiglu_alpha": 4.0,
    "moe_num_experts": 6,
    "moe_num_shared_experts": 1,
    "moe_k": 3,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": 0,
    "moe_layer_interval": 2,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.7,
    "num_dense_layers": 2,
    "norm_topk_prob": True,
    "clip_qkv": 0.3,
    "lm_head_bias": True,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.5,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
    "router_jitter_noise": 0.4,
    "mlp_only_layers": [0],
    "decoder_sparse_step": 2,
    "attention_chunk_size": 8,
    "attn_temperature_tuning": False,
    "attn_scale": 0.6,
    "floor_scale": 8,
    "moe_layers": [1],
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 48,
    # Refused.
    "attn_output_gate": False,
    "mamba_ssm_dtype": "bfloat16",
    **dict.fromkeys(("mamba_proj_bias", "projectors_bias"), True),
    "moe_latent_size": 16,
    "time_step_limit": [0.01, 100.0],
    "mamba_dt_limit": [0.01, 100.0],
    "mamba_hidden_act": "relu",
    "use_bidirectional_attention": True,
    "is_encoder_decoder": True,
    "per_layer_config": {"0": {"intermediate_size": 48}},
    "add_cross_attention": True,
    "pruned_heads": {"0": [1]},
    "rope_interleaved": True,
    "use_mrope": True,
    "dual_chunk_attention_config": {"chunk_size": 64},
    "attention_sink": 4,
    "attention_sinks": True,
    "alibi": True,
    "use_alibi": True,
    "qk_norm": True,
    "use_qk_norm": True,
    "qk_layernorm": True,
    "use_parallel_residual": True,
    "num_nextn_predict_layers": 1,
    "interpolate_factor": 2,
    "full_attn_mod": 2,
    "do_layer_norm_before": False,
    "layer_norm_elementwise_affine": False,
    "_remove_final_layer_norm": True,
    "position_embedding_type": "nope",
    "quantization": {"group_size": 64, "bits": 4},
    "compression_config": {"quant_method": "compressed-tensors"},
}
OF_GEMMA4: dict[str, Any] = {
    "rope_parameters": NESTED,
    "layer_types": ["sliding_attention", *["full_attention"] * 3],
    "per_layer_config": {"1": {"head_dim": 16}, "3": {"head_dim": 16}},
    "use_bidirectional_attention": "all",
}
OF_KIND: dict[tuple[str, str], Any] = {
    ("exaone_moe", "mlp_layer_types"): ["sparse", "dense"],
    ("lfm2", "layer_types"): ["full_attention", "conv"],
    ("qwen3_5_text", "layer_types"): ["full_attention", "linear_attention"],
    ("qwen3_5_moe_text", "layer_types"): ["full_attention", "linear_attention"],
    ("nemotron_h", "norm_topk_prob"): False,
    ("glm4_moe_lite", "norm_topk_prob"): False,
    ("deepseek_v3", "norm_topk_prob"): False,
    ("deepseek_v2", "n_shared_experts"): 1,
    ("glm4_moe_lite", "mlp_layer_types"): ["sparse", "dense"],
    ("nemotron_h", "layer_types"): ["full_attention", "linear_attention", "mlp", "moe"],
    ("granitemoehybrid", "layer_types"): ["full_attention", "linear_attention"],
    ("qwen3_next", "layer_types"): ["full_attention", "linear_attention"],
    ("gemma3_text", "rope_parameters"): NESTED,
    ("muse_glimmer_text", "layer_rope_theta"): [0, 1000.0],
    ("muse_glimmer_text", "hidden_activation"): "gelu_pytorch_tanh",
    ("muse_glimmer_text", "layer_types"): ["full_attention", "sliding_attention"],
    ("gemma3n_text", "rope_parameters"): NESTED,
    ("gemma3n_text", "layer_types"): ["sliding_attention", *["full_attention"] * 3],
    **{(kind, name): value for kind in GEMMA4_KINDS for name, value in OF_GEMMA4.items()},
    ("mellum", "rope_parameters"): NESTED,
    ("phi3", "rope_parameters"): {"rope_type": "longrope", "rope_theta": 1000.0, **LONG},
    ("phi3", "rope_scaling"): {"type": "longrope", **LONG},
    ("phimoe", "rope_parameters"): {
        "rope_type": "longrope",
        "rope_theta": 1000.0,
        "short_mscale": 1.1,
        "long_mscale": 1.3,
        "original_max_position_embeddings": 32,
        **ALIKE,
    },
    ("phimoe", "rope_scaling"): {
        "type": "longrope",
        "short_mscale": 1.1,
        "long_mscale": 1.3,
        "original_max_position_embeddings": 32,
        **ALIKE,
    },
    ("starcoder2", "use_bias"): False,
    ("lfm3", "layer_types"): ["full_attention", "conv"],
    ("lfm3", "rope_parameters"): OF_GEMMA4["rope_parameters"],
    **dict.fromkeys((("gpt_neox", one) for one in ("attention_bias", "use_parallel_residual")), False),
    ("exaone", "activation_function"): "relu",
    ("llama4_text", "layer_types"): ["full_attention", "chunked_attention"],
    ("cohere2", "layer_types"): ["full_attention", "sliding_attention"],
    ("lfm2_moe", "layer_types"): ["full_attention", "conv"],
    ("gemma2", "layer_types"): ["full_attention", "sliding_attention"],
    ("gemma3_text", "layer_types"): ["full_attention", "sliding_attention"],
    ("gemma3_text", "rope_scaling"): LINEAR,
}
BESIDE_OF_KIND: dict[tuple[str, str], dict[str, Any]] = {
    ("deepseek_v2", "n_group"): {**GROUPED, "n_group": 1},
    ("deepseek_v2", "topk_group"): GROUPED,
    ("deepseek_v2", "topk_method"): GROUPS,
    ("falcon_h1", "mamba_norm_before_gate"): {"mamba_rms_norm": True},
    ("phi3", "original_max_position_embeddings"): {"rope_scaling": {"type": "longrope", **LONG}},
    ("phi3", "rope_scaling"): {"original_max_position_embeddings": 32},
    ("phi3", "rope_parameters"): {"original_max_position_embeddings": 32},
    **{
        (kind, "num_global_key_value_heads"): {"attention_k_eq_v": True}
        for kind in ("gemma4_text", "gemma4_unified_text")
    },
    **{
        ("gemma4_text", name): {"enable_moe_block": True}
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size")
    },
    **{
        (kind, "original_max_position_embeddings"): {**YARN, "rope_theta": 10_000.0}
        for kind in ("apertus", "bitnet")
    },
    ("apertus", "rope_theta"): {"rope_scaling": {"type": "linear", "factor": 4.0}},
    ("llama4_text", "layer_types"): {"attention_chunk_size": 8},
    ("llama4_text", "intermediate_size_mlp"): {"interleave_moe_layer_step": 2},
    ("qwen2_moe", "sliding_window"): {"use_sliding_window": True},
    ("qwen2_moe", "use_sliding_window"): {"sliding_window": 8},
    ("qwen3_moe", "intermediate_size"): {"mlp_only_layers": [1]},
}
IDENTITY = {"model_type", "architectures", "auto_map", "quantization_config"}
"""Fields that choose the reader; test_config.py and test_packed_linears.py change them."""
SETTINGS = {"max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id"}
"""Fields that limit or end an answer, and change no logits."""
SAMPLING = {"do_sample": True, "temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.1}
SAMPLING |= {"repetition_penalty": 1.5}
ONE_WINDOW = ("mistral", "ministral3", "phi3", "starcoder2", "mixtral", "qwen3_moe", "phimoe")
IN_ROPE = ("short_mscale", "alpha", "llama_4_scaling_beta")
"""Fields of a rotary embedding's section, which has a table of its own."""
CHECKED = {("layer_types", kind) for kind in ONE_WINDOW}
CHECKED |= {("num_experts_per_tok", kind) for kind in ("phimoe", "llama4_text")}
CHECKED |= {("head_dim", "olmoe"), ("head_dim", "bitnet"), ("word_embed_proj_dim", "opt")}
INTERNLM3_BIASES = ("attention_bias", "mlp_bias", "qkv_bias", "bias")
CHECKED |= {(name, "internlm3") for name in INTERNLM3_BIASES}
CHECKED |= {("mamba_d_head", kind) for kind in ("granitemoehybrid", "falcon_h1")}
CHECKED |= {("mamba_expand", "falcon_h1")}
"""Rows that must agree with others: :func:`test_a_field_that_must_agree_is_refused_otherwise`."""


MOST_KINDS = 4
"""Model types with which a row of many is tested; the table gives them all the same row."""


def kinds_of(row: Field) -> list[str]:
    return sorted({*(row.only or FAMILIES)} - {*OWN_CODE}, key=lambda kind: (kind != "llama", kind))


def rows_of(effect: str) -> Iterator[tuple[Field, str]]:
    """Yield each row with kinds for which it is the one that counts: all of them where it is read."""
    for row in CONFIG_FIELDS.fields:
        if row.effect == effect:
            kinds = [kind for kind in kinds_of(row) if CONFIG_FIELDS.find(row.name, kind) is row]
            for kind in kinds if effect == "read" and row.only else kinds[:MOST_KINDS]:
                yield row, kind


def value_of(name: str, kind: str) -> Any:
    return OF_KIND.get((kind, name), VALUES.get(name, SAMPLING.get(name)))


def read_cases() -> Iterator[Any]:
    seen = set()
    for row, kind in rows_of("read"):
        if row.name not in IDENTITY | SETTINGS | set(SAMPLING) and (row.name, kind) not in CHECKED:
            marks = [pytest.mark.slow] if row.name in seen else []
            seen.add(row.name)
            yield pytest.param(row.name, kind, id=f"{row.name}-{kind}", marks=marks)


def base(kind: str, name: str = "") -> dict[str, Any]:
    beside = BESIDE_OF_KIND.get((kind, name), BESIDE.get(name, {}))
    known = {one: value for one, value in beside.items() if CONFIG_FIELDS.find(one, kind)}
    known = {one: value for one, value in known.items() if CONFIG_FIELDS.find(one, kind).effect == "read"}
    fields = {"model_type": kind, **COMMON, **OWN.get(kind, {}), **known}
    return {one: value for one, value in fields.items() if value is not ...}


def theirs(fields: dict[str, Any]) -> Any:
    """Return transformers' model of a configuration, with weights that let every feature count."""
    copied = json.loads(json.dumps(fields))
    config = transformers.AutoConfig.for_model(copied.pop("model_type"), **copied)
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for values in model.parameters():
            values.add_(0.1 * torch.randn_like(values)) if values.ndim == 1 else values.mul_(3.0)
        for name, values in model.named_buffers():
            if name.endswith(("expert_bias", "correction_bias")):
                values.normal_(std=0.3)
    return model


def logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].numpy()


def saved(model: Any, fields: dict[str, Any], folder: Path) -> Path:
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


@pytest.fixture(scope="module")
def unchanged() -> Callable[[str, str], np.ndarray]:
    """Return a function that gives transformers' logits without a field."""
    kept: dict[str, np.ndarray] = {}

    def get(kind: str, name: str) -> np.ndarray:
        fields = base(kind, name)
        key = json.dumps(fields)
        if key not in kept:
            kept[key] = logits(theirs(fields))
        return kept[key]

    return get


@pytest.mark.parametrize("kind", sorted({*FAMILIES} - {*OWN_CODE}))
def test_every_field_that_transformers_knows_has_a_row(kind: str) -> None:
    """Fields of the class and its bases, its other names, and those that its code takes from the file."""
    own = transformers.AutoConfig.for_model(kind).__class__
    names = {one.name for one in dataclasses.fields(own)} | set(own.attribute_map)
    sources = [inspect.getsource(one.__post_init__) for one in (own, transformers.PreTrainedConfig)]
    sources += [inspect.getsource(own.convert_rope_params_to_dict)]
    for source in sources:
        names |= set(re.findall(r"""kwargs\.(?:pop|get)\(\s*"(\w+)""", source))
    names |= set(transformers.GenerationConfig._get_default_generation_params())
    names |= set(transformers.AutoConfig.for_model(kind).to_dict())
    assert len(names) > 40
    assert {name for name in names if CONFIG_FIELDS.find(name, kind) is None} == set()


def test_the_table_reads_the_fields_of_each_family() -> None:
    for kind, family in FAMILIES.items():
        for name in family.follows - {*IN_ROPE, *family.renamed}:
            row = CONFIG_FIELDS.find(name, kind)
            assert row is not None, (kind, name)
            assert row.effect == "read", (kind, name)


@pytest.mark.parametrize(("name", "kind"), list(read_cases()))
def test_a_field_that_is_read_gives_the_logits_of_transformers(
    name: str,
    kind: str,
    tmp_path: Path,
    host_llm: Callable[..., LLM],
    unchanged: Callable[[str, str], np.ndarray],
) -> None:
    without = base(kind, name)
    fields = {**without, name: value_of(name, kind)}
    if name == "num_experts" and kind in ("gpt_oss", "mixtral"):
        fields.pop("num_local_experts", None)
    if name in ("hidden_size", "num_attention_heads") and kind in ("phi3", "olmoe", "bitnet"):
        fields.pop("head_dim")
    assert value_of(name, kind) is not None, "a row without a value"
    assert ModelConfig.from_dict(fields) != ModelConfig.from_dict(without)
    model = theirs(fields)
    wanted = logits(model)
    other = unchanged(kind, name)
    assert wanted.shape != other.shape or sqnr_db(wanted, other) < LEAST_DB - 20
    llm = host_llm(saved(model, fields, tmp_path / kind), plan="gpu", precision="fp16", context=64)
    assert not [note for note in llm.notes if "no table" in note]
    assert sqnr_db(llm.session().prefill(IDS, all_logits=True), wanted) >= LEAST_DB


@pytest.mark.parametrize(("row", "kind"), [(row, kind) for row, kind in rows_of("read")])
def test_a_setting_that_is_read_changes_the_configuration(row: Field, kind: str, tmp_path: Path) -> None:
    if row.name in SETTINGS:
        changed = ModelConfig.from_dict({**base(kind), row.name: VALUES[row.name]})
        assert changed != ModelConfig.from_dict(base(kind))
    elif row.name in SAMPLING:
        (tmp_path / "config.json").write_text(json.dumps({**base(kind), row.name: SAMPLING[row.name]}))
        assert getattr(read_sampling_defaults(tmp_path), row.name) == SAMPLING[row.name]
    else:
        assert row.name in VALUES or row.name in IDENTITY


@pytest.mark.parametrize(
    ("kind", "name", "value", "agreeing", "said"),
    [
        *(
            (kind, name, ["full_attention"] * 2, ["sliding_attention"] * 2, "kinds")
            for name, kind in sorted(CHECKED)
            if name == "layer_types"
        ),
        ("phimoe", "num_experts_per_tok", 3, 2, "num_experts_per_tok is 3"),
        ("llama4_text", "num_experts_per_tok", 2, 1, "num_experts_per_tok is 2"),
        *(("internlm3", name, True, False, "qkv_bias is") for name in INTERNLM3_BIASES),
        *((kind, "head_dim", 32, 16, "head_dim is 32") for kind in ("olmoe", "bitnet")),
        ("granitemoehybrid", "mamba_d_head", 16, 32, "mamba_d_head is 16"),
        ("falcon_h1", "mamba_d_head", 16, 32, "mamba_d_head is 16"),
        ("opt", "word_embed_proj_dim", 32, 64, "word_embed_proj_dim is 32"),
    ],
)
def test_a_field_that_must_agree_is_refused_otherwise(
    kind: str, name: str, value: object, agreeing: object, said: str
) -> None:
    fields = base(kind, name)
    assert ModelConfig.from_dict({**fields, name: agreeing}) == ModelConfig.from_dict(fields)
    with pytest.raises(HeteroLLMError, match=said):
        ModelConfig.from_dict({**fields, name: value})


NONE_VALUES: dict[str, Any] = {
    "original_max_position_embeddings": 16,
    "hidden_act": "relu",
    "attention_bias": True,
    "sliding_window": 8,
    "max_window_layers": 1,
    "attention_dropout": 0.5,
    "resid_pdrop": 0.5,
    "embd_pdrop": 0.5,
    "use_cache": False,
    "pretraining_tp": 2,
    "router_jitter_noise": 0.5,
    "input_jitter_noise": 0.5,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.5,
    "_sliding_window_pattern": 1,
    "sliding_window_size": 8,
    "max_sequence_length": 8,
    "chunk_size_feed_forward": 2,
    "is_decoder": True,
    "tie_encoder_decoder": True,
}


@pytest.mark.parametrize(
    ("row", "kind"), [pytest.param(row, kind, id=f"{row.name}-{kind}") for row, kind in rows_of("none")]
)
def test_a_field_without_effect_changes_nothing(row: Field, kind: str) -> None:
    name = row.name.replace("*", "version")
    fields = {**base(kind), name: NONE_VALUES.get(name, "any")}
    assert ModelConfig.from_dict(fields) == ModelConfig.from_dict(base(kind))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(row.name, kind, id=f"{row.name}-{kind}")
        for row, kind in rows_of("none")
        if row.name in NONE_VALUES and kind in kinds_of(row)[:2]
    ],
)
def test_transformers_computes_the_same_without_such_a_field(
    name: str, kind: str, unchanged: Callable[[str, str], np.ndarray]
) -> None:
    model = theirs({**base(kind), name: NONE_VALUES[name]})
    assert sqnr_db(logits(model), unchanged(kind, "")) > 100


@pytest.mark.parametrize(
    ("row", "kind"), [pytest.param(row, kind, id=f"{row.name}-{kind}") for row, kind in rows_of("refused")]
)
def test_a_refused_field_is_named_with_its_reason(row: Field, kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=re.escape(f"config.json: {row.name} = ")) as caught:
        ModelConfig.from_dict({**base(kind), row.name: VALUES[row.name]})
    assert row.meaning in str(caught.value)
    for neutral in (*row.neutral, None):
        fields = {**base(kind), row.name: neutral}
        assert ModelConfig.from_dict(fields) == ModelConfig.from_dict(base(kind)), neutral


DYNAMIC = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0, "rope_theta": 1000.0}
GROWING = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8, "rope_theta": 1000.0}
GROWING |= {"llama_4_scaling_beta": 0.1}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
YARN5 = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LONGROPE = {"rope_type": "longrope", **LONG, "original_max_position_embeddings": 16, "factor": 4.0}
MSCALES = {"rope_type": "longrope", "original_max_position_embeddings": 16, "short_mscale": 1.1}
MSCALES |= {"long_mscale": 1.3, **ALIKE}
ROPES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "rope_type": ("llama", {}, LINEAR),
    "type": ("llama", {}, {"type": "linear", "factor": 4.0}),
    "rope_theta": ("llama", {"rope_type": "default"}, {"rope_type": "default", "rope_theta": 200.0}),
    "factor": ("llama", LINEAR, LINEAR | {"factor": 8.0}),
    "alpha": ("hunyuan_v1_dense", DYNAMIC, DYNAMIC | {"alpha": 50.0}),
    "llama_4_scaling_beta": ("ministral3", GROWING, GROWING | {"llama_4_scaling_beta": 0.5}),
    "factor of llama3": ("llama", LLAMA3, LLAMA3 | {"factor": 8.0}),
    "original_max_position_embeddings": ("llama", YARN5, YARN5 | {"original_max_position_embeddings": 64}),
    "attention_factor": ("llama", YARN5, YARN5 | {"attention_factor": 0.5}),
    "attention_factor of longrope": ("llama", LONGROPE, LONGROPE | {"attention_factor": 0.5}),
    "beta_fast": ("llama", YARN5, YARN5 | {"beta_fast": 4.0}),
    "beta_slow": ("llama", YARN5, YARN5 | {"beta_slow": 0.01}),
    "mscale": ("llama", YARN5 | {"mscale_all_dim": 0.5}, YARN5 | {"mscale": 3.0, "mscale_all_dim": 0.5}),
    "mscale_all_dim": ("llama", YARN5 | {"mscale": 3.0}, YARN5 | {"mscale": 3.0, "mscale_all_dim": 0.5}),
    "truncate": ("llama", YARN5, YARN5 | {"truncate": False}),
    "low_freq_factor": ("llama", LLAMA3, LLAMA3 | {"low_freq_factor": 3.0}),
    "high_freq_factor": ("llama", LLAMA3, LLAMA3 | {"high_freq_factor": 9.0}),
    "short_factor": (
        "llama",
        LONGROPE | {"original_max_position_embeddings": 128},
        LONGROPE | {"original_max_position_embeddings": 128, "short_factor": [3.0] * 8},
    ),
    "long_factor": ("llama", LONGROPE, LONGROPE | {"long_factor": [3.0] * 8}),
    "partial_rotary_factor": (
        "phi3",
        {"rope_type": "default"},
        {"rope_type": "default", "partial_rotary_factor": 0.5},
    ),
    "short_mscale": (
        "phimoe",
        MSCALES | {"original_max_position_embeddings": 128},
        MSCALES | {"original_max_position_embeddings": 128, "short_mscale": 1.5},
    ),
    "long_mscale": ("phimoe", MSCALES, MSCALES | {"long_mscale": 1.7}),
}
ROPE_REFUSED: dict[str, Any] = {
    "attn_factor": 2.0,
    "attention_scale": 2.0,
    "extrapolation_factor": 0.5,
    "mrope_section": [2, 3, 3],
    "mrope_interleaved": True,
    "alpha": 1000.0,
    "llama_4_scaling_beta": 0.1,
}


@pytest.mark.parametrize("case", sorted(ROPES))
def test_rotary_embedding_is_that_of_transformers(
    case: str, tmp_path: Path, host_llm: Callable[..., LLM]
) -> None:
    kind, without, section = ROPES[case]
    fields = {**base(kind), "rope_parameters": section}
    model = theirs(fields)
    wanted = logits(model)
    assert sqnr_db(wanted, logits(theirs({**base(kind), "rope_parameters": without}))) < LEAST_DB - 20
    llm = host_llm(saved(model, fields, tmp_path / kind), plan="gpu", precision="fp16", context=64)
    assert sqnr_db(llm.session().prefill(IDS, all_logits=True), wanted) >= LEAST_DB


def test_a_spelling_that_versions_of_transformers_read_otherwise_is_refused() -> None:
    fields = {**base("gemma3_text"), "rope_scaling": {"type": "linear", "factor": 4.0}}
    with pytest.raises(UnsupportedModelError, match="type without rope_type"):
        ModelConfig.from_dict(fields)


ROPE_WITHOUT_EFFECT = {"finetuned", "max_position_embeddings", "mrope_section", "mrope_interleaved"}


def test_every_row_of_rotary_embedding_is_tried() -> None:
    for row in ROPE_FIELDS.fields:
        tried = {"read": ROPES, "refused": ROPE_REFUSED, "none": ROPE_WITHOUT_EFFECT}
        assert row.name in tried[row.effect]


@pytest.mark.parametrize("section", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", sorted(ROPE_REFUSED))
def test_a_refused_field_of_rotary_embedding_is_named(name: str, section: str) -> None:
    for kind, outer in (("llama", ""), ("gemma3_text", "full_attention")):
        values = {"rope_type": "linear", "factor": 2.0, name: ROPE_REFUSED[name]}
        fields = {**base(kind), section: {outer: values} if outer else values}
        with pytest.raises(UnsupportedModelError, match=f"{section}: {name} = "):
            ModelConfig.from_dict(fields)


@pytest.mark.parametrize("table", [CONFIG_FIELDS, ROPE_FIELDS])
def test_rows_state_meaning_and_source(table: FieldTable) -> None:
    assert all(row.meaning and row.source for row in table.fields)
