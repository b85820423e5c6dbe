"""Declarations of families of which some layers have no attention, but recurrent state."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from heterollm.model.blocks import Norm
from heterollm.model.family import (
    ATTENTION_BIASES,
    HEAD_NORMS,
    NORMS,
    SEPARATE,
    Family,
    StageNames,
    TensorNames,
    by_type,
)
from heterollm.model.json_fields import JsonFields

ATTENTION: Final[Mapping[str, tuple[StageNames, ...]]] = {"full_attention": (("attention",), ("ffn",))}


def lfm2_sizes(fields: JsonFields) -> dict[str, object]:
    """Return the kinds of layers, and the width of networks, that LFM2 derives (configuration_lfm2.py)."""
    layers, attend = fields.count("num_hidden_layers"), fields.get("full_attn_idxs")
    width = fields.count("intermediate_size" if fields.get("block_ff_dim") is None else "block_ff_dim")
    attend = attend if isinstance(attend, list) else range(layers)
    kinds = ["full_attention" if number in attend else "conv" for number in range(layers)]
    if fields.flag("block_auto_adjust_ff_dim", True):
        multiple = fields.count("block_multiple_of")
        width = int(fields.positive("block_ffn_dim_multiplier") * int(2 * width / 3))
        width = -(-width // multiple) * multiple
    return {
        "layer_types": fields.get("layer_types") or kinds,
        "intermediate_size": width,
        "tie_word_embeddings": fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True)),
    }


def qwen3_5_layers(fields: JsonFields) -> dict[str, object]:
    """Return the kinds of layers, of which every ``full_attention_interval``-th has attention."""
    if fields.get("layer_types") is not None:
        return {}
    interval, layers = fields.count("full_attention_interval", 4), fields.count("num_hidden_layers")
    kinds = "linear_attention", "full_attention"
    return {"layer_types": [kinds[(number + 1) % interval == 0] for number in range(layers)]}


DELTA_FIELDS: Final = frozenset(
    {
        *("layer_types", "full_attention_interval", "partial_rotary_factor", "linear_conv_kernel_dim"),
        *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    }
)
DELTA_TENSORS: Final[Mapping[str, str]] = {
    "taps": "linear_attn.conv1d.weight",
    "decay": "linear_attn.A_log",
    "decay_shift": "linear_attn.dt_bias",
    "gated_norm": "linear_attn.norm.weight",
}
DELTA_NORMS: Final[Mapping[Norm, str]] = {**NORMS, **HEAD_NORMS}
QWEN_DELTA: Final[Mapping[str, object]] = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

HYBRIDS: Final[Mapping[str, Family]] = MappingProxyType(
    {
        "lfm2": Family(
            name="LFM2",
            covers="LFM2 and LFM2.5 from 350M to 2.6B",
            architecture="Lfm2ForCausalLM",
            tensors=TensorNames(
                {
                    **SEPARATE,
                    "o": {"o": "self_attn.out_proj"},
                    "conv_in": dict.fromkeys("bcx", "conv.in_proj"),
                    "conv_out": {"out": "conv.out_proj"},
                    "gate_up": {"gate": "feed_forward.w1", "up": "feed_forward.w3"},
                    "down": {"down": "feed_forward.w2"},
                },
                {
                    "attention": "operator_norm",
                    "feed_forward": "ffn_norm",
                    "query_head": "self_attn.q_layernorm",
                    "key_head": "self_attn.k_layernorm",
                },
                others={"taps": "conv.conv.weight"},
                # The last norm, in spite of its name.
                final_norm="model.embedding_norm",
            ),
            layers=by_type({"conv": (("short_conv",), ("ffn",)), **ATTENTION}),
            kinds=("conv",),
            defaults={
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1_000_000.0,
                "tie_word_embeddings": True,
                "conv_L_cache": 3,
                "block_multiple_of": 256,
                "block_ffn_dim_multiplier": 1.0,
            },
            renamed={"rms_norm_eps": "norm_eps"},
            derived=lfm2_sizes,
            follows=frozenset(
                {
                    *("layer_types", "full_attn_idxs", "conv_L_cache", "block_auto_adjust_ff_dim"),
                    *("block_multiple_of", "block_ffn_dim_multiplier", "block_ff_dim", "tie_embedding"),
                }
            ),
            bos_ids=(1,),
            eos_ids=(2,),
        ),
        "qwen3_5_text": Family(
            name="Qwen3.5",
            covers="Qwen3.5, 3.6 and 3.8 without experts",
            architecture="Qwen3_5ForCausalLM",
            tensors=TensorNames(
                {
                    **SEPARATE,
                    "qkv": {**SEPARATE["qkv"], "gate": "self_attn.q_proj"},
                    "delta_in": {
                        **dict.fromkeys("qkv", "linear_attn.in_proj_qkv"),
                        **{name: f"linear_attn.in_proj_{name}" for name in "zba"},
                    },
                    "delta_out": {"out": "linear_attn.out_proj"},
                },
                DELTA_NORMS,
                others=DELTA_TENSORS,
                # Layers that predict further tokens.
                unread=("mtp.",),
            ),
            layers=by_type({"linear_attention": (("delta_net",), ("ffn",)), **ATTENTION}),
            kinds=("linear_attention",),
            defaults={**QWEN_DELTA, "num_key_value_heads": 4},
            derived=qwen3_5_layers,
            follows=DELTA_FIELDS,
            biases=ATTENTION_BIASES,
            norm_offset=1.0,
        ),
    }
)
"""The families by ``model_type``."""
