"""Gemma 2 to 4 in GGUF files: names of tensors, and fields of ``config.json``."""

from __future__ import annotations

from statistics import NormalDist
from typing import Final

from heterollm.base import CheckpointError
from heterollm.model.stored.gguf_architecture import NAMED_EXPERTS, OUTPUT_NORMS, Architecture
from heterollm.model.stored.gguf_family_fields import ROPE_BASE, Fields, expert_width, layer_types
from heterollm.model.stored.gguf_file import GgufFile
from heterollm.model.stored.gguf_names import Other
from heterollm.model.stored.gguf_rope import turning_part

GEMMA_MODULES: Final = {**OUTPUT_NORMS, "ffn_norm": "pre_feedforward_layernorm"}

LAYER_INPUT_MODULES: Final = {
    **GEMMA_MODULES,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
LAYER_INPUT_TABLES: Final = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}


GEMMA2_WINDOW: Final = 4096
GEMMA2_SOFT_CAPS: Final = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
LARGEST_GEMMA2, LARGEST_GEMMA3 = 46, 62
"""Layers of the largest Gemmas, whose attention llama.cpp scales by the share of a head in the width."""

GEMMA3N_PERIOD, GEMMA3N_SOFT_CAP, GEMMA3N_OWN_KEYS = 5, 30.0, 20
"""llama.cpp's numbers for Gemma 3n: layers of which one has no window, a cap, and layers with own keys."""


def gemma_scale(file: GgufFile, config: Fields, largest: int) -> Fields:
    """Return the scale of a Gemma's scores."""
    wide = config["num_hidden_layers"] == largest
    head = file.count("embedding_length") // config["num_attention_heads"] if wide else config["head_dim"]
    return {"query_pre_attn_scalar": head}


def gemma2(file: GgufFile, config: Fields) -> Fields:
    """Return Gemma 2's window, scale of scores and soft caps."""
    return {
        **gemma_scale(file, config, LARGEST_GEMMA2),
        **{name: file.own(name, cap) or None for name, cap in GEMMA2_SOFT_CAPS.items()},
        "sliding_window": file.own("attention.sliding_window", GEMMA2_WINDOW) or None,
        **layer_types(file),
    }


def gemma3(file: GgufFile, config: Fields) -> Fields:
    """Return Gemma 3's window, scale of scores, soft cap and second RoPE."""
    window = file.own("attention.sliding_window") or None  # 0 in all layers: they see all positions
    return {
        **gemma_scale(file, config, LARGEST_GEMMA3),
        "final_logit_softcapping": file.own("final_logit_softcapping") or None,
        "rope_local_base_freq": file.own("rope.freq_base_swa", ROPE_BASE),
        "sliding_window": window,
        **(layer_types(file) if window else {}),
    }


def gemma3n(file: GgufFile, config: Fields) -> Fields:
    """Return Gemma 3n's windows, RoPE, streams, sparsity by layer, shared keys and layers' embeddings."""
    layers, widths = config["num_hidden_layers"], file.own("feed_forward_length")
    inputs, laurel = (
        file.entries.get(name) for name in ("per_layer_token_embd.weight", "blk.0.laurel_l.weight")
    )
    scales = file.own("activation_sparsity_scale")
    if scales is not None and not (isinstance(scales, list) and all(type(one) is float for one in scales)):
        raise CheckpointError(f"{file.path}: gemma3n.activation_sparsity_scale is no list of numbers.")
    return {
        **layer_types(file, GEMMA3N_PERIOD),
        "intermediate_size": widths if isinstance(widths, list) else config["intermediate_size"],
        "sliding_window": file.count("attention.sliding_window"),
        "rope_local_base_freq": file.own("rope.freq_base_swa", ROPE_BASE),
        "final_logit_softcapping": file.number("final_logit_softcapping", GEMMA3N_SOFT_CAP),
        "num_kv_shared_layers": file.own("attention.shared_kv_layers", max(0, layers - GEMMA3N_OWN_KEYS)),
        "altup_num_inputs": file.count("altup.num_inputs", default=4),
        "hidden_size_per_layer_input": file.count("embedding_length_per_layer_input", default=256),
        "vocab_size_per_layer_input": inputs.shape[0] if inputs else 0,
        "laurel_rank": laurel.shape[0] if laurel else 0,
        "activation_sparsity_pattern": None if scales is None else [NormalDist().cdf(one) for one in scales],
    }


