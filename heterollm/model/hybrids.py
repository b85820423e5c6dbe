"""Declarations of families of which some layers have no attention, but recurrent state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from heterollm.kernels.ops import Group
from heterollm.model.block import Norm
from heterollm.model.expert_names import NAMED_EXPERTS, SHARED_EXPERT
from heterollm.model.family import (
    ATTENTION_BIASES,
    DENSE,
    HEAD_NORMS,
    NORMS,
    SECTION_COUNTS,
    SEPARATE,
    Family,
    LayerNames,
    Mixture,
    TensorNames,
    alike,
    by_type,
    every_layer,
    sparse_behind,
    sparse_steps,
)
from heterollm.model.json_fields import JsonFields


def lfm2_tie(fields: JsonFields) -> dict[str, object]:
    """Return whether the head is the embedding, by the older name if a configuration has it."""
    return {"tie_word_embeddings": fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True))}


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
    return {"layer_types": fields.get("layer_types") or kinds, "intermediate_size": width, **lfm2_tie(fields)}


def lfm3_kinds(fields: JsonFields) -> dict[str, object]:
    """Return the kinds of layers of a file without them (configuration_lfm3.py)."""
    if fields.get("layer_types") is not None:
        return {}
    turn = ("sliding_attention", "conv", "full_attention", "conv")
    kinds = [turn[layer % len(turn)] for layer in range(fields.count("num_hidden_layers"))]
    return {"layer_types": ["conv", *kinds[1:]]}


LFM3_ROPES: Final[dict[str, object]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1_000_000.0},
}


def qwen3_5_layers(fields: JsonFields) -> dict[str, object]:
    """Return the kinds of layers, of which every ``full_attention_interval``-th has attention."""
    if fields.get("layer_types") is not None:
        return {}
    interval, layers = fields.count("full_attention_interval", 4), fields.count("num_hidden_layers")
    kinds = "linear_attention", "full_attention"
    return {"layer_types": [kinds[(number + 1) % interval == 0] for number in range(layers)]}


def delta_layers(networks: LayerNames) -> LayerNames:
    """Return layers whose delta net or attention has the networks of others behind it."""
    mixers = by_type({"linear_attention": (("delta_net",),), "full_attention": (("attention",),)})
    return lambda fields, layer: (*mixers(fields, layer), networks(fields, layer)[-1])


DELTA_FIELDS: Final = frozenset(
    {
        *("layer_types", "full_attention_interval", "partial_rotary_factor", "linear_conv_kernel_dim"),
        *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    }
)
DELTA_LINEARS: Final[Mapping[Group, Mapping[str, str]]] = {
    **SEPARATE,
    "qkv": {**SEPARATE["qkv"], "gate": "self_attn.q_proj"},
    "delta_out": {"out": "linear_attn.out_proj"},
}
QWEN3_5_LINEARS: Final[Mapping[Group, Mapping[str, str]]] = {
    **DELTA_LINEARS,
    "delta_in": {
        **dict.fromkeys("qkv", "linear_attn.in_proj_qkv"),
        **{name: f"linear_attn.in_proj_{name}" for name in "zba"},
    },
}
FURTHER_TOKENS: Final = ("mtp.",)
"""Names of layers that predict further tokens."""

SHARED_MIXTURE: Final = Mixture(
    "mlp.gate",
    NAMED_EXPERTS,
    width_field="moe_intermediate_size",
    shared_field="shared_expert_intermediate_size",
    normalized_field="norm_topk_prob",
    count_fields=("num_experts",),
)
STACKED: Final = {"mlp.experts.gate_up_proj": ("gate", "up"), "mlp.experts.down_proj": ("down",)}
DELTA_TENSORS: Final[Mapping[str, str]] = {
    "taps": "linear_attn.conv1d.weight",
    "decay": "linear_attn.A_log",
    "decay_shift": "linear_attn.dt_bias",
    "gated_norm": "linear_attn.norm.weight",
}
SHARED_TENSORS: Final[Mapping[str, str]] = {**DELTA_TENSORS, "token_gate": "mlp.shared_expert_gate.weight"}
DELTA_NORMS: Final[Mapping[Norm, str]] = {**NORMS, **HEAD_NORMS}
DELTA_EXPERTS: Final[Mapping[str, object]] = {
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
QWEN_DELTA: Final[Mapping[str, object]] = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}

LFM2: Final = Family(
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
    layers=by_type({"conv": (("short_conv",), ("ffn",)), "full_attention": (("attention",), ("ffn",))}),
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
)

LFM3: Final = replace(
    LFM2,
    name="LFM3",
    covers="LFM3 1.7B",
    architecture="Lfm3ForCausalLM",
    tensors=replace(
        LFM2.tensors,
        modules={
            **LFM2.tensors.modules,
            "qkv": {**SEPARATE["qkv"], "gate": "self_attn.gate_proj"},
            "o": SEPARATE["o"],
        },
        norms={
            **LFM2.tensors.norms,
            **HEAD_NORMS,
            "attention_output": "post_operator_norm",
            "feed_forward_output": "post_ffn_norm",
        },
    ),
    layers=by_type(
        {
            "conv": (("short_conv",), ("ffn",)),
            **dict.fromkeys(("full_attention", "sliding_attention"), (("attention",), ("ffn",))),
        }
    ),
    defaults={
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "conv_L_cache": 7,
        "sliding_window": 256,
        "rope_parameters": LFM3_ROPES,
    },
    derived=lfm3_kinds,
    follows=frozenset({"layer_types", "conv_L_cache"}),
    ignores={
        "original_max_position_embeddings": SECTION_COUNTS,
        **dict.fromkeys(("rope_theta", "rope_scaling"), "rope_parameters counts"),
    },
    layered_rope=True,
    gates_heads=True,
    slides=every_layer,
    bos_ids=(124_894,),
    eos_ids=(124_900,),
)

HYBRIDS: Final[Mapping[str, Family]] = {
    "lfm2": LFM2,
    "lfm3": LFM3,
    "lfm2_moe": replace(
        LFM2,
        name="LFM2 with experts",
        covers="LFM2 8B-A1B and 24B-A2B",
        architecture="Lfm2MoeForCausalLM",
        tensors=replace(
            LFM2.tensors, others={**LFM2.tensors.others, "router_bias": "feed_forward.expert_bias"}
        ),
        layers=sparse_behind(LFM2.layers, "num_dense_layers"),
        mixture=Mixture(
            "feed_forward.gate",
            {
                member: f"feed_forward.experts.{{expert}}.{name}"
                for member, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
            },
            width_field="moe_intermediate_size",
            scoring="sigmoid",
            normalized_field="norm_topk_prob",
            bias_field="use_expert_bias",
            scale_field="routed_scaling_factor",
            count_fields=("num_experts",),
        ),
        defaults={
            **LFM2.defaults,
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
        },
        derived=lfm2_tie,
        follows=frozenset({"layer_types", "conv_L_cache", "num_dense_layers", "tie_embedding"}),
    ),
    "qwen3_5_text": Family(
        name="Qwen3.5",
        covers="Qwen3.5, 3.6 and 3.8 without experts",
        architecture="Qwen3_5ForCausalLM",
        tensors=TensorNames(QWEN3_5_LINEARS, DELTA_NORMS, others=DELTA_TENSORS, unread=FURTHER_TOKENS),
        layers=delta_layers(DENSE),
        kinds=("linear_attention",),
        defaults={**QWEN_DELTA, "num_key_value_heads": 4},
        derived=qwen3_5_layers,
        follows=DELTA_FIELDS,
        biases=ATTENTION_BIASES,
        norm_offset=1.0,
    ),
    "qwen3_5_moe_text": Family(
        name="Qwen3.5-MoE",
        covers="Qwen3.5 and 3.6 with experts",
        architecture="Qwen3_5MoeForCausalLM",
        tensors=TensorNames(
            QWEN3_5_LINEARS, DELTA_NORMS, shared=SHARED_EXPERT, others=SHARED_TENSORS, unread=FURTHER_TOKENS
        ),
        layers=delta_layers(alike(("attention",), ("mixture", "ffn"))),
        kinds=("linear_attention",),
        mixture=replace(SHARED_MIXTURE, normalized_field="", stacked=STACKED),
        defaults={**QWEN_DELTA, **DELTA_EXPERTS, "num_experts": 256, "num_experts_per_tok": 8},
        derived=qwen3_5_layers,
        follows=DELTA_FIELDS,
        biases=ATTENTION_BIASES,
        norm_offset=1.0,
    ),
    "qwen3_next": Family(
        name="Qwen3-Next",
        covers="Qwen3-Next and Qwen3-Coder-Next",
        architecture="Qwen3NextForCausalLM",
        tensors=TensorNames(
            {
                **DELTA_LINEARS,
                "delta_in": {
                    **dict.fromkeys("qkvz", "linear_attn.in_proj_qkvz"),
                    **dict.fromkeys("ba", "linear_attn.in_proj_ba"),
                },
            },
            DELTA_NORMS,
            shared=SHARED_EXPERT,
            others=SHARED_TENSORS,
            unread=FURTHER_TOKENS,
        ),
        layers=delta_layers(sparse_steps(("attention",), dense=("ffn",), sparse=("mixture", "ffn"))),
        kinds=("linear_attention",),
        mixture=SHARED_MIXTURE,
        defaults={
            **QWEN_DELTA,
            **DELTA_EXPERTS,
            "intermediate_size": 5632,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
        },
        derived=qwen3_5_layers,
        follows=DELTA_FIELDS | {"mlp_only_layers", "decoder_sparse_step"},
        biases=ATTENTION_BIASES,
        norm_offset=1.0,
    ),
}
"""The families by ``model_type``."""
