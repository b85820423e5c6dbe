"""Declarations of families with latent attention (MLA): DeepSeek and GLM-4.7-Flash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from heterollm.model.block import ROUTER_BIAS
from heterollm.model.expert_names import NOT_READ, SHARED_EXPERTS, SIGMOID_EXPERTS
from heterollm.model.family import NORMS, SEPARATE, Family, LayerNames, StageNames, TensorNames
from heterollm.model.json_fields import JsonFields

LATENT_FIELDS: Final = frozenset(
    {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}
)
TENSORS: Final = TensorNames(
    {
        # Queries come from the stream, or from a vector of their own.
        "latent_in": {
            "a": "self_attn.q_a_proj",
            **dict.fromkeys("qp", "self_attn.q_proj"),
            **dict.fromkeys("cr", "self_attn.kv_a_proj_with_mqa"),
        },
        "latent_query": dict.fromkeys("qp", "self_attn.q_b_proj"),
        "latent_out": {"o": "self_attn.o_proj"},
        "gate_up": SEPARATE["gate_up"],
        "down": SEPARATE["down"],
    },
    NORMS,
    shared=SHARED_EXPERTS,
    others={
        "latent_weights": "self_attn.kv_b_proj.weight",
        "latent_norm": "self_attn.kv_a_layernorm.weight",
        "latent_query_norm": "self_attn.q_a_layernorm.weight",
        ROUTER_BIAS: "mlp.gate.e_score_correction_bias",
    },
    # A layer that predicts further tokens.
    unread=("model.layers.{layers}.",),
)
IGNORED: Final[Mapping[str, str]] = {
    **dict.fromkeys(("head_dim", "qk_head_dim"), "qk_nope_head_dim and qk_rope_head_dim count"),
    "num_key_value_heads": "a latent vector serves all heads",
}


def rotated(fields: JsonFields) -> dict[str, object]:
    """Return the width that rotates as that of a head, and as many key heads as query heads."""
    heads = fields.count("num_attention_heads")
    return {"head_dim": fields.count("qk_rope_head_dim"), "num_key_value_heads": heads}


def behind_dense(sparse: StageNames) -> LayerNames:
    """Return layers that are sparse behind the first ones, or as ``mlp_layer_types`` says."""

    def stages(fields: JsonFields, layer: int) -> tuple[StageNames, ...]:
        kinds = fields.get("mlp_layer_types")
        dense = fields.count("first_k_dense_replace", 0, minimum=0)
        if kinds is not None and not (
            isinstance(kinds, list) and layer < len(kinds) and kinds[layer] in ("dense", "sparse")
        ):
            raise fields.fail("mlp_layer_types", "a list of dense or sparse, one for each layer")
        is_dense = layer < dense if kinds is None else kinds[layer] == "dense"
        return ("latent_attention",), ("ffn",) if is_dense else sparse

    return stages


LATENT: Final[Mapping[str, Family]] = {
    "deepseek_v2": Family(
        name="DeepSeek-V2",
        covers="DeepSeek-V2-Lite and DeepSeek-Coder-V2-Lite",
        architecture="DeepseekV2ForCausalLM",
        tensors=TENSORS,
        layers=behind_dense(("mixture", "ffn")),
        mixture=replace(
            SIGMOID_EXPERTS,
            scoring="softmax",
            normalized_field=False,
            bias_field=False,
            group_method="group_limited_greedy",
        ),
        defaults={
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "moe_intermediate_size": 1407,
            "first_k_dense_replace": 0,
        },
        derived=rotated,
        follows=LATENT_FIELDS | {"first_k_dense_replace"},
        ignores={**IGNORED, "norm_topk_prob": "transformers ignores it"},
        published_code=("modeling_deepseek.DeepseekV2ForCausalLM",),
        bos_ids=(1,),
        eos_ids=(2,),
    ),
    "deepseek_v3": Family(
        name="DeepSeek-V3",
        covers="DeepSeek-V3 and R1, Kimi-K2, Moonlight",
        architecture="DeepseekV3ForCausalLM",
        tensors=TENSORS,
        layers=behind_dense(("mixture", "ffn")),
        mixture=SIGMOID_EXPERTS,
        defaults={
            "intermediate_size": 18_432,
            "max_position_embeddings": 4096,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 256,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2048,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
            "first_k_dense_replace": 3,
        },
        derived=rotated,
        follows=LATENT_FIELDS | {"first_k_dense_replace", "rope_interleave"},
        ignores={**IGNORED, **NOT_READ},
        published_code=("modeling_deepseek.DeepseekV3ForCausalLM",),
        bos_ids=(0,),
        eos_ids=(1,),
    ),
    "glm4_moe_lite": Family(
        name="GLM-4.7-Flash",
        covers="GLM-4.7-Flash",
        architecture="Glm4MoeLiteForCausalLM",
        tensors=TENSORS,
        layers=behind_dense(("mixture", "ffn")),
        mixture=SIGMOID_EXPERTS,
        defaults={
            "rms_norm_eps": 1e-5,
            "intermediate_size": 10_240,
            "q_lora_rank": 768,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "routed_scaling_factor": 1.8,
            "norm_topk_prob": True,
            "first_k_dense_replace": 1,
        },
        derived=rotated,
        follows=LATENT_FIELDS | {"mlp_layer_types", "rope_interleave"},
        ignores={**IGNORED, **NOT_READ, "first_k_dense_replace": "mlp_layer_types counts; one by default"},
        bos_ids=(0,),
        eos_ids=(1,),
    ),
}
"""The families by ``model_type``."""
