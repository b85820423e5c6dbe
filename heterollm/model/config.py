"""Reads and checks a checkpoint's ``config.json``.

Features that the runtime would compute wrongly are refused by name, before any weight is read.
:mod:`heterollm.model.families` declares each family's defaults and optional fields.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.kernels.ops import Activation, Routing
from heterollm.model.expert_config import read_mixture
from heterollm.model.families import FAMILIES, SUPPORTED, unsupported
from heterollm.model.family import Family
from heterollm.model.fields import CONFIG_FIELDS, ROPE_FIELDS
from heterollm.model.json_fields import JsonFields, read_json_object
from heterollm.model.rope_config import RopeConfig, read_ropes, read_rotary_dim
from heterollm.model.sampling_defaults import read_generation
from heterollm.model.stored import refuse_foreign_weights
from heterollm.model.stored_formats import StoredFormats, read_stored_formats
from heterollm.model.token_ids import token_ids

ACTIVATIONS: Mapping[object, Activation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Activations by their names in ``config.json``."""

MOST_LAYERS = 10_000
"""A limit that refuses a damaged number before any list over layers is made."""


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """The attention of one layer.

    Args:
        window: Positions that a token attends to, including its own; 0 for all.
        rope: Rotary position embedding; None for a layer without one.
    """

    window: int
    rope: RopeConfig | None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape and features of a decoder.

    Args:
        model_type: A key of :data:`heterollm.model.families.FAMILIES`.
        family: Display name of the model type.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the feed-forward layer; in a mixture that of the shared experts, 0 for
            none.
        layers: Decoder layers.
        heads: Query heads.
        kv_heads: Key and value heads; divides ``heads``.
        head_dim: Width of one head (even).
        vocab_size: Rows of the embedding and of the LM head.
        max_positions: Longest supported context.
        rms_norm_eps: Added to the mean square in every norm. Where a multiplier scales what layers add to the
            residual stream, the stream is divided by it instead, and this number by its square.
        activation: Activation of the gate.
        rope: Rotary position embedding of layers with full attention.
        rotary_dim: Elements of a head that RoPE rotates, even.
        per_layer: Window and RoPE of each layer.
        tie_word_embeddings: Whether the LM head is the embedding.
        qkv_bias: Whether q, k and v have biases.
        o_bias: Whether the attention output has a bias.
        mlp_bias: Whether gate, up and down have biases.
        head_bias: Whether the LM head has a bias.
        bos_ids: Token ids that begin a text.
        eos_ids: Token ids that end an answer, from ``generation_config.json``, else ``config.json``.
        pad_id: Padding token, if there is one.
        head_norms: Whether each head of q and k has a norm before RoPE.
        joint_head_norms: Whether that norm spans all heads of q, and all of k.
        qkv_limit: Magnitude that bounds q, k and v after the norm; 0 for none.
        centered_norms: Whether norms subtract the mean and have a bias.
        output_norms: Whether the outputs of attention and feed-forward have a norm.
        norm_offset: Added to the stored weight of every norm.
        embedding_scale: Factor on the embedding.
        attention_scale: Factor on the attention scores.
        attention_soft_cap: Scores become ``cap * tanh(score / cap)``; 0 for none.
        logit_soft_cap: Soft cap of the logits; 0 for none.
        logit_scale: Factor on the logits.
        routing: Rule by which the router of each layer chooses experts; None without experts.
        expert_size: Width of an expert; 0 without experts.
        stored: Formats of weights that the checkpoint stores quantised; None for floats.
    """

    model_type: str
    family: str
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    activation: Activation
    rope: RopeConfig
    rotary_dim: int
    per_layer: tuple[LayerConfig, ...]
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    head_bias: bool
    bos_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    pad_id: int | None
    head_norms: bool
    joint_head_norms: bool
    qkv_limit: float
    centered_norms: bool
    output_norms: bool
    norm_offset: float
    embedding_scale: float
    attention_scale: float
    attention_soft_cap: float
    logit_soft_cap: float
    logit_scale: float
    routing: Routing | None
    expert_size: int
    stored: StoredFormats | None = None

    @classmethod
    def from_folder(cls, folder: Path | str) -> ModelConfig:
        """Read ``config.json`` and, if present, ``generation_config.json``.

        Raises:
            CheckpointError: A file is missing or invalid.
            UnsupportedModelError: The model is not supported.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise CheckpointError(
                f"{folder} has no config.json.", fix="Point at a folder with a Hugging Face checkpoint."
            )
        values = read_json_object(path)
        refuse_foreign_weights(path.parent, values)
        return cls.from_dict(values, read_generation(folder))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Check the content of ``config.json`` (and of ``generation_config.json``).

        Raises:
            CheckpointError: A field is missing, of the wrong type, or contradicts another.
            UnsupportedModelError: The model is not supported.
        """
        family = _check_supported(JsonFields(values))
        read = CONFIG_FIELDS.read(values, str(values["model_type"]))
        fields = JsonFields({**family.defaults, **read})
        hidden_size = fields.count("hidden_size")
        heads = fields.count("num_attention_heads")
        kv_heads = fields.count("num_key_value_heads", heads)
        head_dim = _head_dim(fields, family, hidden_size, heads)
        if heads % kv_heads:
            raise CheckpointError(f"config.json: {heads} query heads cannot share {kv_heads} key heads.")
        max_positions = fields.count("max_position_embeddings")
        layers = fields.count("num_hidden_layers", maximum=MOST_LAYERS)
        rotary_dim = read_rotary_dim(fields, family, head_dim)
        full, sliding = read_ropes(fields, family, rotary_dim, max_positions)
        vocab_size = fields.count("vocab_size")

        stated = JsonFields(generation or {}, "generation_config.json")

        def special_ids(name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
            return _special_ids(JsonFields(values), stated, name, vocab_size, default)

        attention_bias = _followed_flag(fields, family, "attention_bias")
        # A stream that is divided by the multiplier of what is added to it gives the same norms.
        added = _multiplier(fields, family, "residual_multiplier")
        # In float32, as transformers computes it for float32 weights.
        embedding_scale = float(np.sqrt(np.float32(hidden_size))) if family.scales_embedding else 1.0
        attention_scale = fields.positive("query_pre_attn_scalar", head_dim) ** -0.5
        if "attention_multiplier" in family.follows:
            attention_scale = fields.positive("attention_multiplier", 1.0)
        routing, expert_size, dense_size = read_mixture(fields, family.mixture)
        return cls(
            model_type=str(fields.get("model_type")),
            family=family.name,
            hidden_size=hidden_size,
            intermediate_size=dense_size,
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab_size,
            max_positions=max_positions,
            rms_norm_eps=fields.positive("rms_norm_eps", 1e-6) / added**2,
            activation=_activation(fields, family),
            rope=full,
            rotary_dim=rotary_dim,
            per_layer=_per_layer(fields, family, layers, full, sliding),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            qkv_bias=attention_bias or "qkv" in family.always_biased,
            o_bias=attention_bias,
            mlp_bias=_followed_flag(fields, family, "mlp_bias"),
            head_bias=_followed_flag(fields, family, "lm_head_bias"),
            bos_ids=special_ids("bos_token_id", family.bos_ids),
            eos_ids=special_ids("eos_token_id", family.eos_ids),
            pad_id=next(iter(special_ids("pad_token_id")), None),
            head_norms="query_head" in family.tensors.norms,
            joint_head_norms=family.joint_head_norms,
            qkv_limit=fields.optional_positive("clip_qkv") or 0.0,
            centered_norms=family.centered_norms,
            output_norms="attention_output" in family.tensors.norms,
            norm_offset=family.norm_offset,
            embedding_scale=embedding_scale * _multiplier(fields, family, "embedding_multiplier") / added,
            attention_scale=attention_scale,
            attention_soft_cap=fields.optional_positive("attn_logit_softcapping") or 0.0,
            logit_soft_cap=fields.optional_positive("final_logit_softcapping") or 0.0,
            logit_scale=1.0 / _multiplier(fields, family, "logits_scaling"),
            routing=routing,
            expert_size=expert_size,
            stored=read_stored_formats(fields),
        )


def _multiplier(fields: JsonFields, family: Family, name: str) -> float:
    return fields.positive(name, 1.0) if name in family.follows else 1.0


def _per_layer(
    fields: JsonFields, family: Family, layers: int, full: RopeConfig, sliding: RopeConfig
) -> tuple[LayerConfig, ...]:
    windows, rotated = _windows(fields, family, layers), _rotated(fields, family, layers)
    return tuple(
        LayerConfig(window, (sliding if window else full) if has_rope else None)
        for window, has_rope in zip(windows, rotated, strict=True)
    )


def _check_supported(fields: JsonFields) -> Family:
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        vision = " (with vision; its text part alone is gemma3_text)" if model_type == "gemma3" else ""
        raise unsupported(f"Model type {model_type!r}{vision}")
    family = FAMILIES[model_type]
    architectures = fields.get("architectures")
    published = (family.published_code or "").rpartition(".")[-1]
    if architectures and architectures not in ([family.architecture], [published]):
        raise unsupported(f"Architecture {architectures!r}")
    code = fields.get("auto_map")
    named = code.get("AutoModelForCausalLM") if isinstance(code, dict) else None
    if code and (named is None or named != family.published_code):
        raise unsupported("A checkpoint that brings its own code (auto_map)")
    check_config(fields.values)
    return family


def check_config(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Refuse a field of ``config.json`` that would be computed wrongly.

    Args:
        values: Content of the file, of a supported model type.

    Returns:
        Notes about fields that no table has.

    Raises:
        UnsupportedModelError: A field is not supported.
    """
    kind = str(values["model_type"])
    refused, notes = CONFIG_FIELDS.examine(values, "config.json", kind)
    for name in ("rope_parameters", "rope_scaling"):
        section = values.get(name)
        if isinstance(section, dict):
            nested = {key: part for key, part in section.items() if isinstance(part, dict)}
            parts = [{key: part for key, part in section.items() if key not in nested}, *nested.values()]
            found = [ROPE_FIELDS.examine(part, f"config.json, {name}", kind) for part in parts]
            refused += tuple(one for sentences, _ in found for one in sentences)
            notes += tuple(one for _, sentences in found for one in sentences)
    if refused:
        raise UnsupportedModelError(refused[0], fix=SUPPORTED)
    return notes


