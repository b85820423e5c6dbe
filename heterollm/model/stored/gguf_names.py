"""The names of tensors in GGUF files, and the modules and groups that they stand for.

Source: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

MODULES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.conv": "conv.conv",
        "shortconv.out_proj": "conv.out_proj",
    }
)
GROUPS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_qkv"), "qkv"),
        "attn_output": "o",
        "ffn_gate": "gate_up",
        "ffn_up": "gate_up",
        "ffn_down": "down",
        **dict.fromkeys(("ffn_gate_shexp", "ffn_up_shexp"), "gate_up"),
        "ffn_down_shexp": "down",
        "shortconv.in_proj": "conv_in",
        "shortconv.out_proj": "conv_out",
        **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), "experts"),
    }
)
"""The group of linears of each matrix of a layer."""

TOP_MODULES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_TENSOR: Final = re.compile(r"blk\.(\d+)\.(\w+|shortconv\.\w+)\.(weight|bias)")
LONE_EXPERT: Final = re.compile(r"blk\.(\d+)\.(ffn_gate|ffn_up|ffn_down)\.(\d+)\.weight")
"""The weight of one expert, in files of before April 2024."""
