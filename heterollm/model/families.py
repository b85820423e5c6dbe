"""The supported model families, one declaration each.

A declaration has tensor names, defaults of ``config.json``, and the optional fields that the family follows.
:mod:`heterollm.model.config` combines it with a checkpoint's fields to a
:class:`~heterollm.model.ModelConfig`, and the runtime never reads a family's name. Each declaration follows
the model's file in https://github.com/huggingface/transformers/tree/main/src/transformers/models.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from heterollm.base import UnsupportedModelError
from heterollm.kernels.ops import Group
from heterollm.model.attention_blocks import AttentionBlock
from heterollm.model.block import Block, Norm
from heterollm.model.family import (
    ATTENTION_BIASES,
    BIASES,
    HEAD_NORMS,
    NORMS,
    OUTPUT_NORMS,
    SECTION_COUNTS,
    SEPARATE,
    Family,
    TensorNames,
    after_full_layers,
    alike,
    all_but_every_nth,
    every_layer,
    perhaps_parallel,
)
from heterollm.model.fields import config_fields
from heterollm.model.gemma3n import GEMMA3N
from heterollm.model.gemma4 import GEMMA4
from heterollm.model.hybrids import HYBRIDS
from heterollm.model.json_fields import JsonFields
from heterollm.model.latent import LATENT
from heterollm.model.llama4 import LLAMA4
from heterollm.model.mixtures import GRANITE_FIELDS, MIXTURES
from heterollm.model.muse_glimmer import MUSE_GLIMMER
from heterollm.model.rope import ROPE_KINDS
from heterollm.model.state_spaces import STATE_SPACES
from heterollm.model.ungated import UNGATED

# ---- tensor names ---------------------------------------------------------------------------------------

FUSED_NETWORK: Mapping[Group, Mapping[str, str]] = MappingProxyType(
    {**SEPARATE, "gate_up": dict.fromkeys(("gate", "up"), "mlp.gate_up_proj")}
)
FUSED: Mapping[Group, Mapping[str, str]] = MappingProxyType(
    {**FUSED_NETWORK, "qkv": dict.fromkeys(("q", "k", "v"), "self_attn.qkv_proj")}
)
SANDWICH_NORMS: Mapping[Norm, str] = MappingProxyType(
    {"attention": "input_layernorm", "feed_forward": "pre_feedforward_layernorm", **OUTPUT_NORMS}
)


# ---- layers with a sliding window -----------------------------------------------------------------------


def all_but_every_fourth(_fields: JsonFields, layer: int) -> bool:
    """Return false for the first and every fourth layer from there, which has full attention."""
    return layer % 4 != 0


def layers_without_rope(fields: JsonFields, layer: int) -> bool:
    """Return true for every ``no_rope_layer_interval``-th layer, which has no RoPE."""
    stated = fields.get("no_rope_layers")
    if isinstance(stated, list):
        return not stated[layer]
    return (layer + 1) % fields.count("no_rope_layer_interval") == 0


EXAONE_FIELDS: Final = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}

# ---- fields that follow from others ---------------------------------------------------------------------


def checked_cohere(fields: JsonFields) -> dict[str, object]:
    """Return nothing further, after a check of the window, without which no layer would have positions."""
    fields.count("sliding_window")
    return {}


def own_base(fields: JsonFields, layer: int, block: Block) -> Block:
    """Return attention with the base of RoPE that the layer has, without RoPE for 0."""
    bases = fields.get("layer_rope_theta")
    if bases is None or not isinstance(block, AttentionBlock) or block.rope is None:
        return block
    base = bases[layer] if isinstance(bases, list) and len(bases) > layer else None
    if not isinstance(base, int | float) or not (base == 0 or 1 < base < math.inf):
        raise fields.fail("layer_rope_theta", "for each layer 0 or a number above 1")
    return replace(block, rope=replace(block.rope, base=float(base)) if base else None)


def exaone_fields(fields: JsonFields) -> dict[str, object]:
    """Return common fields under EXAONE's own names, which transformers reads, too."""
    return {name: fields.get(own) for own, name in EXAONE_FIELDS.items() if fields.get(own) is not None}


