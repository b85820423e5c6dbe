"""The supported model families, one declaration each.

A declaration has tensor names, defaults of ``config.json``, and the optional fields that the family follows.
:mod:`heterollm.model.config` combines it with a checkpoint's fields to a
:class:`~heterollm.model.ModelConfig`, and the runtime never reads a family's name. Each declaration follows
the model's file in https://github.com/huggingface/transformers/tree/main/src/transformers/models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from heterollm.base import UnsupportedModelError
from heterollm.kernels.ops import Group, Scoring
from heterollm.model.json_fields import JsonFields

__all__ = ["FAMILIES", "ROPE_KINDS", "Family", "Mixture", "Norm", "RopeKind", "TensorNames", "unsupported"]

Norm = Literal[
    "attention", "feed_forward", "attention_output", "feed_forward_output", "query_head", "key_head"
]
"""Norms of a layer: of the inputs and outputs of attention and feed-forward, and of the heads of q and k."""

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]

ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
"""The supported RoPE scalings."""


@dataclass(frozen=True, slots=True)
class TensorNames:
    """The tensor names of a family in its Hugging Face checkpoints.

    Args:
        modules: For each group of a layer, the module of each member, below the prefix. Members that share a
            module are stacked in its tensor.
        norms: For each norm of a layer, the module.
        layer: Prefix of a decoder layer's tensors, with ``{layer}`` for its number.
        embedding: Module of the token embedding.
        final_norm: Module of the norm before the head.
        head: Module of an untied LM head.
    """

    modules: Mapping[Group, Mapping[str, str]]
    norms: Mapping[Norm, str]
    layer: str = "model.layers.{layer}."
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"


@dataclass(frozen=True, slots=True)
class Mixture:
    """The mixture of experts in each layer of a family.

    Args:
        router: Module of the router, below the layer's prefix.
        members: Module of gate, up and down, with ``{expert}`` for the number of an expert; without it the
            tensor ``[experts, rows, k]`` holds all experts, and members that share it follow each other.
        width_field: Field with the width of an expert.
        shared_field: Field with the width of the experts that compute every token, 0 for none; "" in a family
            without them.
        scoring: Function from the router's logits to the scores. ``sparsemixer`` chooses the largest logit,
            then the largest of the others; the weight of each is its share in the softmax over the logits
            near it (https://arxiv.org/abs/2409.12136).
        normalized_field: Field that says whether the chosen weights are divided by their sum; "" for always.
    """

    router: str
    members: Mapping[str, str]
    width_field: str = "intermediate_size"
    shared_field: str = ""
    scoring: Scoring = "softmax"
    normalized_field: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """The properties of a model type.

    Args:
        name: Display name.
        covers: Well-known models of the family.
        architecture: The class in transformers.
        tensors: Tensor names; a layer has the norms that they list.
        defaults: Default values of ``config.json`` that differ from Llama's.
        follows: Supported optional fields; other families refuse one that changes the result.
        always_biased: Groups that have biases regardless of the configuration.
        slides: Whether a layer has the sliding window if ``layer_types`` is missing; None in a family
            without windows.
        rope_aliases: Other names of RoPE types.
        norm_offset: Added to the stored weight of every norm.
        scales_embedding: Whether the embedding is multiplied by the square root of its width.
        mixture: The experts of its layers; None in a family without them.
        centered_norms: Whether norms subtract the mean and have a bias (LayerNorm).
        joint_head_norms: Whether the norm of q, and that of k, spans all heads.
        published_code: The class in ``auto_map`` of official checkpoints that predate the family's support in
            transformers; any other code is refused. The class may also stand for the architecture.
        bos_ids: Default of ``bos_token_id``.
        eos_ids: Default of ``eos_token_id``.
    """

    name: str
    covers: str
    architecture: str
    tensors: TensorNames
    defaults: Mapping[str, object] = field(default_factory=dict)
    follows: frozenset[str] = frozenset()
    always_biased: frozenset[Group] = frozenset()
    slides: Callable[[JsonFields, int], bool] | None = None
    rope_aliases: Mapping[str, RopeKind] = field(default_factory=dict)
    norm_offset: float = 0.0
    scales_embedding: bool = False
    mixture: Mixture | None = None
    centered_norms: bool = False
    joint_head_norms: bool = False
    published_code: str | None = None
    bos_ids: tuple[int, ...] = ()
    eos_ids: tuple[int, ...] = ()


# ---- tensor names ---------------------------------------------------------------------------------------

SEPARATE: Mapping[Group, Mapping[str, str]] = MappingProxyType(
    {
        "qkv": {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"},
        "o": {"o": "self_attn.o_proj"},
        "gate_up": {"gate": "mlp.gate_proj", "up": "mlp.up_proj"},
        "down": {"down": "mlp.down_proj"},
    }
)
FUSED: Mapping[Group, Mapping[str, str]] = MappingProxyType(
    {
        **SEPARATE,
        "qkv": dict.fromkeys(("q", "k", "v"), "self_attn.qkv_proj"),
        "gate_up": dict.fromkeys(("gate", "up"), "mlp.gate_up_proj"),
    }
)
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

NORMS: Mapping[Norm, str] = MappingProxyType(
    {"attention": "input_layernorm", "feed_forward": "post_attention_layernorm"}
)
HEAD_NORMS: Mapping[Norm, str] = MappingProxyType(
    {"query_head": "self_attn.q_norm", "key_head": "self_attn.k_norm"}
)
SANDWICH_NORMS: Mapping[Norm, str] = MappingProxyType(
    {
        "attention": "input_layernorm",
        "attention_output": "post_attention_layernorm",
        "feed_forward": "pre_feedforward_layernorm",
        "feed_forward_output": "post_feedforward_layernorm",
    }
)


# ---- mixtures of experts --------------------------------------------------------------------------------

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

# ---- layers with a sliding window -----------------------------------------------------------------------


def every_layer(_fields: JsonFields, _layer: int) -> bool:
    """Return true."""
    return True


def after_full_layers(fields: JsonFields, layer: int) -> bool:
    """Return whether a layer follows the first ``max_window_layers``, which have full attention."""
    return layer >= fields.count("max_window_layers", minimum=0)


def all_but_every_nth(fields: JsonFields, layer: int) -> bool:
    """Return false for every ``sliding_window_pattern``-th layer, which has full attention."""
    return (layer + 1) % fields.count("sliding_window_pattern") != 0


def layers_without_rope(fields: JsonFields, layer: int) -> bool:
    """Return true for every ``no_rope_layer_interval``-th layer, which has no RoPE."""
    stated = fields.get("no_rope_layers")
    if isinstance(stated, list):
        return not stated[layer]
    return (layer + 1) % fields.count("no_rope_layer_interval") == 0


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
    {"attention_bias", "final_logit_softcapping", "hidden_activation", "layer_types", "query_pre_attn_scalar"}
)
GRANITE_FIELDS = frozenset(
    {
        *("attention_bias", "attention_multiplier", "embedding_multiplier"),
        *("residual_multiplier", "logits_scaling"),
    }
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family(
            name="Llama",
            covers="Llama 2 and 3, SmolLM and SmolLM2",
            architecture="LlamaForCausalLM",
            tensors=TensorNames(SEPARATE, NORMS),
            follows=frozenset({"attention_bias", "mlp_bias"}),
            bos_ids=(1,),
            eos_ids=(2,),
        ),
        "qwen2": Family(
            name="Qwen2",
            covers="Qwen2 and Qwen2.5",
            architecture="Qwen2ForCausalLM",
            tensors=TensorNames(SEPARATE, NORMS),
            defaults=QWEN,
            follows=WINDOW_FIELDS,
            always_biased=frozenset({"qkv"}),
            slides=after_full_layers,
        ),
        "qwen3": Family(
            name="Qwen3",
            covers="Qwen3",
            architecture="Qwen3ForCausalLM",
            tensors=TensorNames(SEPARATE, {**NORMS, **HEAD_NORMS}),
            defaults={**QWEN, "head_dim": 128},
            follows=WINDOW_FIELDS | {"attention_bias"},
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
            published_code="modeling_phi3.Phi3ForCausalLM",
            bos_ids=(1,),
            eos_ids=(32000,),
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
                "sliding_window_pattern": 6,
                "rope_theta": 1_000_000.0,
                "rope_local_base_freq": 10_000.0,
            },
            follows=GEMMA_FIELDS | {"rope_local_base_freq"},
            slides=all_but_every_nth,
            norm_offset=1.0,
            scales_embedding=True,
            bos_ids=(2,),
            eos_ids=(1,),
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
            follows=WINDOW_FIELDS | {"attention_bias", "mlp_bias", "no_rope_layers"},
            slides=layers_without_rope,
            bos_ids=(128000,),
            eos_ids=(128001,),
        ),
        "mixtral": Family(
            name="Mixtral",
            covers="Mixtral",
            architecture="MixtralForCausalLM",
            tensors=TensorNames(ATTENTION, NORMS),
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
            tensors=TensorNames(ATTENTION, {**NORMS, **HEAD_NORMS}),
            mixture=Mixture(
                "mlp.gate",
                NAMED_EXPERTS,
                width_field="moe_intermediate_size",
                normalized_field="norm_topk_prob",
            ),
            defaults={
                "num_key_value_heads": 4,
                "sliding_window": 4096,
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
"""The supported values of ``model_type``."""


def unsupported(what: str) -> UnsupportedModelError:
    """Return the error for an unsupported feature or model, with the list of supported families."""
    listed = ", ".join(f"{family.covers} (model_type {name})" for name, family in FAMILIES.items())
    return UnsupportedModelError(
        f"{what} is not supported.",
        fix=f"Supported are {listed}; text only, with RoPE of type {', '.join(ROPE_KINDS)}.",
    )
