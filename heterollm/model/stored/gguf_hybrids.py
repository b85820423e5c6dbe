"""Hybrids with state spaces or convolutions in GGUF files: tensors, and fields of ``config.json``."""

from __future__ import annotations

from typing import Final

from heterollm.model.stored.gguf_architecture import ATTENTION_BIAS, NUMBERED_EXPERTS, Architecture
from heterollm.model.stored.gguf_family_fields import MOST_LAYERS, Fields, expert_width, granite
from heterollm.model.stored.gguf_file import GgufFile
from heterollm.model.stored.gguf_names import Other, space_modules, space_others


def mixers(file: GgufFile, config: Fields, other: str) -> list[str]:
    """Return the kind of each layer: attention, or the other kind where it has no key heads."""
    heads = file.own("attention.head_count_kv")
    layers = min(config["num_hidden_layers"], MOST_LAYERS)
    counts = heads if isinstance(heads, list) else [heads] * layers
    return ["full_attention" if count else other for count in counts]


def state_space(file: GgufFile) -> Fields:
    """Return the sizes of state spaces."""
    heads, inner = file.count("ssm.time_step_rank"), file.count("ssm.inner_size")
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": max(1, inner // heads),
        "mamba_n_groups": file.count("ssm.group_count"),
        "mamba_d_state": file.count("ssm.state_size"),
        "mamba_d_conv": file.count("ssm.conv_kernel"),
        "mamba_conv_bias": any(own.endswith(".ssm_conv1d.bias") for own in file.entries),
    }