def _activation(fields: JsonFields, family: Family) -> Activation:
    field = "hidden_activation" if "hidden_activation" in family.follows else "hidden_act"
    stated = fields.get(field)
    named = "silu" if stated is None else stated
    if not isinstance(named, str) or named not in ACTIVATIONS:
        raise unsupported(f"Activation {named!r}")
    return ACTIVATIONS[named]


def _followed_flag(fields: JsonFields, family: Family, name: str) -> bool:
    return fields.flag(name, False) if name in family.follows else False


def _windows(fields: JsonFields, family: Family, layers: int) -> list[int]:
    """Return the window of each layer, 0 for none."""
    unused = "use_sliding_window" in family.follows and not fields.flag("use_sliding_window", False)
    window = 0
    if family.slides is not None and not unused and fields.get("sliding_window") is not None:
        window = fields.count("sliding_window")
    kinds = fields.get("layer_types")
    if kinds is None:
        slides = family.slides
        return [window if window and slides and slides(fields, at) else 0 for at in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise fields.fail("layer_types", f"a list of {layers} kinds of layers")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise unsupported(f"A layer of kind {kind!r}")
    if "sliding_attention" in kinds and not window:
        raise fields.fail("sliding_window", "a whole number, in use, for the layer_types that slide")
    if "layer_types" not in family.follows and len({*kinds, *(["sliding_attention"] if window else [])}) > 1:
        raise unsupported(f"Layers of different kinds (layer_types) in model type {family.name}")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def _rotated(fields: JsonFields, family: Family, layers: int) -> list[bool]:
    """Return whether each layer has RoPE."""
    if "no_rope_layers" not in family.follows:
        return [True] * layers
    stated = fields.get("no_rope_layers")
    if stated is None:
        interval = fields.count("no_rope_layer_interval")
        return [bool((at + 1) % interval) for at in range(layers)]
    if not isinstance(stated, list) or len(stated) < layers or any(one not in (0, 1) for one in stated):
        raise fields.fail("no_rope_layers", f"a list of {layers} times 0 or 1")
    return [bool(one) for one in stated[:layers]]


def _head_dim(fields: JsonFields, family: Family, hidden_size: int, heads: int) -> int:
    if fields.get("head_dim") is None and hidden_size % heads:
        raise CheckpointError(f"config.json: hidden_size {hidden_size} is not divisible by {heads} heads.")
    head_dim = fields.count("head_dim", hidden_size // heads)
    if family.joint_head_norms and head_dim * heads != hidden_size:
        raise fields.fail("head_dim", f"{hidden_size // heads}, since a norm spans all heads")
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim {head_dim} is odd; rotary embedding needs pairs.")
    return head_dim


def _special_ids(
    config: JsonFields, generation: JsonFields, name: str, vocab_size: int, default: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the ids of a name that lie in the vocabulary; those of a file must, but for padding."""
    found = token_ids(config, generation, name, default)
    inside = tuple(token for token in found if token < vocab_size)
    if inside != found and name != "pad_token_id" and found is not default:
        stated = config if generation.get(name) is None else generation
        raise stated.fail(name, f"token ids below the vocabulary of {vocab_size}")
    return inside