def gemma4(file: GgufFile, config: Fields) -> Fields:
    """Return Gemma 4's kinds of layers, their heads and RoPE, shared keys and layers' embeddings."""
    kinds = layer_types(file).get("layer_types")
    if not kinds:
        raise CheckpointError(f"{file.path}: gemma4.attention.sliding_window_pattern is missing.")
    first = {kind: kinds.index(kind) for kind in reversed(kinds)}
    full, sliding = first.get("full_attention", 0), first.get("sliding_attention", 0)
    heads, widths = file.own("attention.head_count_kv"), file.own("feed_forward_length")
    if not isinstance(heads, list) or len(heads) < len(kinds):
        heads = [config["num_key_value_heads"]] * len(kinds)
    inputs = file.entries.get("per_layer_token_embd.weight")
    return {
        "layer_types": kinds,
        "sliding_window": file.count("attention.sliding_window"),
        "head_dim": file.count("attention.key_length_swa", "attention.key_length"),
        "global_head_dim": config["head_dim"],
        "num_key_value_heads": heads[sliding],
        "num_global_key_value_heads": heads[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.entries,
        "num_kv_shared_layers": file.own("attention.shared_kv_layers") or 0,
        "use_double_wide_mlp": isinstance(widths, list) and widths[-1] == 2 * widths[0],
        "hidden_size_per_layer_input": file.own("embedding_length_per_layer_input") or 0,
        "vocab_size_per_layer_input": inputs.shape[0] if inputs else 0,
        "final_logit_softcapping": file.own("final_logit_softcapping") or None,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": turning_part(file),
                "rope_theta": config["rope_theta"],
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": file.own("rope.freq_base_swa", ROPE_BASE),
            },
        },
    }


def gemma4_moe(file: GgufFile, config: Fields) -> Fields:
    """Return Gemma 4's fields, and the experts beside the network of each layer."""
    return {
        **gemma4(file, config),
        **expert_width(file),
        "enable_moe_block": True,
        "top_k_experts": config["num_experts_per_tok"],
        "num_experts_per_tok": None,
    }


GEMMA3N: Final = Architecture(
    "gemma3n_text",
    "Gemma3nForCausalLM",
    modules={
        **LAYER_INPUT_MODULES,
        "altup_router": "altup.modality_router",
        "altup_router_norm": "altup.router_norm",
        "altup_predict_coef": "altup.prediction_coefs",
        "altup_correct_coef": "altup.correction_coefs",
        "laurel_l": "laurel.linear_left",
        "laurel_r": "laurel.linear_right",
        "laurel_post_norm": "laurel.post_laurel_norm",
    },
    top={
        **LAYER_INPUT_TABLES,
        "altup_proj": "model.altup_projections.{}",
        "altup_unembd_proj": "model.altup_unembed_projections.{}",
    },
    fields=gemma3n,
    lists="first",
    others={"altup_correct_scale.weight": Other("altup.correct_output_scale")},
)

GEMMA4: Final = Architecture(
    "gemma4_text",
    "Gemma4ForCausalLM",
    modules=LAYER_INPUT_MODULES,
    top=LAYER_INPUT_TABLES,
    fields=gemma4,
    lists="first",
)

GEMMA4_MOE: Final = GEMMA4._replace(
    modules={
        **GEMMA4.modules,
        "ffn_gate_inp": "router.proj",
        "post_ffw_norm_1": "post_feedforward_layernorm_1",
        "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
        "post_ffw_norm_2": "post_feedforward_layernorm_2",
    },
    experts={own: module.removeprefix("mlp.") for own, module in NAMED_EXPERTS.items()},
    fields=gemma4_moe,
    others={
        "ffn_gate_inp.scale": Other("router.scale"),
        "ffn_down_exps.scale": Other("router.per_expert_scale"),
    },
)
