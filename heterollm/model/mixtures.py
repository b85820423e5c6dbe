"""The supported families of mixtures of experts, one declaration each, as :mod:`heterollm.model.families`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from heterollm.kernels.ops import Group
from heterollm.model.block import ROUTER_BIAS
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
    StageNames,
    TensorNames,
    after_full_layers,
    alike,
    all_but_every_nth,
    every_layer,
    no_layer,
    sparse_behind,
    sparse_steps,
)
from heterollm.model.json_fields import JsonFields

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
SHARED_EXPERT: Mapping[Group, Mapping[str, str]] = MappingProxyType(
    {
        "gate_up": {member: f"mlp.shared_expert.{member}_proj" for member in ("gate", "up")},
        "down": {"down": "mlp.shared_expert.down_proj"},
    }
)
SHARED_EXPERTS: Mapping[Group, Mapping[str, str]] = MappingProxyType(
    {
        "gate_up": {member: f"mlp.shared_experts.{member}_proj" for member in ("gate", "up")},
        "down": {"down": "mlp.shared_experts.down_proj"},
    }
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


def by_mlp_type(sparse: StageNames) -> LayerNames:
    """Return layers that are sparse unless ``mlp_layer_types`` calls them dense."""

    def stages(fields: JsonFields, layer: int) -> tuple[StageNames, ...]:
        kinds = fields.get("mlp_layer_types")
        if kinds is not None and not (
            isinstance(kinds, list) and layer < len(kinds) and kinds[layer] in ("dense", "sparse")
        ):
            raise fields.fail("mlp_layer_types", "a list of dense or sparse, one for each layer")
        return ("attention",), ("ffn",) if kinds and kinds[layer] == "dense" else sparse

    return stages


def first_are_dense(fields: JsonFields) -> dict[str, object]:
    """Return the kinds of networks of a file without them: a field counts the first, dense ones."""
    if fields.get("mlp_layer_types") is not None:
        return {}
    dense, layers = fields.count("first_k_dense_replace", minimum=0), fields.count("num_hidden_layers")
    return {"mlp_layer_types": ["dense" if layer < dense else "sparse" for layer in range(layers)]}


def every_other_layer(_fields: JsonFields, layer: int) -> bool:
    """Return true for the first layer, the third and so on."""
    return layer % 2 == 0


def every_other_first_layer(fields: JsonFields, layer: int) -> bool:
    """Return true for the first, the third and so on of the first ``max_window_layers``."""
    return layer % 2 == 0 and layer < fields.count("max_window_layers", minimum=0)


def ernie_layers(fields: JsonFields, layer: int) -> tuple[StageNames, ...]:
    """Return a layer with experts at every so many layers of a range, else a dense one."""
    last = fields.count("moe_layer_end_index", minimum=-1)
    inside = fields.count("moe_layer_start_index", minimum=0) <= layer and (last < 0 or layer <= last)
    sparse = inside and (layer + 1) % fields.count("moe_layer_interval") == 0
    return ("attention",), ("mixture", "ffn") if sparse else ("ffn",)


# ---- the families ---------------------------------------------------------------------------------------

GRANITE_FIELDS = frozenset(
    {
        *("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"),
    }
)

GRANITE_EXPERTS: Final = Mixture(
    "block_sparse_moe.router.layer", STACKED_EXPERTS, count_fields=("num_local_experts",)
)

SIGMOID_EXPERTS: Final = Mixture(
    "mlp.gate",
    NAMED_EXPERTS,
    width_field="moe_intermediate_size",
    shared_count_field="n_shared_experts",
    scoring="sigmoid",
    normalized_field="norm_topk_prob",
    bias_field=True,
    group_fields=("n_group", "topk_group"),
    scale_field="routed_scaling_factor",
    count_fields=("n_routed_experts",),
)
NOT_READ: Final = dict.fromkeys(
    ("num_nextn_predict_layers", "num_mtp_layers"), "layers that predict further tokens are not read"
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
        "qwen2_moe": Family(
            name="Qwen2-MoE",
            covers="Qwen1.5-MoE and Qwen2-MoE",
            architecture="Qwen2MoeForCausalLM",
            tensors=TensorNames(
                SEPARATE, NORMS, shared=SHARED_EXPERT, others={"token_gate": "mlp.shared_expert_gate.weight"}
            ),
            layers=sparse_steps(("attention",), dense=("ffn",), sparse=("mixture", "ffn")),
            mixture=Mixture(
                "mlp.gate",
                NAMED_EXPERTS,
                width_field="moe_intermediate_size",
                shared_field="shared_expert_intermediate_size",
                normalized_field="norm_topk_prob",
                count_fields=("num_experts",),
            ),
            defaults={
                "num_key_value_heads": 16,
                "sliding_window": 4096,
                "max_window_layers": 28,
                "intermediate_size": 5632,
                "moe_intermediate_size": 1408,
                "shared_expert_intermediate_size": 5632,
                "num_experts": 60,
                "num_experts_per_tok": 4,
                "qkv_bias": True,
            },
            follows=frozenset(
                {
                    *("use_sliding_window", "max_window_layers", "layer_types"),
                    *("mlp_only_layers", "decoder_sparse_step"),
                }
            ),
            biases={"qkv": "qkv_bias"},
            slides=every_other_first_layer,
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
            follows=frozenset({"use_sliding_window", "mlp_only_layers", "decoder_sparse_step"}),
            biases=ATTENTION_BIASES,
            slides=every_layer,
        ),
        "mellum": Family(
            name="Mellum 2",
            covers="Mellum 2",
            architecture="MellumForCausalLM",
            tensors=TensorNames(SEPARATE, {**NORMS, **HEAD_NORMS}, unread=("mtp.",)),
            layers=by_mlp_type(("mixture",)),
            mixture=Mixture(
                "mlp.gate",
                NAMED_EXPERTS,
                width_field="moe_intermediate_size",
                normalized_field="norm_topk_prob",
            ),
            defaults={
                "num_key_value_heads": 4,
                "head_dim": 128,
                "sliding_window": 1024,
                "moe_intermediate_size": 896,
                "num_experts": 64,
                "num_experts_per_tok": 8,
                "norm_topk_prob": True,
                "rope_theta": 500_000.0,
                "rope_local_base_freq": 10_000.0,
            },
            follows=frozenset({"layer_types", "mlp_layer_types"}),
            biases=ATTENTION_BIASES,
            slides=no_layer,
            layered_rope=True,
            ignores={
                "original_max_position_embeddings": SECTION_COUNTS,
                **dict.fromkeys(("rope_theta", "rope_scaling"), "rope_parameters counts"),
                **dict.fromkeys(
                    (
                        *("num_mtp_layers", "num_nextn_predict_layers"),
                        *("mtp_layer_types", "mtp_mlp_layer_types"),
                    ),
                    "layers that predict further tokens are not read",
                ),
            },
        ),
        "ernie4_5_moe": Family(
            name="ERNIE 4.5 with experts",
            covers="ERNIE 4.5 21B-A3B",
            architecture="Ernie4_5_MoeForCausalLM",
            tensors=TensorNames(
                SEPARATE,
                NORMS,
                shared=SHARED_EXPERTS,
                others={ROUTER_BIAS: "mlp.moe_statics.e_score_correction_bias"},
                unread=("model.mtp_",),
            ),
            layers=ernie_layers,
            mixture=Mixture(
                "mlp.gate",
                NAMED_EXPERTS,
                width_field="moe_intermediate_size",
                shared_count_field="moe_num_shared_experts",
                bias_field=True,
                bias_row=True,
                count_fields=("moe_num_experts",),
                chosen_field="moe_k",
            ),
            defaults={
                "num_key_value_heads": 4,
                "rms_norm_eps": 1e-5,
                "rope_theta": 500_000.0,
                "tie_word_embeddings": True,
                "intermediate_size": 12_288,
                "moe_intermediate_size": 1536,
                "moe_num_experts": 64,
                "moe_num_shared_experts": 2,
                "moe_k": 6,
                "moe_layer_start_index": 1,
                "moe_layer_end_index": -1,
                "moe_layer_interval": 1,
            },
            follows=frozenset({"moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"}),
            ignores={
                "moe_norm_min": "the sum of the chosen scores is larger",
                "num_nextn_predict_layers": "layers that predict further tokens are not read",
                **dict.fromkeys(
                    ("moe_capacity", "moe_gate", "moe_use_aux_free", "compression_ratio", "use_rmsnorm"),
                    "transformers ignores it",
                ),
            },
            biases=dict.fromkeys(("qkv", "o", "ffn", "head"), "use_bias"),
            interleaved_rope=True,
            published_code=("modeling_ernie4_5_moe.Ernie4_5_MoeForCausalLM",),
            bos_ids=(1,),
            eos_ids=(2,),
        ),
        "gpt_oss": Family(
            name="gpt-oss",
            covers="gpt-oss 20B and 120B",
            architecture="GptOssForCausalLM",
            tensors=TensorNames(
                ATTENTION,
                NORMS,
                others={
                    "sinks": "self_attn.sinks",
                    ROUTER_BIAS: "mlp.router.bias",
                    **{
                        f"{member}_bias": f"mlp.experts.{member}_proj.bias"
                        for member in ("gate", "up", "down")
                    },
                },
            ),
            layers=SPARSE,
            mixture=Mixture(
                "mlp.router",
                NAMED_EXPERTS,
                alternating={
                    "mlp.experts.gate_up_proj": (NAMED_EXPERTS["gate"], NAMED_EXPERTS["up"]),
                    "mlp.experts.down_proj": (NAMED_EXPERTS["down"],),
                },
                biased=True,
                clip_fields=("swiglu_limit", "swiglu_alpha"),
            ),
            defaults={
                "num_key_value_heads": 8,
                "head_dim": 64,
                "rms_norm_eps": 1e-5,
                "sliding_window": 128,
                "attention_bias": True,
                "num_experts": 128,
                "num_experts_per_tok": 4,
                "swiglu_limit": 7.0,
                "swiglu_alpha": 1.702,
                "rope_theta": 150_000.0,
                "rope_parameters": {
                    "rope_type": "yarn",
                    "factor": 32.0,
                    "truncate": False,
                    "original_max_position_embeddings": 4096,
                },
            },
            follows=frozenset({"layer_types"}),
            biases=ATTENTION_BIASES,
            slides=every_other_layer,
            ignores={
                "initial_context_length": "the section of the rotary embedding states it",
                "experts_per_token": "num_experts_per_tok counts",
            },
        ),
        "glm4_moe": Family(
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
        ),
        "dots1": Family(
            name="dots.llm1",
            covers="dots.llm1",
            architecture="Dots1ForCausalLM",
            tensors=TensorNames(
                SEPARATE,
                {**NORMS, **HEAD_NORMS},
                shared=SHARED_EXPERTS,
                others={ROUTER_BIAS: "mlp.gate.e_score_correction_bias"},
            ),
            layers=sparse_behind(DENSE, "first_k_dense_replace", sparse=("mixture", "ffn")),
            mixture=SIGMOID_EXPERTS,
            defaults={
                "num_key_value_heads": 32,
                "sliding_window": 4096,
                "max_window_layers": 62,
                "intermediate_size": 10_944,
                "moe_intermediate_size": 1408,
                "first_k_dense_replace": 0,
            },
            follows=frozenset({"first_k_dense_replace", "max_window_layers", "layer_types"}),
            biases=ATTENTION_BIASES,
            slides=after_full_layers,
        ),
        "exaone_moe": Family(
            name="K-EXAONE",
            covers="K-EXAONE",
            architecture="ExaoneMoeForCausalLM",
            tensors=TensorNames(
                SEPARATE,
                {**NORMS, **HEAD_NORMS},
                shared=SHARED_EXPERTS,
                others={ROUTER_BIAS: "mlp.e_score_correction_bias"},
                unread=("mtp.",),
            ),
            layers=by_mlp_type(("mixture", "ffn")),
            mixture=replace(
                SIGMOID_EXPERTS, shared_count_field="num_shared_experts", count_fields=("num_experts",)
            ),
            defaults={
                "num_key_value_heads": 32,
                "rms_norm_eps": 1e-5,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
                "intermediate_size": 16_384,
                "moe_intermediate_size": 1024,
                "num_experts": 64,
                "num_experts_per_tok": 8,
                "num_shared_experts": 1,
                "norm_topk_prob": True,
                "routed_scaling_factor": 2.5,
                "first_k_dense_replace": 1,
            },
            derived=first_are_dense,
            follows=frozenset(
                {"layer_types", "mlp_layer_types", "first_k_dense_replace", "sliding_window_pattern"}
            ),
            rope_needs_window=True,
            slides=all_but_every_nth,
            ignores=NOT_READ,
            bos_ids=(1,),
            eos_ids=(53,),
        ),
        "olmoe": Family(
            name="OLMoE",
            covers="OLMoE",
            architecture="OlmoeForCausalLM",
            tensors=TensorNames(ATTENTION, {**NORMS, **HEAD_NORMS}),
            layers=SPARSE,
            mixture=Mixture("mlp.gate", NAMED_EXPERTS, normalized_field="norm_topk_prob"),
            defaults={"rms_norm_eps": 1e-5, "num_experts": 64, "num_experts_per_tok": 8},
            follows=frozenset({"clip_qkv"}),
            biases=ATTENTION_BIASES,
            joint_head_norms=True,
            eos_ids=(50279,),
        ),
        "phimoe": Family(
            name="Phi-MoE",
            covers="Phi-3.5-MoE, Phi-mini-MoE and Phi-tiny-MoE",
            architecture="PhimoeForCausalLM",
            tensors=TensorNames(ATTENTION, NORMS),
            layers=SPARSE,
            mixture=Mixture(
                "block_sparse_moe.gate",
                NUMBERED_EXPERTS,
                scoring="sparsemixer",
                count_fields=("num_local_experts",),
            ),
            defaults={
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "rope_theta": 1_000_000.0,
                "num_local_experts": 16,
                "num_experts_per_tok": 2,
                "router_jitter_noise": 0.01,
            },
            follows=frozenset({"router_jitter_noise", "short_mscale"}),
            biases={**ATTENTION_BIASES, "head": "lm_head_bias"},
            slides=every_layer,
            centered_norms=True,
            ignores={"original_max_position_embeddings": SECTION_COUNTS},
            published_code=("modeling_phimoe.PhiMoEForCausalLM", "modeling_slimmoe.PhiMoEForCausalLM"),
            bos_ids=(1,),
            eos_ids=(2,),
        ),
        "granitemoe": Family(
            name="Granite MoE",
            covers="Granite 3.0 and 3.1 with experts",
            architecture="GraniteMoeForCausalLM",
            tensors=TensorNames(ATTENTION, NORMS),
            layers=SPARSE,
            mixture=GRANITE_EXPERTS,
            defaults={"num_local_experts": 8, "num_experts_per_tok": 2},
            follows=GRANITE_FIELDS,
            biases=ATTENTION_BIASES,
            bos_ids=(1,),
            eos_ids=(2,),
        ),
        "granitemoeshared": Family(
            name="Granite MoE with shared experts",
            covers="Granite MoE with shared experts",
            architecture="GraniteMoeSharedForCausalLM",
            tensors=TensorNames(SHARED, NORMS),
            layers=alike(("attention",), ("mixture", "ffn")),
            mixture=replace(GRANITE_EXPERTS, shared_field="shared_intermediate_size"),
            defaults={"num_local_experts": 8, "num_experts_per_tok": 2, "shared_intermediate_size": 0},
            follows=GRANITE_FIELDS,
            biases=ATTENTION_BIASES,
            bos_ids=(1,),
            eos_ids=(2,),
        ),
    }
)
"""Values of ``model_type`` with experts."""
