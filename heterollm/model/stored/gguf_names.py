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
        "attn_qkv": "self_attn.qkv_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
GROUPS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_qkv"), "qkv"),
        "attn_output": "o",
        "ffn_gate": "gate_up",
        "ffn_up": "gate_up",
        "ffn_down": "down",
        **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), "experts"),
    }
)
"""The group of linears of each matrix of a layer."""

GEMMA_MODULES: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
EXPERTS: Final[Mapping[str, Mapping[str, str]]] = MappingProxyType(
    {
        **{
            kind: {
                f"ffn_{member}_exps": f"mlp.experts.{{}}.{member}_proj" for member in ("gate", "up", "down")
            }
            for kind in ("qwen3_moe", "olmoe")
        },
        "mixtral": {
            f"ffn_{member}_exps": f"block_sparse_moe.experts.{{}}.{name}"
            for member, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        },
    }
)
"""Names of an expert's weight by the stack that holds it, of each kind of mixture."""
ROUTERS: Final = {"mixtral": "block_sparse_moe.gate", "qwen3_moe": "mlp.gate", "olmoe": "mlp.gate"}

TOP_MODULES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_TENSOR: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
LONE_EXPERT: Final = re.compile(r"blk\.(\d+)\.(ffn_gate|ffn_up|ffn_down)\.(\d+)\.weight")
"""The weight of one expert, in files of before April 2024."""
