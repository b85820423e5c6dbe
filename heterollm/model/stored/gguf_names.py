"""The names of tensors in GGUF files, and the modules and groups that they stand for.

Source: https://github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/tensor_mapping.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple


class Other(NamedTuple):
    """A tensor of a layer that is no weight or bias of a module.

    Args:
        name: Its name below the layer.
        axis: Place of an axis of one element that files leave out; None for none.
        flat: Whether files have more axes than the one that it has.
    """

    name: str
    axis: int | None = None
    flat: bool = False


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
        "shortconv.out_proj": "conv.out_proj",
    }
)
OTHERS: Final[Mapping[str, Other]] = MappingProxyType(
    {
        "attn_sinks.weight": Other("self_attn.sinks"),
        "shortconv.conv.weight": Other("conv.conv.weight", 1),
        "ffn_gate_inp_shexp.weight": Other("mlp.shared_expert_gate.weight", 0),
        "layer_output_scale.weight": Other("layer_scalar"),
        "ssm_a": Other("linear_attn.A_log"),
        "ssm_dt.bias": Other("linear_attn.dt_bias"),
        "ssm_conv1d.weight": Other("linear_attn.conv1d.weight", 1),
    }
)
SKIP: Final = "ssm_d"
"""Tensor that only layers with a state space have."""
GROUPS: Final[Mapping[str, str]] = MappingProxyType(
    {
        **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_qkv"), "qkv"),
        "attn_output": "o",
        "ffn_gate": "gate_up",
        "ffn_up": "gate_up",
        "ffn_down": "down",
        **dict.fromkeys(("ffn_gate_shexp", "ffn_up_shexp"), "gate_up"),
        "ffn_down_shexp": "down",
        **dict.fromkeys(("attn_gate", "ssm_in", "ssm_ba", "ssm_alpha", "ssm_beta"), "delta_in"),
        "ssm_out": "delta_out",
        "inp_gate": "layer_gate",
        "proj": "layer_out",
        "shortconv.in_proj": "conv_in",
        "shortconv.out_proj": "conv_out",
        **dict.fromkeys(("ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps", "ffn_down_exps"), "experts"),
    }
)
"""The group of linears of each matrix of a layer; in a delta net ``attn_qkv`` is one of ``delta_in``."""

LATENT_GROUPS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("attn_q", "attn_q_a", "attn_kv_a_mqa"), "latent_in"),
    "attn_q_b": "latent_query",
    "attn_output": "latent_out",
}
"""The groups of linears of latent attention."""

SPACE_GROUPS: Final[Mapping[str, str]] = {"ssm_in": "mamba_in", "ssm_out": "mamba_out"}
"""The groups of linears of a state space."""


def space_modules(module: str) -> dict[str, str]:
    """Return the modules of a state space's linears by the file's names."""
    return {"ssm_in": f"{module}.in_proj", "ssm_out": f"{module}.out_proj"}


def space_others(module: str) -> dict[str, Other]:
    """Return the other tensors of a state space by the file's names."""
    return {
        SKIP: Other(f"{module}.D", flat=True),
        "ssm_a": Other(f"{module}.A_log", flat=True),
        "ssm_dt.bias": Other(f"{module}.dt_bias"),
        "ssm_conv1d.weight": Other(f"{module}.conv1d.weight", 1),
        "ssm_conv1d.bias": Other(f"{module}.conv1d.bias"),
        "ssm_norm.weight": Other(f"{module}.norm.weight", flat=True),
    }


TOP_MODULES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_TENSOR: Final = re.compile(r"blk\.(\d+)\.(.+)")
LONE_EXPERT: Final = re.compile(r"blk\.(\d+)\.(ffn_gate|ffn_up|ffn_down)\.(\d+)\.weight")
"""The weight of one expert, in files of before April 2024."""
