"""The supported model families, one declaration each.

A declaration has tensor names, defaults of ``config.json``, and the optional fields that the family follows.
:mod:`heterollm.model.config` combines it with a checkpoint's fields to a
:class:`~heterollm.model.ModelConfig`, and the runtime never reads a family's name. Each declaration follows
the model's file in https://github.com/huggingface/transformers/tree/main/src/transformers/models.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from heterollm.base import UnsupportedModelError
from heterollm.kernels.ops import Group
from heterollm.model.cohere import COHERE2
from heterollm.model.exaone import EXAONE3, EXAONE4
from heterollm.model.family import (
    ATTENTION_BIASES,
    BIASES,
    FUSED_NETWORK,
    HEAD_NORMS,
    NORMS,
    SEPARATE,
    Family,
    TensorNames,
    after_full_layers,
    all_but_every_fourth,
    every_layer,
    perhaps_parallel,
)
from heterollm.model.fields import config_fields
from heterollm.model.gemma import GEMMAS
from heterollm.model.gemma3n import GEMMA3N
from heterollm.model.gemma4 import GEMMA4
from heterollm.model.glm import GLMS
from heterollm.model.granite import GRANITE_FIELDS, GRANITES
from heterollm.model.hybrids import HYBRIDS
from heterollm.model.internlm import INTERNLMS
from heterollm.model.json_fields import JsonFields
from heterollm.model.latent import LATENT
from heterollm.model.llama4 import LLAMA4
from heterollm.model.mixtures import MIXTURES
from heterollm.model.muse_glimmer import MUSE_GLIMMER
from heterollm.model.olmo import OLMOS
from heterollm.model.rope import ROPE_KINDS
from heterollm.model.state_spaces import STATE_SPACES
from heterollm.model.ungated import UNGATED

FUSED: Final[Mapping[Group, Mapping[str, str]]] = {
    **FUSED_NETWORK,
    "qkv": dict.fromkeys(("q", "k", "v"), "self_attn.qkv_proj"),
}


def layers_without_rope(fields: JsonFields, layer: int) -> bool:
    """Return true for every ``no_rope_layer_interval``-th layer, which has no RoPE."""
    stated = fields.get("no_rope_layers")
    if isinstance(stated, list):
        return not stated[layer]
    return (layer + 1) % fields.count("no_rope_layer_interval") == 0


def minicpm_multipliers(fields: JsonFields) -> dict[str, object]:
    """Return Granite's names of MiniCPM's factors of depth and width (modeling_minicpm.py)."""
    layers, width = fields.count("num_hidden_layers"), fields.count("hidden_size")
    return {
        "residual_multiplier": fields.positive("scale_depth") / layers**0.5,
        "logits_scaling": width / fields.count("dim_model_base"),
        "attention_multiplier": (width // fields.count("num_attention_heads")) ** -0.5,
    }


QWEN: Final[Mapping[str, object]] = {
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
WINDOW_FIELDS = frozenset({"use_sliding_window", "layer_types"})
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
            biases=BIASES,
            bos_ids=(1,),
            eos_ids=(2,),
        ),
        "qwen2": Family(
            name="Qwen2",
            covers="Qwen2 and Qwen2.5",
            architecture="Qwen2ForCausalLM",
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
            defaults={"num_key_value_heads": 8, "sliding_window": 4096},
            follows=frozenset({"layer_types"}),
            slides=every_layer,
            bos_ids=(1,),
            eos_ids=(2,),
        ),
        **GEMMAS,
        **GRANITES,
        "stablelm": Family(
            name="StableLM",
            covers="StableLM 3B and StableLM 2 1.6B",
            architecture="StableLmForCausalLM",
            defaults={"num_key_value_heads": 32, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.25},
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
            defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
            biases={**BIASES, "o": "attention_out_bias"},
            bos_ids=(0,),
            eos_ids=(2,),
        ),
        "cwm": Family(
            name="CWM",
            covers="Code World Model",
            architecture="CwmForCausalLM",
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
        **GLMS,
        **INTERNLMS,
        "phonelm": Family(
            name="PhoneLM",
            covers="PhoneLM 0.5B and 1.5B",
            architecture="PhoneLMForCausalLM",
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
        "cohere2": COHERE2,
        "ministral3": Family(
            name="Ministral 3",
            covers="Ministral 3 and Devstral 2",
            architecture="Ministral3ForCausalLM",
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
                {**NORMS, "query_head": "self_attn.query_layernorm", "key_head": "self_attn.key_layernorm"},
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
        "exaone": EXAONE3,
        **OLMOS,
        "exaone4": EXAONE4,
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