def granite_hybrid(file: GgufFile, config: Fields) -> Fields:
    """Return Granite's multipliers, the kinds of layers, their sizes, and whether attention has positions."""
    width = file.own("expert_shared_feed_forward_length") or config["intermediate_size"]
    return {
        **granite(file, config),
        **state_space(file),
        "mamba_expand": max(1, file.count("ssm.inner_size") // config["hidden_size"]),
        "layer_types": mixers(file, config, "linear_attention"),
        "shared_intermediate_size": width,
        "num_local_experts": config.get("num_local_experts", 0),
        "position_embedding_type": "rope" if file.own("rope.scaling.finetuned", True) else None,
    }


def nemotron_h(file: GgufFile, config: Fields) -> Fields:
    """Return the kinds of layers, and their sizes."""
    spaces = {
        "mamba_num_heads": "mamba_n_heads",
        "mamba_head_dim": "mamba_d_head",
        "n_groups": "mamba_n_groups",
        "ssm_state_size": "mamba_d_state",
        "conv_kernel": "mamba_d_conv",
        "use_conv_bias": "mamba_conv_bias",
    }
    found = state_space(file)
    layers = min(config["num_hidden_layers"], MOST_LAYERS)
    return {
        **{own: found[common] for own, common in spaces.items()},
        "layers_block_type": [_nemotron_kind(file, layer) for layer in range(layers)],
    }


def falcon_h1(file: GgufFile, _config: Fields) -> Fields:
    """Return the sizes of state spaces, whose output may have a norm, which comes first there."""
    return {
        **state_space(file),
        "mamba_d_ssm": file.count("ssm.inner_size"),
        "mamba_rms_norm": any(own.endswith(".ssm_norm.weight") for own in file.entries),
        "mamba_norm_before_gate": False,
    }


def _nemotron_kind(file: GgufFile, layer: int) -> str:
    """Return the kind of a layer, by the tensors that no other kind has."""
    kinds = {"ssm_in": "linear_attention", "attn_q": "full_attention", "ffn_gate_inp": "moe"}
    names = (kind for own, kind in kinds.items() if f"blk.{layer}.{own}.weight" in file.entries)
    return next(names, "mlp")


def nemotron_h_moe(file: GgufFile, config: Fields) -> Fields:
    """Return the kinds of layers, and the widths and weights of experts."""
    return {
        **nemotron_h(file, config),
        **expert_width(file),
        "moe_shared_expert_intermediate_size": file.count("expert_shared_feed_forward_length"),
        "norm_topk_prob": bool(file.own("expert_weights_norm", False)),
        "routed_scaling_factor": file.number("expert_weights_scale", 0.0) or 1.0,
    }


LFM2_NORM: Final = ("norm_eps", "attention.layer_norm_rms_epsilon")
LFM2_MODULES: Final = {
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
LFM2_TOP: Final = dict.fromkeys(("token_embd_norm", "output_norm"), "model.embedding_norm")


def lfm2_layers(file: GgufFile, config: Fields) -> Fields:
    """Return which layers have attention, and the tokens that the convolutions of others span."""
    return {"layer_types": mixers(file, config, "conv"), "conv_L_cache": file.count("shortconv.l_cache")}


def lfm2(file: GgufFile, config: Fields) -> Fields:
    """Return the kinds of layers; the width of networks is final."""
    return {**lfm2_layers(file, config), "block_auto_adjust_ff_dim": False}


def lfm2_moe(file: GgufFile, config: Fields) -> Fields:
    """Return the kinds of layers, and which of them have experts."""
    return {
        **lfm2_layers(file, config),
        **expert_width(file),
        "norm_topk_prob": True,
        "num_dense_layers": file.own("leading_dense_block_count") or 0,
        "use_expert_bias": any(own.endswith(".exp_probs_b.bias") for own in file.entries),
    }


GRANITE_HYBRID: Final = Architecture(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    permuted=True,
    biases=(ATTENTION_BIAS,),
    modules={"ffn_down": "shared_mlp.output_linear", **space_modules("mamba")},
    joined={"shared_mlp.input_linear": ("ffn_gate", "ffn_up")},
    experts_field="num_local_experts",
    fields=granite_hybrid,
    lists="hybrid",
    others=space_others("mamba"),
)

NEMOTRON_H: Final = Architecture(
    "nemotron_h",
    "NemotronHForCausalLM",
    modules={
        "attn_norm": "norm",
        **{f"attn_{member}": f"mixer.{member}_proj" for member in "qkv"},
        "attn_output": "mixer.o_proj",
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        **space_modules("mixer"),
    },
    top={"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f"},
    epsilon=("layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
    fields=nemotron_h,
    lists="hybrid",
    others=space_others("mixer"),
    layer="backbone.layers",
)

# Its factors are those of the weights.
FALCON_H1: Final = Architecture(
    "falcon_h1",
    "FalconH1ForCausalLM",
    modules={
        "ffn_norm": "pre_ff_layernorm",
        **{f"ffn_{member}": f"feed_forward.{member}_proj" for member in ("gate", "up", "down")},
        **space_modules("mamba"),
    },
    top={"output_norm": "model.final_layernorm"},
    fields=falcon_h1,
    # llama.cpp's converter leaves the ending out.
    others={**space_others("mamba"), "ffn_norm": Other("pre_ff_layernorm.weight")},
)
LFM2: Final = Architecture(
    "lfm2",
    "Lfm2ForCausalLM",
    modules=LFM2_MODULES,
    top=LFM2_TOP,
    epsilon=LFM2_NORM,
    fields=lfm2,
    lists="hybrid",
)
LFM2_MOE: Final = Architecture(
    "lfm2_moe",
    "Lfm2MoeForCausalLM",
    modules={**LFM2_MODULES, "ffn_gate_inp": "feed_forward.gate"},
    top=LFM2_TOP,
    experts={
        own: module.replace("block_sparse_moe", "feed_forward") for own, module in NUMBERED_EXPERTS.items()
    },
    epsilon=LFM2_NORM,
    fields=lfm2_moe,
    lists="hybrid",
    others={"exp_probs_b.bias": Other("feed_forward.expert_bias")},
)
NEMOTRON_H_MOE: Final = NEMOTRON_H._replace(
    modules={
        **NEMOTRON_H.modules,
        "ffn_gate_inp": "mixer.gate",
        **{f"ffn_{one}_shexp": f"mixer.shared_experts.{one}_proj" for one in ("up", "down")},
    },
    experts={f"ffn_{one}_exps": f"mixer.experts.{{}}.{one}_proj" for one in ("up", "down")},
    experts_field="n_routed_experts",
    fields=nemotron_h_moe,
    others={**NEMOTRON_H.others, "exp_probs_b.bias": Other("mixer.gate.e_score_correction_bias")},
)
