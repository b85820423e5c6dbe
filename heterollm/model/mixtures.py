"""The supported families of mixtures of experts, one declaration each, as :mod:`heterollm.model.families`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from heterollm.kernels.ops import Group
from heterollm.model.family import (
    HEAD_NORMS,
    NORMS,
    SEPARATE,
    Family,
    Mixture,
    TensorNames,
    alike,
    every_layer,
    sparse_steps,
)

# ---- tensor names ---------------------------------------------------------------------------------------

ATTENTION: Mapping[Group, Mapping[str, str]] = MappingProxyType(
    {group: SEPARATE[group] for group in ("qkv", "o")}
)
SHARED: Mapping[Group, Mapping[str, str]] = MappingProxyType(
    {
        **ATTENTION,
        "gate_up": dict.fromkeys(("gate", "up"), "shared_mlp.input_linear"),
        "down": {"down": "shared_mlp.output_linear"},
    }
)

NAMED_EXPERTS: Mapping[str, str] = MappingProxyType(
    {member: f"mlp.experts.{{expert}}.{member}_proj" for member in ("gate", "up", "down")}
)
NUMBERED_EXPERTS: Mapping[str, str] = MappingProxyType(
    {
        member: f"block_sparse_moe.experts.{{expert}}.{name}"
        for member, name in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
    }
)
STACKED_EXPERTS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("gate", "up"), "block_sparse_moe.input_linear"),
        "down": "block_sparse_moe.output_linear",
    }
)

SPARSE: Final = alike(("attention",), ("mixture",))

# ---- the families ---------------------------------------------------------------------------------------

GRANITE_FIELDS = frozenset(
    {
        *("attention_bias", "attention_multiplier", "embedding_multiplier"),
        *("residual_multiplier", "logits_scaling"),
    }
)

MIXTURES: Mapping[str, Family] = MappingProxyType(
    {
        "mixtral": Family(
            name="Mixtral",
            covers="Mixtral",
            architecture="MixtralForCausalLM",
            tensors=TensorNames(ATTENTION, NORMS),
            layers=SPARSE,
            mixture=Mixture("block_sparse_moe.gate", NUMBERED_EXPERTS),
            defaults={
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1_000_000.0,
                "num_experts": 8,
                "num_experts_per_tok": 2,
            },
            slides=every_layer,
            bos_ids=(1,),
            eos_ids=(2,),
        ),
        "qwen3_moe": Family(
            name="Qwen3-MoE",
            covers="Qwen3-MoE",
            architecture="Qwen3MoeForCausalLM",
            tensors=TensorNames(SEPARATE, {**NORMS, **HEAD_NORMS}),
            layers=sparse_steps(("attention",), dense=("ffn",), sparse=("mixture",)),
            mixture=Mixture(
                "mlp.gate",
                NAMED_EXPERTS,
                width_field="moe_intermediate_size",
                normalized_field="norm_topk_prob",
            ),
            defaults={
                "num_key_value_heads": 4,
                "sliding_window": 4096,
                "intermediate_size": 6144,
                "moe_intermediate_size": 768,
                "num_experts": 128,
                "num_experts_per_tok": 8,
            },
            follows=frozenset({"use_sliding_window", "attention_bias"}),
            slides=every_layer,
        ),
        "olmoe": Family(
            name="OLMoE",
            covers="OLMoE",
            architecture="OlmoeForCausalLM",
            tensors=TensorNames(ATTENTION, {**NORMS, **HEAD_NORMS}),
            layers=SPARSE,
            mixture=Mixture("mlp.gate", NAMED_EXPERTS, normalized_field="norm_topk_prob"),
            defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
            follows=frozenset({"attention_bias", "clip_qkv"}),
            joint_head_norms=True,
            eos_ids=(50279,),
        ),
        "phimoe": Family(
            name="Phi-MoE",
            covers="Phi-3.5-MoE and Phi-mini-MoE",
            architecture="PhimoeForCausalLM",
            tensors=TensorNames(ATTENTION, NORMS),
            layers=SPARSE,
            mixture=Mixture("block_sparse_moe.gate", NUMBERED_EXPERTS, scoring="sparsemixer"),
            defaults={
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1_000_000.0,
                "num_experts": 16,
                "num_experts_per_tok": 2,
                "router_jitter_noise": 0.01,
            },
            follows=frozenset({"attention_bias", "lm_head_bias", "short_mscale"}),
            slides=every_layer,
            centered_norms=True,
            published_code="modeling_phimoe.PhiMoEForCausalLM",
            bos_ids=(1,),
            eos_ids=(2,),
        ),
        "granitemoe": Family(
            name="Granite MoE",
            covers="Granite 3.0 and 3.1 with experts",
            architecture="GraniteMoeForCausalLM",
            tensors=TensorNames(ATTENTION, NORMS),
            layers=SPARSE,
            mixture=Mixture("block_sparse_moe.router.layer", STACKED_EXPERTS),
            defaults={"num_experts": 8, "num_experts_per_tok": 2},
            follows=GRANITE_FIELDS,
            bos_ids=(1,),
            eos_ids=(2,),
        ),
        "granitemoeshared": Family(
            name="Granite MoE with shared experts",
            covers="Granite MoE with shared experts",
            architecture="GraniteMoeSharedForCausalLM",
            tensors=TensorNames(SHARED, NORMS),
            layers=alike(("attention",), ("mixture", "ffn")),
            mixture=Mixture(
                "block_sparse_moe.router.layer", STACKED_EXPERTS, shared_field="shared_intermediate_size"
            ),
            defaults={"num_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 0},
            follows=GRANITE_FIELDS,
            bos_ids=(1,),
            eos_ids=(2,),
        ),
    }
)
"""Values of ``model_type`` with experts."""
