"""Declarations of families of which layers may be state spaces, those of Mamba-2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from heterollm.kernels.ops import Group
from heterollm.model.block import ROUTER_BIAS
from heterollm.model.expert_names import GRANITE_EXPERTS, NOT_READ, SHARED, SIGMOID_EXPERTS
from heterollm.model.family import (
    ATTENTION_BIASES,
    NORMS,
    SEPARATE,
    Family,
    StageNames,
    TensorNames,
    alike,
    by_type,
)
from heterollm.model.granite import GRANITE_FIELDS
from heterollm.model.json_fields import JsonFields

MAMBA_FIELDS: Final = frozenset(
    {
        *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv"),
        *("mamba_expand", "mamba_conv_bias"),
    }
)


def mamba_linears(module: str) -> Mapping[Group, Mapping[str, str]]:
    """Return the linears of a state space in a module."""
    return {
        "mamba_in": dict.fromkeys("qkvza", f"{module}.in_proj"),
        "mamba_out": {"out": f"{module}.out_proj"},
    }


def mamba_tensors(module: str) -> Mapping[str, str]:
    """Return the other tensors of a state space in a module."""
    return {
        "taps": f"{module}.conv1d.weight",
        "taps_bias": f"{module}.conv1d.bias",
        "decay": f"{module}.A_log",
        "decay_shift": f"{module}.dt_bias",
        "skip": f"{module}.D",
        "gated_norm": f"{module}.norm.weight",
    }


def granite_sizes(fields: JsonFields) -> dict[str, object]:
    """Return the width of heads, which a file may state."""
    width, heads = fields.count("mamba_expand") * fields.count("hidden_size"), fields.count("mamba_n_heads")
    if width % heads:
        raise fields.fail("mamba_n_heads", f"a divisor of mamba_expand times hidden_size, {width}")
    if fields.get("mamba_d_head") not in (None, "auto", width // heads):
        raise fields.fail("mamba_d_head", f"{width // heads}, so that {heads} heads are {width} wide")
    return {"mamba_d_head": width // heads}


def granite_layers(fields: JsonFields, layer: int) -> tuple[StageNames, ...]:
    """Return a layer whose shared experts stand beside others, or alone if there are none."""
    kinds = fields.get("layer_types")
    is_space = not isinstance(kinds, list) or kinds[layer : layer + 1] in (["mamba"], ["linear_attention"])
    sparse = fields.count("num_local_experts", minimum=0) > 0
    return ("mamba" if is_space else "attention",), ("mixture", "ffn") if sparse else ("ffn",)


NEMOTRON_KINDS: Final = {
    "M": "linear_attention",
    "*": "full_attention",
    "-": "mlp",
    "E": "moe",
    "mamba": "linear_attention",
    "attention": "full_attention",
}
"""Kinds of layers by the letters of ``hybrid_override_pattern`` and by older names."""


def nemotron_layers(fields: JsonFields) -> dict[str, object]:
    """Return the kind of each layer, of which there are as many."""
    names = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    name = next((one for one in names if fields.get(one) is not None), names[0])
    kinds = fields.get(name)
    if not isinstance(kinds, str | list) or not kinds or not all(isinstance(one, str) for one in kinds):
        raise fields.fail(name, "the kind of each layer")
    return {"layer_types": [NEMOTRON_KINDS.get(one, one) for one in kinds], "num_hidden_layers": len(kinds)}


FALCON_FACTORS: Final = (
    *("key_multiplier", "attention_in_multiplier", "attention_out_multiplier"),
    *("ssm_in_multiplier", "ssm_out_multiplier"),
)
FALCON_LISTS: Final = {"ssm_multipliers": 5, "mlp_multipliers": 2}


def falcon_sizes(fields: JsonFields) -> dict[str, object]:
    """Return the width of heads, which a file may state, and the factor of the logits."""
    heads, hidden = fields.count("mamba_n_heads"), fields.count("hidden_size")
    width = fields.count("mamba_d_ssm", fields.count("mamba_expand") * hidden)
    if width % heads:
        raise fields.fail("mamba_n_heads", f"a divisor of the {width} of all heads")
    if fields.get("mamba_d_head") not in (None, "auto", width // heads):
        raise fields.fail("mamba_d_head", f"{width // heads}, so that {heads} heads are {width} wide")
    return {"mamba_d_head": width // heads, "logit_scale": fields.positive("lm_head_multiplier", 1.0)}


def falcon_factors(fields: JsonFields) -> tuple[tuple[Group, str, float], ...]:
    """Return the factors on outputs of linears; those of inputs count with them."""
    key, inputs, output, space_inputs, space_output = (fields.positive(name, 1.0) for name in FALCON_FACTORS)
    parts, (gate, down) = (
        (1.0,) * count if fields.get(name) is None else fields.numbers(name, count)
        for name, count in FALCON_LISTS.items()
    )
    return (
        *(("qkv", "q", inputs), ("qkv", "k", inputs * key), ("qkv", "v", inputs), ("o", "o", output)),
        *(("mamba_in", member, space_inputs * part) for member, part in zip("zvkqa", parts, strict=True)),
        *(("mamba_out", "out", space_output), ("gate_up", "gate", gate), ("down", "down", down)),
    )


STATE_SPACES: Final[Mapping[str, Family]] = {
    "granitemoehybrid": Family(
        name="Granite 4",
        covers="Granite 4",
        architecture="GraniteMoeHybridForCausalLM",
        tensors=TensorNames({**SHARED, **mamba_linears("mamba")}, NORMS, others=mamba_tensors("mamba")),
        layers=granite_layers,
        kinds=("linear_attention", "mamba"),
        mixture=replace(
            GRANITE_EXPERTS, shared_field="shared_intermediate_size", dense_field="shared_intermediate_size"
        ),
        defaults={
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 1024,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
        derived=granite_sizes,
        follows=GRANITE_FIELDS | MAMBA_FIELDS | {"layer_types", "position_embedding_type"},
        biases=ATTENTION_BIASES,
        ignores={"layers_block_type": "layer_types counts"},
        bos_ids=(1,),
        eos_ids=(2,),
    ),
    "nemotron_h": Family(
        name="Nemotron-H",
        covers="Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano",
        architecture="NemotronHForCausalLM",
        tensors=TensorNames(
            {
                "qkv": {member: f"mixer.{member}_proj" for member in "qkv"},
                "o": {"o": "mixer.o_proj"},
                "gate_up": {"up": "mixer.up_proj"},
                "down": {"down": "mixer.down_proj"},
                **mamba_linears("mixer"),
            },
            dict.fromkeys(NORMS, "norm"),
            shared={
                "gate_up": {"up": "mixer.shared_experts.up_proj"},
                "down": {"down": "mixer.shared_experts.down_proj"},
            },
            others={**mamba_tensors("mixer"), ROUTER_BIAS: "mixer.gate.e_score_correction_bias"},
            layer="backbone.layers.{layer}.",
            embedding="backbone.embeddings",
            final_norm="backbone.norm_f",
            unread=("mtp.",),
        ),
        layers=by_type(
            {
                "linear_attention": (("mamba",),),
                "full_attention": (("attention",),),
                "mlp": (("ffn",),),
                "moe": (("mixture", "ffn"),),
            }
        ),
        kinds=("linear_attention", "mlp", "moe"),
        mixture=replace(
            SIGMOID_EXPERTS,
            router="mixer.gate",
            members={member: f"mixer.experts.{{expert}}.{member}_proj" for member in ("up", "down")},
            shared_count_field="",
            shared_field="moe_shared_expert_intermediate_size",
        ),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 21_504,
            "hidden_act": "relu2",
            "mamba_hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "mamba_n_heads": 128,
            "mamba_d_head": 64,
            "mamba_n_groups": 8,
            "mamba_d_state": 128,
            "mamba_d_conv": 4,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "norm_topk_prob": True,
        },
        renamed={
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "mlp_hidden_act",
            "mamba_n_heads": "mamba_num_heads",
            "mamba_d_head": "mamba_head_dim",
            "mamba_n_groups": "n_groups",
            "mamba_d_state": "ssm_state_size",
            "mamba_d_conv": "conv_kernel",
            "mamba_conv_bias": "use_conv_bias",
        },
        derived=nemotron_layers,
        follows=frozenset({"layer_types", "layers_block_type", "hybrid_override_pattern"}),
        biases={"ffn": "mlp_bias"},
        without_rope=True,
        ignores={
            "num_hidden_layers": "the kinds of layers say it",
            **dict.fromkeys(("rope_parameters", "rope_theta", "rope_scaling"), "no layer has positions"),
            **dict.fromkeys(
                (
                    *("time_step_min", "time_step_max", "time_step_floor"),
                    *("mamba_dt_min", "mamba_dt_max", "mamba_dt_init_floor"),
                ),
                "dt has no bounds; transformers has a lower one in prompts alone",
            ),
            **dict.fromkeys(
                (
                    *("attention_bias", "sliding_window", "expand", "n_shared_experts"),
                    *("moe_shared_expert_overlap", "num_logits_to_keep", "use_mamba_kernels"),
                    *("rescale_prenorm_residual", "mamba_proj_bias", "mamba_expand"),
                ),
                "transformers ignores it",
            ),
            "residual_in_fp32": "the stream is float32 in any case",
            "mamba_ssm_cache_dtype": "states are float32 in any case",
            **dict.fromkeys(("chunk_size", "mamba_chunk_size"), "the chunks change the time alone"),
            **NOT_READ,
            "mtp_*": "layers that predict further tokens are not read",
        },
        bos_ids=(1,),
        eos_ids=(2,),
    ),
    "falcon_h1": Family(
        name="Falcon-H1",
        covers="Falcon-H1",
        architecture="FalconH1ForCausalLM",
        tensors=TensorNames(
            {
                **SEPARATE,
                "gate_up": {member: f"feed_forward.{member}_proj" for member in ("gate", "up")},
                "down": {"down": "feed_forward.down_proj"},
                **mamba_linears("mamba"),
            },
            {"attention": "input_layernorm", "feed_forward": "pre_ff_layernorm"},
            others=mamba_tensors("mamba"),
            final_norm="model.final_layernorm",
        ),
        layers=alike(("mamba", "attention"), ("ffn",)),
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "mamba_d_ssm": 1024,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_norm_before_gate": True,
            "mamba_rms_norm": False,
        },
        derived=falcon_sizes,
        follows=MAMBA_FIELDS
        | {*FALCON_FACTORS, *FALCON_LISTS, "embedding_multiplier", "lm_head_multiplier"}
        | {"mamba_d_ssm", "mamba_norm_before_gate", "mamba_rms_norm"},
        linear_factors=falcon_factors,
        ignores={"num_logits_to_keep": "transformers ignores it"},
        bos_ids=(1,),
        eos_ids=(2,),
    ),
}
"""The families by ``model_type``."""
