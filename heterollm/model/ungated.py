"""The supported families without gates in their networks, as :mod:`heterollm.model.families`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from heterollm.kernels.ops import Group
from heterollm.model.block import SLOPE_SHAPES
from heterollm.model.family import (
    ATTENTION_BIASES,
    BIASES,
    HEAD_NORMS,
    NORMS,
    SEPARATE,
    BiasedPart,
    Family,
    TensorNames,
    alike,
    every_layer,
    perhaps_parallel,
)
from heterollm.model.json_fields import JsonFields


def named(
    o: str, up: str, down: str, qkv: Mapping[str, str] = SEPARATE["qkv"]
) -> Mapping[Group, Mapping[str, str]]:
    """Return Llama's modules with other names of attention's output and of the network, which has no gate."""
    return {"qkv": qkv, "o": {"o": o}, "gate_up": {"up": up}, "down": {"down": down}}


UP_AND_DOWN: Final = named("self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")


ALIKE_HEADS: Final = dict.fromkeys(
    ("num_key_value_heads", "head_dim"), "all heads are alike and fill hidden_size"
)


def every_bias(field: str) -> Mapping[BiasedPart, str]:
    """Return the biases of a family in which one field says whether layers have any."""
    return dict.fromkeys(("qkv", "o", "ffn"), field)


def checked_opt(fields: JsonFields) -> Mapping[str, object]:
    """Return nothing further, after a check of the embedding's width."""
    hidden = fields.count("hidden_size")
    if fields.count("word_embed_proj_dim", hidden) != hidden:
        raise fields.fail("word_embed_proj_dim", f"the hidden_size of {hidden}; others are not supported")
    return {}


APERTUS_ROPE: Final[dict[str, object]] = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}

UNGATED: Final[Mapping[str, Family]] = {
    "phi": Family(
        name="Phi",
        covers="Phi-1, Phi-1.5 and Phi-2",
        architecture="PhiForCausalLM",
        tensors=TensorNames(
            named("self_attn.dense", "mlp.fc1", "mlp.fc2"),
            {"attention": "input_layernorm"},
            final_norm="model.final_layernorm",
        ),
        layers=alike(("attention", "ffn")),
        defaults={"hidden_act": "gelu_new", "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        renamed={"rms_norm_eps": "layer_norm_eps"},
        follows=frozenset({"partial_rotary_factor"}),
        biases=dict.fromkeys(("qkv", "o", "ffn", "head"), True),
        centered_norms=True,
        published_code=("modeling_phi.PhiForCausalLM",),
        bos_ids=(1,),
        eos_ids=(2,),
    ),
    "gpt_neox": Family(
        name="GPT-NeoX",
        covers="Pythia and GPT-NeoX 20B",
        architecture="GPTNeoXForCausalLM",
        tensors=TensorNames(
            named(
                *("attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"),
                qkv=dict.fromkeys(("q", "k", "v"), "attention.query_key_value"),
            ),
            {**NORMS, "network": NORMS["feed_forward"]},
            layer="gpt_neox.layers.{layer}.",
            embedding="gpt_neox.embed_in",
            final_norm="gpt_neox.final_layer_norm",
            head="embed_out",
            # Masks in the files of older versions of transformers.
            unread=tuple(f"gpt_neox.layers.{{layer}}.attention.{one}" for one in ("bias", "masked_bias")),
        ),
        layers=perhaps_parallel,
        defaults={
            "hidden_act": "gelu",
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "attention_bias": True,
            "use_parallel_residual": True,
        },
        renamed={
            "rms_norm_eps": "layer_norm_eps",
            "partial_rotary_factor": "rotary_pct",
            "rope_theta": "rotary_emb_base",
        },
        follows=frozenset({"partial_rotary_factor", "use_parallel_residual"}),
        ignores=ALIKE_HEADS,
        biases={**ATTENTION_BIASES, "ffn": True},
        grouped_heads=True,
        centered_norms=True,
        bos_ids=(0,),
        eos_ids=(2,),
    ),
    "opt": Family(
        name="OPT",
        covers="OPT without projected embeddings (all but 350M)",
        architecture="OPTForCausalLM",
        tensors=TensorNames(
            named("self_attn.out_proj", "fc1", "fc2"),
            {"attention": "self_attn_layer_norm", "feed_forward": "final_layer_norm"},
            layer="model.decoder.layers.{layer}.",
            embedding="model.decoder.embed_tokens",
            positions="model.decoder.embed_positions",
            final_norm="model.decoder.final_layer_norm",
        ),
        defaults={
            "hidden_act": "relu",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "enable_bias": True,
        },
        renamed={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        derived=checked_opt,
        follows=frozenset({"word_embed_proj_dim"}),
        ignores={
            **dict.fromkeys(
                ("rope_parameters", "rope_scaling", "rope_theta", "original_max_position_embeddings"),
                "positions are learned",
            ),
            **ALIKE_HEADS,
            "rms_norm_eps": "it is 1e-5",
        },
        biases=every_bias("enable_bias"),
        first_position=2,
        centered_norms=True,
        bos_ids=(2,),
        eos_ids=(2,),
    ),
    "starcoder2": Family(
        name="StarCoder2",
        covers="StarCoder2",
        architecture="Starcoder2ForCausalLM",
        tensors=TensorNames(named("self_attn.o_proj", "mlp.c_fc", "mlp.c_proj"), NORMS),
        defaults={
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": True,
            "use_bias": True,
        },
        renamed={"rms_norm_eps": "norm_epsilon"},
        biases=every_bias("use_bias"),
        slides=every_layer,
        centered_norms=True,
        bos_ids=(50256,),
        eos_ids=(50256,),
    ),
    "nemotron": Family(
        name="Nemotron",
        covers="Nemotron-4 and Minitron",
        architecture="NemotronForCausalLM",
        tensors=TensorNames(UP_AND_DOWN, NORMS),
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        renamed={"rms_norm_eps": "norm_eps"},
        follows=frozenset({"partial_rotary_factor"}),
        biases=BIASES,
        norm_offset=1.0,
        centered_norms=True,
        bos_ids=(2,),
        eos_ids=(3,),
    ),
    "apertus": Family(
        name="Apertus",
        covers="Apertus 8B and 70B",
        architecture="ApertusForCausalLM",
        tensors=TensorNames(
            UP_AND_DOWN,
            {"attention": "attention_layernorm", "feed_forward": "feedforward_layernorm", **HEAD_NORMS},
            others={
                role: f"mlp.act_fn.{name}"
                for role, name in zip(SLOPE_SHAPES, ("alpha_p", "alpha_n", "beta", "eps"), strict=True)
            },
        ),
        defaults={
            "hidden_act": "xielu",
            "rms_norm_eps": 1e-5,
            "rope_theta": APERTUS_ROPE["rope_theta"],
            "rope_parameters": APERTUS_ROPE,
        },
        biases=ATTENTION_BIASES,
        bos_ids=(1,),
        eos_ids=(2,),
    ),
    "arcee": Family(
        name="Arcee",
        covers="AFM 4.5B",
        architecture="ArceeForCausalLM",
        tensors=TensorNames(UP_AND_DOWN, NORMS),
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5},
        biases=BIASES,
        bos_ids=(128000,),
        eos_ids=(128001,),
    ),
}
"""Supported values of ``model_type``, by family."""