def internlm3_biases(fields: JsonFields) -> dict[str, object]:
    """Return the biases under InternLM3's own names, which transformers reads, too; both must be equal."""
    names = {"attention_bias": "qkv_bias", "mlp_bias": "bias"}
    found = {name: fields.flag(own, fields.flag(name, False)) for name, own in names.items()}
    if len({*found.values()}) > 1:
        raise fields.fail("qkv_bias", f"{found['mlp_bias']}, as bias")
    return dict[str, object](found)


def minicpm_multipliers(fields: JsonFields) -> dict[str, object]:
    """Return Granite's names of MiniCPM's factors of depth and width (modeling_minicpm.py)."""
    layers, width = fields.count("num_hidden_layers"), fields.count("hidden_size")
    return {
        "residual_multiplier": fields.positive("scale_depth") / layers**0.5,
        "logits_scaling": width / fields.count("dim_model_base"),
        "attention_multiplier": (width // fields.count("num_attention_heads")) ** -0.5,
    }


# ---- the families ---------------------------------------------------------------------------------------

QWEN: Mapping[str, object] = MappingProxyType(
    {
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "max_window_layers": 28,
    }
)
WINDOW_FIELDS = frozenset({"use_sliding_window", "layer_types"})
GEMMA: Mapping[str, object] = MappingProxyType(
    {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    }
)
GEMMA_FIELDS = frozenset(
    {"final_logit_softcapping", "hidden_activation", "layer_types", "query_pre_attn_scalar"}
)
GLM: Mapping[str, object] = MappingProxyType(
    {
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1.5625e-07,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
    }
)
MINISTRAL_ROPE: Final[dict[str, object]] = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
CWM_ROPE: Final[dict[str, object]] = {
    "rope_type": "llama3",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            name="Llama",
            covers="Llama 2 and 3, SmolLM and SmolLM2",
            architecture="LlamaForCausalLM",
            tensors=TensorNames(SEPARATE, NORMS),
            biases=BIASES,
            bos_ids=(1,),
            eos_ids=(2,),
        ),
        "qwen2": Family(
            name="Qwen2",
            covers="Qwen2 and Qwen2.5",
            architecture="Qwen2ForCausalLM",
            tensors=TensorNames(SEPARATE, NORMS),
            defaults=QWEN,
            follows=WINDOW_FIELDS | {"max_window_layers"},
            biases={"qkv": True},
            slides=after_full_layers,
        ),
        "qwen3": Family(
            name="Qwen3",
            covers="Qwen3",
            architecture="Qwen3ForCausalLM",
            tensors=TensorNames(SEPARATE, {**NORMS, **HEAD_NORMS}),
            defaults={**QWEN, "head_dim": 128},
            follows=WINDOW_FIELDS | {"max_window_layers"},
            biases=ATTENTION_BIASES,
            slides=after_full_layers,
        ),
        "mistral": Family(
            name="Mistral",
            covers="Mistral 7B, Nemo and Small",
            architecture="MistralForCausalLM",
            tensors=TensorNames(SEPARATE, NORMS),
            defaults={"num_key_value_heads": 8, "sliding_window": 4096},
            slides=every_layer,
            bos_ids=(1,),
            eos_ids=(2,),
        ),
        "phi3": Family(
            name="Phi-3",
            covers="Phi-3 mini and medium, Phi-3.5 mini, Phi-4 and Phi-4 mini",
            architecture="Phi3ForCausalLM",
            tensors=TensorNames(FUSED, NORMS),
            defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
            follows=frozenset({"partial_rotary_factor"}),
            slides=every_layer,
            # The name of longrope in the first checkpoints.
            rope_aliases={"su": "longrope", "yarn": "longrope"},
            published_code=("modeling_phi3.Phi3ForCausalLM",),
            bos_ids=(1,),
            eos_ids=(32000,),
        ),
        "ministral": Family(
            name="Ministral",
            covers="Ministral 8B of 2024",
            architecture="MinistralForCausalLM",
            tensors=TensorNames(SEPARATE, NORMS),
            defaults={"num_key_value_heads": 8, "sliding_window": 4096},
            follows=frozenset({"layer_types"}),
            slides=every_layer,
            bos_ids=(1,),
            eos_ids=(2,),
        ),
        "gemma": Family(
            name="Gemma",
            covers="Gemma 1",
            architecture="GemmaForCausalLM",
            tensors=TensorNames(SEPARATE, NORMS),
            defaults={
                "num_key_value_heads": 16,
                "head_dim": 256,
                "hidden_act": "gelu_pytorch_tanh",
                "tie_word_embeddings": True,
            },
            biases=ATTENTION_BIASES,
            # transformers takes the name in the first checkpoints for what their authors meant.
            activation_aliases={"gelu": "gelu_pytorch_tanh"},
            norm_offset=1.0,
            scales_embedding=True,
            bos_ids=(2,),
            eos_ids=(1,),
        ),
        "gemma2": Family(
            name="Gemma 2",
            covers="Gemma 2",
            architecture="Gemma2ForCausalLM",
            tensors=TensorNames(SEPARATE, SANDWICH_NORMS),
            defaults={
                **GEMMA,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
                "sliding_window_pattern": 2,
            },
            follows=GEMMA_FIELDS | {"attn_logit_softcapping"},
            biases=ATTENTION_BIASES,
            slides=all_but_every_nth,
            norm_offset=1.0,
            scales_embedding=True,
            bos_ids=(2,),
            eos_ids=(1,),
        ),
        "gemma3_text": Family(
            name="Gemma 3",
            covers="Gemma 3 without vision",
            architecture="Gemma3ForCausalLM",
            tensors=TensorNames(SEPARATE, {**SANDWICH_NORMS, **HEAD_NORMS}),
            defaults={
                **GEMMA,
                # Checkpoints with vision leave out what its class assumes.
                "vocab_size": 262_208,
                "num_attention_heads": 8,
                "max_position_embeddings": 131_072,
                "sliding_window_pattern": 6,
                "rope_theta": 1_000_000.0,
                "rope_local_base_freq": 10_000.0,
            },
            follows=GEMMA_FIELDS | {"rope_local_base_freq", "sliding_window_pattern"},
            layered_rope=True,
            ignores={"original_max_position_embeddings": SECTION_COUNTS},
            biases=ATTENTION_BIASES,
            slides=all_but_every_nth,
            norm_offset=1.0,
            scales_embedding=True,
            bos_ids=(2,),
            eos_ids=(1,),
        ),
        "granite": Family(
            name="Granite",
            covers="Granite 3 and 4 without experts",
            architecture="GraniteForCausalLM",
            tensors=TensorNames(SEPARATE, NORMS),
            follows=GRANITE_FIELDS,
            biases=BIASES,
            bos_ids=(1,),
            eos_ids=(2,),
        ),
        "granite_swa": Family(
            name="Granite with windows",
            covers="Granite with windows and sinks",
            architecture="GraniteSWAForCausalLM",
            tensors=TensorNames(SEPARATE, NORMS, others={"sinks": "self_attn.sinks"}),
            defaults={
                "num_key_value_heads": 4,
                "rms_norm_eps": 1e-5,
                "tie_word_embeddings": True,
                "sliding_window": 128,
            },
            adapts=own_base,
            follows=GRANITE_FIELDS | {"layer_types", "layer_rope_theta"},
            biases=BIASES,
            slides=all_but_every_fourth,
            bos_ids=(100_257,),
            eos_ids=(100_257,),
        ),
        "stablelm": Family(
            name="StableLM",
            covers="StableLM 3B and StableLM 2 1.6B",
            architecture="StableLmForCausalLM",
            tensors=TensorNames(SEPARATE, NORMS),
            defaults={
                "num_key_value_heads": 32,
                "rms_norm_eps": 1e-5,
                "partial_rotary_factor": 0.25,
            },
            renamed={"rms_norm_eps": "layer_norm_eps"},
            layers=perhaps_parallel,
            follows=frozenset({"partial_rotary_factor", "use_parallel_residual"}),
            biases={"qkv": "use_qkv_bias"},
            centered_norms=True,
            bos_ids=(0,),
            eos_ids=(0,),
        ),
        "seed_oss": Family(
            name="Seed-OSS",
            covers="Seed-OSS",
            architecture="SeedOssForCausalLM",
            tensors=TensorNames(SEPARATE, NORMS),
            defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
            biases={**BIASES, "o": "attention_out_bias"},
            bos_ids=(0,),
            eos_ids=(2,),
        ),
        "cwm": Family(
            name="CWM",
            covers="Code World Model",
            architecture="CwmForCausalLM",
            tensors=TensorNames(SEPARATE, NORMS),
            defaults={
                "num_key_value_heads": 8,
                "head_dim": 128,
                "rms_norm_eps": 1e-5,
                "sliding_window": 8192,
                "rope_parameters": CWM_ROPE,
            },
            follows=frozenset({"layer_types"}),
            slides=all_but_every_fourth,
            bos_ids=(128000,),
            eos_ids=(128001, 128008, 128009),
        ),
        "ernie4_5": Family(
            name="ERNIE 4.5",
            covers="ERNIE 4.5 0.3B",
            architecture="Ernie4_5ForCausalLM",
            tensors=TensorNames(SEPARATE, NORMS),
            defaults={
                "num_key_value_heads": 2,
                "head_dim": 128,
                "rms_norm_eps": 1e-5,
                "rope_theta": 500_000.0,
                "tie_word_embeddings": True,
            },
            biases=dict.fromkeys(("qkv", "o", "ffn"), "use_bias"),
            interleaved_rope=True,
            bos_ids=(1,),
            eos_ids=(2,),
        ),
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
        "internlm2": Family(
            name="InternLM2",
            covers="InternLM2 and 2.5",
            architecture="InternLM2ForCausalLM",
            tensors=TensorNames(
                {
                    "qkv": dict.fromkeys(("q", "k", "v"), "attention.wqkv"),
                    "o": {"o": "attention.wo"},
                    "gate_up": {"gate": "feed_forward.w1", "up": "feed_forward.w3"},
                    "down": {"down": "feed_forward.w2"},
                },
                {"attention": "attention_norm", "feed_forward": "ffn_norm"},
                embedding="model.tok_embeddings",
                head="output",
            ),
            biases=dict.fromkeys(("qkv", "o"), "bias"),
            grouped_heads=True,
            published_code=("modeling_internlm2.InternLM2ForCausalLM",),
            bos_ids=(1,),
            eos_ids=(2,),
        ),
        "internlm3": Family(
            name="InternLM3",
            covers="InternLM3 8B",
            # transformers computes it as a Llama; published files name their own class.
            architecture="LlamaForCausalLM",
            tensors=TensorNames(SEPARATE, NORMS),
            defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
            derived=internlm3_biases,
            follows=frozenset({"qkv_bias", "bias"}),
            biases=BIASES,
            published_code=("modeling_internlm3.InternLM3ForCausalLM",),
            bos_ids=(1,),
            eos_ids=(2,),
        ),
        "phonelm": Family(
            name="PhoneLM",
            covers="PhoneLM 0.5B and 1.5B",
            architecture="PhoneLMForCausalLM",
            tensors=TensorNames(SEPARATE, NORMS),
            defaults={"hidden_act": "relu"},
            biases=BIASES,
            published_code=("modeling_phonelm.PhoneLMForCausalLM",),
            bos_ids=(1,),
            eos_ids=(2,),
        ),
        "minicpm": Family(
            name="MiniCPM",
            covers="MiniCPM 1, 2 and 4 without sparse attention",
            architecture="MiniCPMForCausalLM",
            tensors=TensorNames(SEPARATE, NORMS),
            defaults={"tie_word_embeddings": True, "dim_model_base": 1, "scale_depth": 1.0},
            renamed={"embedding_multiplier": "scale_emb"},
            derived=minicpm_multipliers,
            follows=GRANITE_FIELDS | {"scale_depth", "dim_model_base"},
            biases={"qkv": "attention_bias", "o": "attention_bias"},
            published_code=("modeling_minicpm.MiniCPMForCausalLM",),
            bos_ids=(1,),
            eos_ids=(2,),
        ),
        "bitnet": Family(
            name="BitNet",
            covers="BitNet b1.58 2B4T",
            architecture="BitNetForCausalLM",
            tensors=TensorNames(
                SEPARATE,
                {**NORMS, "attention_inner": "self_attn.attn_sub_norm", "network_inner": "mlp.ffn_sub_norm"},
            ),
            defaults={
                "num_key_value_heads": 5,
                "hidden_act": "relu2",
                "rms_norm_eps": 1e-5,
                "rope_theta": 500_000.0,
            },
            biases=ATTENTION_BIASES,
            # The files name the class that became transformers' own.
            published_code=("modeling_bitnet.BitNetForCausalLM",),
            bos_ids=(128_000,),
            eos_ids=(128_001,),
        ),
        "smollm3": Family(
            name="SmolLM3",
            covers="SmolLM3",
            architecture="SmolLM3ForCausalLM",
            tensors=TensorNames(SEPARATE, NORMS),
            defaults={
                "num_key_value_heads": 4,
                "rope_theta": 2_000_000.0,
                "tie_word_embeddings": True,
                "use_sliding_window": False,
                "no_rope_layer_interval": 4,
            },
            follows=WINDOW_FIELDS | {"no_rope_layers", "no_rope_layer_interval"},
            biases=BIASES,
            slides=layers_without_rope,
            bos_ids=(128000,),
            eos_ids=(128001,),
        ),
        "cohere2": Family(
            name="Cohere 2",
            covers="Command R7B and Tiny Aya",
            architecture="Cohere2ForCausalLM",
            tensors=TensorNames(SEPARATE, {"attention": "input_layernorm"}),
            layers=alike(("attention", "ffn")),
            defaults={
                "rms_norm_eps": 1e-5,
                "logit_scale": 0.0625,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
                "tie_word_embeddings": True,
            },
            renamed={"rms_norm_eps": "layer_norm_eps"},
            derived=checked_cohere,
            follows=frozenset({"layer_types", "logit_scale", "sliding_window_pattern"}),
            ignores={
                "position_embedding_type": "neighbouring elements rotate in any case",
                **dict.fromkeys(
                    (
                        *("layer_switch", "order_of_interleaved_layers", "rotary_pct", "use_qk_norm"),
                        *("use_embedding_sharing", "use_gated_activation", "use_parallel_block"),
                        "use_parallel_embedding",
                    ),
                    "transformers ignores it",
                ),
            },
            biases=ATTENTION_BIASES,
            interleaved_rope=True,
            rope_needs_window=True,
            slides=all_but_every_nth,
            centered_norms=True,
            norm_biases=False,
            bos_ids=(5,),
            eos_ids=(255_001,),
        ),
        "ministral3": Family(
            name="Ministral 3",
            covers="Ministral 3 and Devstral 2",
            architecture="Ministral3ForCausalLM",
            tensors=TensorNames(SEPARATE, NORMS),
            defaults={
                "num_key_value_heads": 8,
                "head_dim": 128,
                "rms_norm_eps": 1e-5,
                "rope_parameters": MINISTRAL_ROPE,
            },
            follows=frozenset({"llama_4_scaling_beta"}),
            slides=every_layer,
            bos_ids=(1,),
            eos_ids=(2,),
        ),
        "hunyuan_v1_dense": Family(
            name="Hunyuan",
            covers="Hunyuan dense 0.5B to 7B",
            architecture="HunYuanDenseV1ForCausalLM",
            tensors=TensorNames(
                SEPARATE,
                {
                    **NORMS,
                    "query_head": "self_attn.query_layernorm",
                    "key_head": "self_attn.key_layernorm",
                },
            ),
            defaults={"rms_norm_eps": 1e-5},
            follows=frozenset({"alpha"}),
            ignores={
                "use_qk_norm": "heads have norms in any case",
                **dict.fromkeys(
                    (
                        *("attention_head_dim", "cla_share_factor", "eod_token_id", "norm_type"),
                        *("org_vocab_size", "use_cla", "use_rotary_pos_emb"),
                    ),
                    "transformers ignores it",
                ),
            },
            biases=ATTENTION_BIASES,
            norms_last=True,
            bos_ids=(1,),
            eos_ids=(2,),
        ),
        "exaone": Family(
            name="EXAONE 3",
            covers="EXAONE 3, 3.5 and Deep",
            # transformers computes it as a Llama; published files name their own class.
            architecture="LlamaForCausalLM",
            tensors=TensorNames(
                {
                    "qkv": {member: f"attn.attention.{member}_proj" for member in "qkv"},
                    "o": {"o": "attn.attention.out_proj"},
                    "gate_up": {"gate": "mlp.c_fc_0", "up": "mlp.c_fc_1"},
                    "down": {"down": "mlp.c_proj"},
                },
                {"attention": "ln_1", "feed_forward": "ln_2"},
                layer="transformer.h.{layer}.",
                embedding="transformer.wte",
                final_norm="transformer.ln_f",
            ),
            defaults={
                "num_key_value_heads": 8,
                "rms_norm_eps": 1e-5,
                "intermediate_size": 14_336,
                "rope_theta": 500_000.0,
            },
            derived=exaone_fields,
            follows=frozenset(EXAONE_FIELDS),
            biases=BIASES,
            published_code=("modeling_exaone.ExaoneForCausalLM",),
            bos_ids=(1,),
            eos_ids=(361,),
        ),
        "olmo": Family(
            name="OLMo",
            covers="OLMo 1",
            architecture="OlmoForCausalLM",
            tensors=TensorNames(SEPARATE, dict.fromkeys(NORMS, ""), final_norm=""),
            defaults={"rms_norm_eps": 1e-5},
            follows=frozenset({"clip_qkv"}),
            ignores={"rms_norm_eps": "norms add 1e-05 in any case"},
            biases=ATTENTION_BIASES,
            centered_norms=True,
            norm_biases=False,
            eos_ids=(50_279,),
        ),
        "olmo2": Family(
            name="OLMo 2",
            covers="OLMo 2",
            architecture="Olmo2ForCausalLM",
            tensors=TensorNames(SEPARATE, {**OUTPUT_NORMS, **HEAD_NORMS}),
            defaults={"rms_norm_eps": 1e-5},
            biases=ATTENTION_BIASES,
            joint_head_norms=True,
            eos_ids=(50279,),
        ),
        "olmo3": Family(
            name="OLMo 3",
            covers="OLMo 3",
            architecture="Olmo3ForCausalLM",
            tensors=TensorNames(SEPARATE, {**OUTPUT_NORMS, **HEAD_NORMS}),
            defaults={
                "rms_norm_eps": 1e-5,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
                **dict.fromkeys(("rope_theta", "rope_local_base_freq"), 500_000.0),
            },
            follows=frozenset({"layer_types"}),
            layered_rope=True,
            ignores={"original_max_position_embeddings": SECTION_COUNTS},
            biases=ATTENTION_BIASES,
            slides=all_but_every_nth,
            joint_head_norms=True,
            eos_ids=(50279,),
        ),
        "exaone4": Family(
            name="EXAONE 4",
            covers="EXAONE 4",
            architecture="Exaone4ForCausalLM",
            tensors=TensorNames(SEPARATE, {**OUTPUT_NORMS, **HEAD_NORMS}),
            defaults={
                "num_key_value_heads": 32,
                "rms_norm_eps": 1e-5,
                "sliding_window": 4096,
                "sliding_window_pattern": 4,
            },
            follows=frozenset({"layer_types", "sliding_window_pattern"}),
            rope_needs_window=True,
            slides=all_but_every_nth,
            bos_ids=(0,),
            eos_ids=(2,),
        ),
        **UNGATED,
        **GEMMA3N,
        **MUSE_GLIMMER,
        **GEMMA4,
        "llama4_text": LLAMA4,
        **HYBRIDS,
        **MIXTURES,
        **STATE_SPACES,
        **LATENT,
    }
)
"""The supported values of ``model_type``."""

CONFIG_FIELDS: Final = config_fields({name: family.fields for name, family in FAMILIES.items()})
"""Fields of ``config.json``, by model type."""

SUPPORTED = (
    f"Supported model types: {', '.join(FAMILIES)}; text only, with RoPE of type {', '.join(ROPE_KINDS)}."
)
"""Next step for an unsupported feature or model."""


def unsupported(what: str) -> UnsupportedModelError:
    """Return the error for an unsupported feature or model, with the list of supported families."""
    return UnsupportedModelError(f"{what} is not supported.", fix=SUPPORTED)
