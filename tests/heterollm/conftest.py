"""Small checkpoints with nothing trivial in them, and transformers as the oracle."""

import html.parser
import itertools
import json
import re
import shutil
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faults import Gate

from heterollm.cli import main
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.gpu import is_complete
from heterollm.kernels.npu.session import SessionGraph
from heterollm.kernels.sync.fence import BlockingFence
from heterollm.llm import LLM
from heterollm.model import ModelConfig
from heterollm.model import families as model_types
from heterollm.solver import Plan, model_shape
from heterollm.solver.placements import RowsPlacement
from heterollm.solver.plan_records import PlanEntry

torch = pytest.importorskip("torch")

PLAIN: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 176,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
}
HALF_TURNING = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}
GEMMA4: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "global_head_dim": 48,
    "vocab_size": 2048,
    "final_logit_softcapping": 2.0,
    "sliding_window": 20,
    "pad_token_id": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 2000.0, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
    },
}
# Fields by model type, which other words may follow.
FAMILIES: dict[str, dict[str, Any]] = {
    # 352 rows of the feed-forward are no multiple of 64, and the rotary frequencies are rescaled.
    "llama": {
        "hidden_size": 192,
        "intermediate_size": 352,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "vocab_size": 2048,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 5000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    # One key/value head, tied head, 304 inputs that only blocks of 16 divide, biases on q, k and v.
    "qwen2": {
        "hidden_size": 224,
        "intermediate_size": 304,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "vocab_size": 2048,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    # Windows shorter than most prompts, and heads that are wider together than the stream.
    "mistral": {
        "hidden_size": 128,
        "intermediate_size": 176,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "vocab_size": 2048,
        "sliding_window": 20,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    # Norms of heads, and biases on attention's output too.
    "qwen3": {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 40,
        "vocab_size": 2048,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    # 36 of a head's 48 elements turn, with other frequencies beyond 32 positions.
    "phi3": {
        "hidden_size": 192,
        "intermediate_size": 208,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
        "sliding_window": 24,
        "pad_token_id": 0,
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0 + 0.05 * pair for pair in range(18)],
            "long_factor": [1.5 + 0.4 * pair for pair in range(18)],
        },
    },
    # A width without a whole root, and caps that scores and logits reach.
    "gemma2": {
        "hidden_size": 160,
        "intermediate_size": 192,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 56,
        "vocab_size": 2048,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 1.5,
        "final_logit_softcapping": 2.0,
        "sliding_window": 20,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    # Positions and windows that alternate, scaled only in layers that see everything.
    "gemma3_text": {
        "hidden_size": 160,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 48,
        "vocab_size": 2048,
        "query_pre_attn_scalar": 20,
        "final_logit_softcapping": 2.0,
        "sliding_window": 20,
        "sliding_window_pattern": 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 2000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    # Heads of two sizes, layers that read the keys of others, and embeddings for each layer.
    "gemma4_text": {
        **GEMMA4,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 128,
        "vocab_size_per_layer_input": 2112,
    },
    # Four streams, sparse gates, networks of two widths, and tokens behind the table of layers' embeddings.
    "gemma3n_text": {
        "hidden_size": 128,
        "intermediate_size": [128, 192, 128, 192],
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "vocab_size": 2048,
        "vocab_size_per_layer_input": 1024,
        "hidden_size_per_layer_input": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "sliding_window": 20,
        "final_logit_softcapping": 2.0,
        "laurel_rank": 32,
        "activation_sparsity_pattern": [0.7, 0.0, 0.5, 0.8],
        "pad_token_id": 0,
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 2000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    # Norms of heads and of the embedding without weights, an own number added in norms of outputs, and gates.
    "muse_glimmer_text": {
        "hidden_size": 128,
        "intermediate_size": 192,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "vocab_size": 2048,
        "sliding_window": 20,
        "final_logit_softcapping": 2.0,
        "output_multiplier": 0.6,
        "post_norm_eps": 0.25,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    # Experts beside a network, each with norms of its own.
    "gemma4_text with experts": {
        **GEMMA4,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 12,
        "top_k_experts": 3,
        "moe_intermediate_size": 96,
    },
    # A dense layer, and experts by sigmoid and bias beside shared ones.
    "glm4_moe": {
        **PLAIN,
        "head_dim": 48,
        "attention_bias": True,
        "use_qk_norm": True,
        "rope_parameters": HALF_TURNING,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "moe_intermediate_size": 96,
        "routed_scaling_factor": 1.7,
        "first_k_dense_replace": 1,
    },
    "dots1": {
        **PLAIN,
        "attention_bias": True,
        "sliding_window": 20,
        "max_window_layers": 1,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "moe_intermediate_size": 96,
        "routed_scaling_factor": 1.7,
        "first_k_dense_replace": 1,
    },
    # The second layer sees everything and has no positions.
    "exaone_moe": {
        **PLAIN,
        "head_dim": 48,
        "sliding_window": 20,
        "sliding_window_pattern": 2,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "moe_intermediate_size": 96,
    },
    # Chunks in the layers with positions, of which the others have none; experts in every other layer.
    "llama4_text": {
        **PLAIN,
        "num_hidden_layers": 4,
        "head_dim": 40,
        "intermediate_size": 128,
        "intermediate_size_mlp": 176,
        "num_local_experts": 6,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 20,
        "no_rope_layers": [1, 0, 1, 1],
        "attention_bias": True,
        "floor_scale": 12,
        "attn_scale": 0.6,
        "rms_norm_eps": 1e-2,
    },
    # Values that are keys before their norm, and other key heads where a layer sees everything.
    "gemma4_unified_text": {
        **GEMMA4,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    },
    # The second layer has no positions but a window; biases everywhere.
    "smollm3": {
        "hidden_size": 128,
        "intermediate_size": 176,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
        "no_rope_layers": [1, 0],
        "use_sliding_window": True,
        "sliding_window": 20,
        "attention_bias": True,
        "mlp_bias": True,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    "gemma": {
        **PLAIN,
        "head_dim": 40,
        "attention_bias": True,
    },
    "granite": {
        **PLAIN,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.03,
        "logits_scaling": 6.0,
        "attention_bias": True,
        "mlp_bias": True,
    },
    # Bases of positions by layer, of which the last has none; sinks and a window.
    "granite_swa": {
        **PLAIN,
        "num_hidden_layers": 3,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.03,
        "logits_scaling": 6.0,
        "sliding_window": 20,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "layer_rope_theta": [1000.0, 100.0, 0],
    },
    # An epsilon that shows, and a quarter of a head that turns.
    "stablelm": {
        **PLAIN,
        "num_key_value_heads": 4,
        "use_qkv_bias": True,
        "layer_norm_eps": 1e-2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
    },
    "seed_oss": {**PLAIN, "head_dim": 48, "mlp_bias": True},
    "ministral": {
        **PLAIN,
        "head_dim": 48,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # The first and the fourth layer see everything.
    "cwm": {**PLAIN, "num_hidden_layers": 4, "head_dim": 32, "sliding_window": 20},
    # Neighbouring elements turn: all, or half of a head.
    "ernie4_5": {**PLAIN, "head_dim": 48, "use_bias": True},
    "glm": {**PLAIN, "head_dim": 40, "rope_parameters": HALF_TURNING},
    "glm4": {**PLAIN, "head_dim": 40, "rope_parameters": HALF_TURNING},
    # Networks without a gate: side by side with attention, with biases everywhere.
    "phi": {
        **PLAIN,
        "layer_norm_eps": 1e-2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.4375},
    },
    # Attention and network side by side, each behind a norm; q, k and v of each head in turn.
    "gpt_neox": {
        "hidden_size": 160,
        "intermediate_size": 208,
        "num_attention_heads": 4,
        "vocab_size": 2048,
        "pad_token_id": 0,
        "layer_norm_eps": 1e-2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
    },
    # Learned positions, of which the first two rows belong to none.
    "opt": {
        "hidden_size": 128,
        "ffn_dim": 176,
        "num_attention_heads": 4,
        "vocab_size": 2048,
        "pad_token_id": 1,
    },
    "starcoder2": {**PLAIN, "sliding_window": 20},
    "nemotron": {**PLAIN, "head_dim": 40, "mlp_bias": True, "rope_parameters": HALF_TURNING},
    # An activation with numbers of its own in each layer.
    "apertus": {**PLAIN, "head_dim": 40, "attention_bias": True},
    # Norms of what o and down read.
    "bitnet": {**PLAIN, "attention_bias": True},
    "internlm3": {**PLAIN, "head_dim": 40, "attention_bias": True, "mlp_bias": True},
    "arcee": {**PLAIN, "head_dim": 40, "attention_bias": True},
    # Positions that differ between layers, and a mixture.
    "mellum": {
        **PLAIN,
        "head_dim": 40,
        "moe_intermediate_size": 96,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "sliding_window": 20,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 2000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    # Convolutions before and behind attention; networks narrower than their stated width.
    "lfm2": {
        **PLAIN,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "intermediate_size": 240,
        "block_multiple_of": 16,
        "block_ffn_dim_multiplier": 1.1,
        "norm_eps": 1e-2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    # Wider convolutions, windows of their own positions, norms of outputs, and a gate of each head.
    "lfm3": {
        **PLAIN,
        "num_hidden_layers": 4,
        "head_dim": 40,
        "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
        "sliding_window": 20,
        "norm_eps": 1e-2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 2000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    },
    # Three value heads to a key head, other widths of keys and values, and attention with gates.
    "qwen3_5_text": {
        **PLAIN,
        "num_hidden_layers": 4,
        "head_dim": 40,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "layer_types": [*["linear_attention"] * 2, "full_attention", "linear_attention"],
        "rope_parameters": {**HALF_TURNING, "mrope_section": [4, 3, 3], "mrope_interleaved": True},
        "attention_bias": True,
        "rms_norm_eps": 1e-3,
    },
    # Projections by key heads, and experts behind delta nets and attention.
    "qwen3_next": {
        **PLAIN,
        "num_hidden_layers": 3,
        "head_dim": 40,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "full_attention_interval": 2,
        "rope_parameters": HALF_TURNING,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 80,
        "shared_expert_intermediate_size": 144,
    },
    "qwen3_5_moe_text": {
        **PLAIN,
        "num_hidden_layers": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "full_attention_interval": 2,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 80,
        "shared_expert_intermediate_size": 144,
        "rope_parameters": HALF_TURNING,
    },
    # A dense layer, then experts that a bias helps to choose, and whose weights have a factor.
    "lfm2_moe": {
        **PLAIN,
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "moe_intermediate_size": 96,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "routed_scaling_factor": 1.7,
        "norm_eps": 1e-2,
    },
    # Every second layer has experts and two shared ones; a bias helps to choose by softmax.
    "ernie4_5_moe": {
        **PLAIN,
        "num_hidden_layers": 3,
        "moe_layer_start_index": 1,
        "moe_layer_interval": 2,
        "moe_intermediate_size": 96,
        "moe_num_experts": 12,
        "moe_k": 3,
        "use_bias": True,
    },
    # The width of the network has the name of shared experts'.
    "granitemoehybrid": {
        **PLAIN,
        "num_local_experts": 0,
        "shared_intermediate_size": 208,
        "layer_types": ["attention"] * 2,
        "position_embedding_type": "rope",
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.03,
        "logits_scaling": 6.0,
        "mamba_n_heads": 4,
    },
    # State spaces with groups of heads, and heads that no vector fills; no positions.
    "granitemoehybrid with state spaces": {
        **PLAIN,
        "num_hidden_layers": 3,
        "num_local_experts": 0,
        "shared_intermediate_size": 208,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.03,
        "logits_scaling": 6.0,
        "mamba_n_heads": 12,
        "mamba_expand": 3,
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
        "mamba_d_conv": 4,
    },
    # A block in each layer: state spaces, attention without positions, a network, and experts, without gates.
    "nemotron_h": {
        "hidden_size": 128,
        "intermediate_size": 176,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 40,
        "vocab_size": 2048,
        "pad_token_id": 0,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe", "linear_attention"],
        "layer_norm_epsilon": 1e-3,
        "mamba_num_heads": 12,
        "mamba_head_dim": 24,
        "n_groups": 2,
        "ssm_state_size": 24,
        "conv_kernel": 4,
        "mlp_bias": True,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "moe_shared_expert_intermediate_size": 144,
        "routed_scaling_factor": 1.7,
    },
    # A state space beside attention, and a factor on the output of each linear.
    "falcon_h1": {
        **PLAIN,
        "mamba_d_ssm": 288,
        "mamba_n_heads": 12,
        "mamba_n_groups": 2,
        "mamba_d_state": 24,
        "mamba_d_conv": 4,
        "embedding_multiplier": 5.6,
        "lm_head_multiplier": 0.4,
        "key_multiplier": 0.7,
        "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.9,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.8,
        "ssm_multipliers": [0.9, 0.7, 1.4, 1.6, 0.5],
        "mlp_multipliers": [0.8, 1.7],
    },
    # Latent vectors, from which values of another width than keys are made; a dense layer, then experts.
    "deepseek_v2": {
        **PLAIN,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 40,
        "qk_rope_head_dim": 16,
        "v_head_dim": 40,
        "first_k_dense_replace": 1,
        "n_routed_experts": 6,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "routed_scaling_factor": 1.7,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "mscale": 0.7,
            "mscale_all_dim": 0.7,
        },
    },
    # Vectors for queries as well, and groups of experts.
    "deepseek_v3": {
        **PLAIN,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 40,
        "qk_rope_head_dim": 16,
        "v_head_dim": 40,
        "first_k_dense_replace": 1,
        "n_routed_experts": 12,
        "n_shared_experts": 2,
        "num_experts_per_tok": 3,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 96,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 0.6,
        },
    },
    "glm4_moe_lite": {
        **PLAIN,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 40,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "n_routed_experts": 6,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 160,
    },
    # Attention and network side by side, LayerNorm without bias, and no positions in layers without a window.
    "cohere2": {
        **PLAIN,
        "layer_norm_eps": 1e-2,
        "attention_bias": True,
        "logit_scale": 0.3,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # Queries that grow beyond 24 positions, of which the window sees some.
    "ministral3": {
        **PLAIN,
        "head_dim": 40,
        "sliding_window": 40,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 24,
            "beta_fast": 8.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.6,
        },
    },
    # Norms of heads behind positions, whose base is stretched.
    "hunyuan_v1_dense": {
        **PLAIN,
        "head_dim": 40,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 1.0, "alpha": 30.0},
    },
    # Names of its own.
    "exaone": {**PLAIN, "attention_bias": True, "mlp_bias": True},
    # Norms that subtract means and have no weights; queries, keys and values that reach the limit.
    "olmo": {**PLAIN, "attention_bias": True, "clip_qkv": 0.8},
    # No norms before blocks, but behind them; norms that span all heads, of which there are two key heads.
    "olmo2": {**PLAIN, "head_dim": 32, "attention_bias": True},
    # Scaled positions and windows in turns, and a network without a factor of 64.
    "olmo3": {
        **PLAIN,
        "num_hidden_layers": 3,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 2000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 32,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    # Layers without a window have no positions.
    "exaone4": {
        **PLAIN,
        "head_dim": 40,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    # Experts narrower than the stream, of which only blocks of 16 divide the inputs.
    "mixtral": {
        "hidden_size": 128,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 20,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    # More experts than a short pass has rows.
    "qwen3_moe": {
        "hidden_size": 128,
        "moe_intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 40,
        "vocab_size": 2048,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "attention_bias": True,
        "use_sliding_window": True,
        "sliding_window": 20,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    # The first layer is dense, the second has a shared expert with a gate, and weights that do not sum to 1.
    "qwen2_moe": {
        **PLAIN,
        "moe_intermediate_size": 96,
        "shared_expert_intermediate_size": 144,
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "decoder_sparse_step": 2,
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
    # Queries, keys and values that reach the limit; weights of experts that do not sum to 1.
    "olmoe": {
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "clip_qkv": 0.8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    # A jitter within which the router has some choice, and an attention factor beyond 32 positions.
    "phimoe": {
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
        "num_local_experts": 6,
        "router_jitter_noise": 0.4,
        "attention_bias": True,
        "lm_head_bias": True,
        "sliding_window": 24,
        "original_max_position_embeddings": 32,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1000.0,
            "original_max_position_embeddings": 32,
            # Alike: transformers leaves the long factors out.
            "short_factor": [1.5 + 0.2 * pair for pair in range(16)],
            "long_factor": [1.5 + 0.2 * pair for pair in range(16)],
            "short_mscale": 1.1,
            "long_mscale": 1.4,
        },
    },
    # Heads wider than the residual stream, a window in the first layer alone, and bounds that clip.
    "gpt_oss": {
        "hidden_size": 160,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 48,
        "vocab_size": 2048,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "sliding_window": 20,
        "swiglu_limit": 0.7,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "granitemoe": {
        "hidden_size": 128,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.03,
        "logits_scaling": 6.0,
        "attention_bias": True,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
    # Shared experts of another width.
    "granitemoeshared": {
        "hidden_size": 128,
        "intermediate_size": 128,
        "shared_intermediate_size": 176,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2048,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.03,
        "logits_scaling": 6.0,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0},
    },
}


def bundled() -> Path:
    return Path(str(resources.files("heterollm.data.tiny_python_lm")))


def their_config(family: str, **overrides: Any) -> Any:
    """Return transformers' configuration of a family with small sizes."""
    from transformers import AutoConfig

    fields = {
        "num_hidden_layers": 2,
        "max_position_embeddings": 2048,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "rms_norm_eps": 1e-5,
        **FAMILIES[family],
        **overrides,
    }
    if family == "muse_glimmer_text":
        import muse_model

        muse_model.register()
    return AutoConfig.for_model(family.partition(" ")[0], **fields)


def config_of(family: str) -> ModelConfig:
    """Return the program's configuration of such a checkpoint, without one."""
    return ModelConfig.from_dict(json.loads(their_config(family).to_json_string()))


def write_checkpoint(folder: Path, family: str, **overrides: Any) -> Path:
    """Write a random two-layer checkpoint with non-trivial norms and biases."""
    from transformers import AutoModelForCausalLM

    config = their_config(family, **overrides)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("scale"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("A_log"):
                parameter.uniform_(-3.0, 1.0)
            elif name.endswith("correction_bias"):
                parameter.normal_(std=0.1)
            elif name.endswith("router.proj.weight"):
                # Its input is divided by the root of its width.
                parameter.normal_()
            elif name.endswith("modality_router.weight"):
                # Its input is divided by its width.
                parameter.normal_(std=10.0)
            elif name.endswith("_coefs.weight"):
                parameter.normal_(std=0.3)
            elif "act_fn.alpha" in name:
                parameter.uniform_(-1.0, 1.5)
            elif name.endswith(("bias", "conv1d.weight", "sinks")):
                parameter.normal_(std=0.5)
            else:
                # Queries and keys wide enough that attention has something to choose.
                scores = re.search("q_proj|k_proj|qkv_proj|query_key_value", name)
                parameter.normal_(std=0.12 if scores else 0.06)
        for name, values in model.named_buffers():
            if name.endswith(("expert_bias", "correction_bias")):
                values.normal_(std=0.3)
            if name.endswith("act_fn.beta"):
                values.fill_(0.3)
            if "layer_scalar" in name:
                values.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled() / name, folder / name)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _shared_programs(shared_programs: None) -> None:
    """Share programs in every file of this folder."""


@pytest.fixture(scope="session")
def bundled_model() -> Path:
    return bundled()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """Return a function that writes a family's checkpoint once and gives its folder, which all tests share.

    A test that changes files does so in a copy: at the end no folder may differ from what was written.
    """
    made: dict[str, Path] = {}
    written: dict[Path, dict[str, int]] = {}

    def make(family: str, **overrides: Any) -> Path:
        key = f"{family}{sorted(overrides.items())}"
        if key not in made:
            made[key] = write_checkpoint(tmp_path_factory.mktemp(family), family, **overrides)
            written[made[key]] = file_times(made[key])
        return made[key]

    yield make
    changed = [
        f"{folder.name}/{name}"
        for folder, times in written.items()
        for name, _ in sorted(times.items() ^ file_times(folder).items())
    ]
    assert not changed, f"tests changed checkpoints that they share: {', '.join(changed)}"


def file_times(folder: Path) -> dict[str, int]:
    """Return when each file of a folder was written, in nanoseconds."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.stat().st_mtime_ns for path in files}


def stacked_experts(state: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return tensors with the experts of a layer in one, gate and up in turns, and inputs first."""
    found = {name: value for name, value in state.items() if ".experts." not in name}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (
            torch.stack([state[f"{prefix}{e}.{one}_proj.weight"].T for e in range(config.num_local_experts)])
            for one in ("gate", "up", "down")
        )
        found[f"{prefix}gate_up_proj"] = torch.stack([gate, up], -1).flatten(2)
        found[f"{prefix}down_proj"] = down
        biases = [state[f"{prefix}{one}_proj.bias"] for one in ("gate", "up")]
        found[f"{prefix}gate_up_proj_bias"] = torch.stack(biases, -1).flatten(1)
        found[f"{prefix}down_proj_bias"] = state[f"{prefix}down_proj.bias"]
    return found


def inputs_first(state: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return tensors with the experts of a layer in one, up behind gate, and inputs first."""
    found = {name: value for name, value in state.items() if ".experts." not in name}
    for layer in config.moe_layers:
        prefix = f"model.layers.{layer}.feed_forward.experts."
        gate, up, down = (
            torch.stack([state[f"{prefix}{e}.{one}_proj.weight"].T for e in range(config.num_local_experts)])
            for one in ("gate", "up", "down")
        )
        found |= {f"{prefix}gate_up_proj": torch.cat([gate, up], -1), f"{prefix}down_proj": down}
    return found


def stack_experts(state: dict[str, Any], model_type: str) -> None:
    """Put experts into the tensors that checkpoints have; others are stacked by transformers itself."""
    mixture = model_types.FAMILIES[model_type].mixture
    for module, members in {} if mixture is None else mixture.stacked.items():
        tails = [f"{mixture.members[member]}.weight" for member in members]
        first = tails[0].format(expert=0)
        for layer in [name.removesuffix(first) for name in state if name.endswith(first)]:
            own = (f"{layer}{tails[0].format(expert=expert)}" for expert in itertools.count())
            count = sum(1 for _ in itertools.takewhile(state.__contains__, own))
            experts = [[f"{layer}{tail.format(expert=expert)}" for tail in tails] for expert in range(count)]
            state[f"{layer}{module}"] = torch.stack([torch.cat([*map(state.pop, one)]) for one in experts])


@pytest.fixture(scope="session")
def reference() -> Callable[[LLM, Path, list[int]], np.ndarray]:
    """Return a function that gives float64 logits ``[m, vocab]`` of transformers on the runtime's tensors."""

    def logits(llm: LLM, folder: Path, ids: list[int]) -> np.ndarray:
        import transformers

        config = transformers.AutoConfig.from_pretrained(folder)
        state = {name: torch.from_numpy(value.copy()) for name, value in llm.reference_state_dict()}
        if config.model_type == "gpt_oss":
            state = stacked_experts(state, config)
        if config.model_type == "llama4_text":
            state = inputs_first(state, config)
        stack_experts(state, llm.config.model_type)
        kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
        model, loading = kind.from_pretrained(
            None,
            config=config,
            state_dict=state,
            dtype=torch.float64,
            attn_implementation="eager",
            experts_implementation="eager",
            output_loading_info=True,
        )
        assert not loading["unexpected_keys"]
        assert set(loading["missing_keys"]) <= ({"lm_head.weight"} if config.tie_word_embeddings else set())
        with torch.no_grad():
            return model(torch.tensor([ids])).logits[0].numpy()

    return logits


def half_rows(llm: LLM, chunk: int = 128) -> Plan:
    """Return a plan that cuts every group along rows, in the middle of each member."""
    specs = llm._weights.specs
    entries = []
    for spec in specs:
        rows = tuple(rows // 2 // 64 * 64 for rows in spec.member_rows)
        for phase, (low, high) in itertools.product(
            ("prefill", "decode"), ((1, 1), (2, 32), (33, 64), (65, 128))
        ):
            layers = (spec.layer, spec.layer)
            entries.append(PlanEntry(phase, (low, high), layers, spec.group, RowsPlacement(rows, (high,))))
    shape = model_shape((*specs, *llm._weights.experts))
    return Plan("rows", llm.device.name, llm.plan.precision, shape, chunk, tuple(entries))


@pytest.fixture(scope="session")
def half_rows_plan() -> Callable[..., Plan]:
    """Return a function that gives a plan which cuts every group of a loaded model along rows."""
    return half_rows


@pytest.fixture
def worst_logits_db(
    reference: Callable[[LLM, Path, list[int]], np.ndarray],
) -> Callable[[LLM, Path], float]:
    """Return a function that gives the worst logits over a prompt in two chunks and tokens behind it."""

    def worst(llm: LLM, folder: Path) -> float:
        ids = np.random.default_rng(0).integers(1, 200, 76).tolist()
        session = llm.session()
        found = np.stack([*session.prefill(ids[:70], all_logits=True), *map(session.decode, ids[70:])])
        return min(sqnr_db(*rows) for rows in zip(found, reference(llm, folder, ids), strict=True))

    return worst


@pytest.fixture
def token_ids() -> Callable[[int], list[int]]:
    """Return a function that gives so many token ids, the same ones every time."""

    def make(count: int) -> list[int]:
        return np.random.default_rng(11).integers(1, 2048, count).tolist()

    return make


@pytest.fixture
def host_llm(device_name: str) -> Iterator[Callable[..., LLM]]:
    """Return a function that loads a model on ``host``, or the GPU of ``--gpu``, until the test ends.

    On ``host`` its KV cache has 32 bits where nothing else is said, for gates that 16 bits miss.
    """
    loaded: list[LLM] = []

    def load(folder: Path, **options: Any) -> LLM:
        own = {"device": device_name, **options}
        exact: dict[str, Any] = {"kv_bits": 32} if own["device"] == "host" else {}
        loaded.append(LLM.load(folder, **(exact | own)))
        return loaded[-1]

    yield load
    for llm in loaded:
        llm.close()


@pytest.fixture
def shards_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hold each shard of the GPU until the NPU's graph runs, and that graph until the GPU's shard has ended.

    For models that are loaded from now on with ``sync="event"``. So a trace shows the GPU's shard within the
    graph on a machine of any speed, unless the engine lets one processor wait for the other: a gate stands
    behind each mark, which the graph opens.
    """
    mark, bind = BlockingFence.mark, SessionGraph.bind
    gates: dict[Any, Gate] = {}
    held: dict[Any, Any] = {}

    def mark_and_close(fence: Any) -> None:
        mark(fence)
        runtime = fence._runtime
        if runtime not in gates:
            gates[runtime] = Gate(runtime)
        # Each kernel stands for some seconds at most: together they stand for a minute.
        for _ in range(20):
            gates[runtime].close()
        held[runtime] = gates[runtime]._launch()

    def bind_to_meet(graph: SessionGraph, inputs: Any, outputs: Any) -> Callable[[], None]:
        call = bind(graph, inputs, outputs)

        def run() -> None:
            for runtime, event in held.items():
                assert not is_complete(event), "the graph did not run before the GPU's shard had ended"
                gates[runtime].open()
            call()
            for runtime in held:
                runtime.finish()
            held.clear()

        return run

    monkeypatch.setattr(BlockingFence, "mark", mark_and_close)
    monkeypatch.setattr(SessionGraph, "bind", bind_to_meet)


@pytest.fixture
def run(capsys):
    """Return a function that runs a command line: its exit code, what it wrote to stdout and to stderr."""

    def call(*arguments):
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


class Page(html.parser.HTMLParser):
    """Checks that what is opened is closed, and keeps what refers to somewhere."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.links, self.words, self.tags = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.links += [value for name, value in attributes if name in ("src", "href", "srcset", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


VOID = {"meta", "img", "br"}


@pytest.fixture(scope="session")
def read_page():
    """A reader of HTML that fails where something is opened and not closed: its tags, links and words."""

    def read(text):
        page = Page()
        page.feed(text)
        page.close()
        assert page.open == []
        return page

    return read
