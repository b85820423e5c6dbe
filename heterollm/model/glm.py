"""GLM-4 and GLM-4.5 (``modeling_glm.py``, ``modeling_glm4.py`` and ``modeling_glm4_moe.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from heterollm.model.block import ROUTER_BIAS
from heterollm.model.expert_names import NOT_READ, SHARED_EXPERTS, SIGMOID_EXPERTS
from heterollm.model.family import (
    DENSE,
    FUSED_NETWORK,
    HEAD_NORMS,
    NORMS,
    SEPARATE,
    Family,
    TensorNames,
    sparse_behind,
)

GLM: Final[Mapping[str, object]] = {
    "num_key_value_heads": 2,
    "head_dim": 128,
    "rms_norm_eps": 1.5625e-07,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
}

GLMS: Final[Mapping[str, Family]] = {
    "glm": Family(
        name="GLM-4 of 2024",
        covers="GLM-4 9B of 2024 and GLM-Edge",
        architecture="GlmForCausalLM",
        tensors=TensorNames(FUSED_NETWORK, NORMS),
        defaults=GLM,
        follows=frozenset({"partial_rotary_factor"}),
        biases={"qkv": "attention_bias"},
        interleaved_rope=True,
    ),
    "glm4": Family(
        name="GLM-4",
        covers="GLM-4-0414 9B and 32B",
        architecture="Glm4ForCausalLM",
        tensors=TensorNames(
            FUSED_NETWORK,
            {
                **NORMS,
                "attention_output": "post_self_attn_layernorm",
                "feed_forward_output": "post_mlp_layernorm",
            },
        ),
        defaults=GLM,
        follows=frozenset({"partial_rotary_factor"}),
        biases={"qkv": "attention_bias"},
        interleaved_rope=True,
    ),
}

GLM4_MOE: Final = Family(
    name="GLM-4.5",
    covers="GLM-4.5-Air",
    architecture="Glm4MoeForCausalLM",
    tensors=TensorNames(
        SEPARATE,
        {**NORMS, **HEAD_NORMS},
        shared=SHARED_EXPERTS,
        others={ROUTER_BIAS: "mlp.gate.e_score_correction_bias"},
        # A layer that predicts further tokens.
        unread=("model.layers.{layers}.",),
    ),
    layers=sparse_behind(DENSE, "first_k_dense_replace", sparse=("mixture", "ffn")),
    mixture=SIGMOID_EXPERTS,
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "intermediate_size": 10_944,
        "moe_intermediate_size": 1408,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "first_k_dense_replace": 1,
    },
    follows=frozenset({"partial_rotary_factor", "first_k_dense_replace", "use_qk_norm"}),
    biases={"qkv": "attention_bias"},
    ignores=NOT_READ,
)
