"""What a checkpoint's ``config.json`` says, checked, in one frozen object.

Everything that the runtime would compute wrongly is refused here by name, before a weight is read.
Fields: https://huggingface.co/docs/transformers/model_doc/llama and ``…/qwen2``; both the spelling of
transformers 5 (``rope_parameters``) and the older one (``rope_theta``, ``rope_scaling``) are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from heterollm.errors import CheckpointError, UnsupportedModelError
from heterollm.json_fields import Fields, read_json_object

__all__ = ["FAMILIES", "ROPE_KINDS", "Family", "ModelConfig", "RopeConfig", "RopeKind"]

RopeKind = Literal["default", "linear", "dynamic", "yarn", "llama3", "longrope"]

ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")
"""The position scalings that are supported."""


@dataclass(frozen=True, slots=True)
class Family:
    """What sets a model type apart from the others, its configuration's defaults included."""

    name: str
    architecture: str
    default_bos_ids: tuple[int, ...]
    default_eos_ids: tuple[int, ...]


FAMILIES: dict[str, Family] = {
    "llama": Family("Llama", "LlamaForCausalLM", (1,), (2,)),
    "qwen2": Family("Qwen2", "Qwen2ForCausalLM", (), ()),
}
"""The supported values of ``model_type``."""

SUPPORTED = (
    "Supported are Llama 2 and 3 (model_type llama) and Qwen2 and Qwen2.5 (model_type qwen2), unquantised, "
    f"with RoPE of type {', '.join(ROPE_KINDS)}."
)

DEFAULT_ROPE_BASE = 10_000.0


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding: its base and how positions are scaled.

    Only the fields of its kind matter; the rest keep their defaults.

    Args:
        kind: Which scaling.
        base: ``rope_theta``.
        max_positions: The model's ``max_position_embeddings``.
        original_max_positions: Positions before the context was extended.
        factor: How far it was extended; None derives it from the positions (yarn, longrope).
        attention_factor: Multiplies cosine and sine; None derives it (yarn, longrope).
        beta_fast: Rotations over the original context above which yarn leaves a frequency alone.
        beta_slow: Rotations below which yarn interpolates it fully.
        mscale: Numerator of yarn's attention factor.
        mscale_all_dim: Denominator of yarn's attention factor.
        truncate: Whether yarn rounds its range of dimensions to whole ones.
        low_frequency_factor: llama3: wavelengths above ``original / this`` are divided by the factor.
        high_frequency_factor: llama3: wavelengths below ``original / this`` are left alone.
        short_factor: longrope: divisor of each frequency up to the original context.
        long_factor: longrope: divisor of each frequency beyond it.
    """

    kind: RopeKind
    base: float
    max_positions: int
    original_max_positions: int
    factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder and what the runtime needs to know of it.

    Args:
        model_type: ``llama`` or ``qwen2``.
        family: Display name of the model type.
        hidden_size: Width of the residual stream.
        intermediate_size: Width of the feed-forward layer.
        layers: Decoder layers.
        heads: Query heads.
        kv_heads: Key and value heads; divides ``heads``.
        head_dim: Width of one head (even).
        vocab_size: Rows of the embedding and of the LM head.
        max_positions: Longest context the model was made for.
        rms_norm_eps: Added to the mean square in every norm.
        activation: Of the gate; always ``silu``.
        rope: Rotary position embedding.
        tie_word_embeddings: Whether the LM head is the embedding.
        qkv_bias: Whether q, k and v have biases.
        o_bias: Whether the attention output has a bias.
        mlp_bias: Whether gate, up and down have biases.
        bos_ids: Token ids that begin a text.
        eos_ids: Every token id that ends an answer, of ``config.json`` and ``generation_config.json``.
        pad_id: Padding token, if there is one.
        sliding_window: Always None: windows are refused for these families.
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
    activation: Literal["silu"]
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    bos_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    pad_id: int | None = None
    sliding_window: None = None

    @classmethod
    def from_folder(cls, folder: Path | str) -> ModelConfig:
        """Read ``config.json`` and, where there is one, ``generation_config.json``.

        Raises:
            CheckpointError: A file is missing or is not valid.
            UnsupportedModelError: The model is not of a supported kind.
        """
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise CheckpointError(
                f"{folder} has no config.json.", fix="Point at a folder with a Hugging Face checkpoint."
            )
        generation_path = path.with_name("generation_config.json")
        generation = read_json_object(generation_path) if generation_path.is_file() else {}
        return cls.from_dict(read_json_object(path), generation)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
        """Check the content of ``config.json`` (and of ``generation_config.json``).

        Raises:
            CheckpointError: A field is missing, of the wrong type, or contradicts another.
            UnsupportedModelError: The model is not of a supported kind.
        """
        fields = Fields(values)
        model_type = _check_supported(fields)
        family, llama = FAMILIES[model_type], model_type == "llama"
        hidden_size = fields.count("hidden_size")
        heads = fields.count("num_attention_heads")
        kv_heads = fields.count("num_key_value_heads", heads if llama else None)
        head_dim = _head_dim(fields, hidden_size, heads)
        if heads % kv_heads:
            raise CheckpointError(f"config.json: {heads} query heads cannot share {kv_heads} key heads.")
        max_positions = fields.count("max_position_embeddings")
        attention_bias = fields.flag("attention_bias", False) if llama else False
        sources = (fields, Fields(generation or {}, "generation_config.json"))
        vocab_size = fields.count("vocab_size")
        return cls(
            model_type=model_type,
            family=family.name,
            hidden_size=hidden_size,
            intermediate_size=fields.count("intermediate_size"),
            layers=fields.count("num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab_size,
            max_positions=max_positions,
            rms_norm_eps=fields.positive("rms_norm_eps", 1e-6),
            activation="silu",
            rope=_rope_config(fields, head_dim, max_positions),
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            qkv_bias=attention_bias or not llama,
            o_bias=attention_bias,
            mlp_bias=fields.flag("mlp_bias", False) if llama else False,
            bos_ids=_token_ids(sources, "bos_token_id", vocab_size, family.default_bos_ids),
            eos_ids=_token_ids(sources, "eos_token_id", vocab_size, family.default_eos_ids),
            pad_id=next(iter(_token_ids(sources, "pad_token_id", vocab_size, ())), None),
        )


def _check_supported(fields: Fields) -> str:
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise _unsupported(f"Model type {model_type!r}")
    architectures = fields.get("architectures")
    if architectures and architectures != [FAMILIES[model_type].architecture]:
        raise _unsupported(f"Architecture {architectures!r}")
    if fields.get("auto_map"):
        raise _unsupported("A checkpoint that brings its own code (auto_map)")
    quantization = fields.get("quantization_config")
    if quantization is not None:
        method = (
            quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
        )
        raise _unsupported(f"A checkpoint that is already quantised (quantization_config: {method})")
    activation = fields.get("hidden_act")
    if activation not in (None, "silu"):
        raise _unsupported(f"Activation {activation!r}")
    if model_type == "qwen2" and _slides(fields):
        raise _unsupported("Sliding-window attention (use_sliding_window)")
    return model_type


def _slides(fields: Fields) -> bool:
    if fields.flag("use_sliding_window", False):
        return True
    kinds = fields.get("layer_types")
    return isinstance(kinds, list) and any(kind != "full_attention" for kind in kinds)


def _unsupported(what: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{what} is not supported.", fix=SUPPORTED)


def _head_dim(fields: Fields, hidden_size: int, heads: int) -> int:
    if fields.get("head_dim") is None and hidden_size % heads:
        raise CheckpointError(f"config.json: hidden_size {hidden_size} is not divisible by {heads} heads.")
    head_dim = fields.count("head_dim", hidden_size // heads)
    if head_dim % 2:
        raise CheckpointError(f"config.json: head_dim {head_dim} is odd; rotary embedding needs pairs.")
    return head_dim


def _token_ids(
    sources: tuple[Fields, ...], name: str, vocab_size: int, default: tuple[int, ...]
) -> tuple[int, ...]:
    """Collect the ids that any source lists under ``name``, in order, each once."""
    if not any(name in fields.values for fields in sources):
        return tuple(token for token in default if token < vocab_size)
    found: dict[int, None] = {}
    for fields in sources:
        value = fields.get(name)
        listed = value if isinstance(value, list) else [] if value is None else [value]
        for token in listed:
            # -1 is how some exporters write "none".
            if type(token) is not int or token < -1:
                raise fields.fail(name, "token ids")
            if token >= vocab_size and name != "pad_token_id":
                raise fields.fail(name, f"token ids below the vocabulary of {vocab_size}")
            if 0 <= token < vocab_size:
                found[token] = None
    return tuple(found)


def _rope_config(fields: Fields, head_dim: int, max_positions: int) -> RopeConfig:
    # transformers lets the older spelling win where both are there.
    section = next(
        (name for name in ("rope_scaling", "rope_parameters") if fields.section(name)), "rope_parameters"
    )
    rope = Fields(fields.section(section), f"config.json, {section}")
    kind = _rope_kind(rope)
    for part in (rope, fields):
        if part.positive("partial_rotary_factor", 1.0) != 1.0:
            raise _unsupported(f"Rotary embedding of part of a head ({part.get('partial_rotary_factor')})")
    # Beside the section it wins over one inside, as in transformers.
    outside = fields if fields.get("original_max_position_embeddings") is not None else rope
    config = RopeConfig(
        kind=kind,
        base=rope.optional_positive("rope_theta") or fields.positive("rope_theta", DEFAULT_ROPE_BASE),
        max_positions=max_positions,
        original_max_positions=outside.count("original_max_position_embeddings", max_positions),
        factor=rope.optional_positive("factor"),
        attention_factor=rope.optional_positive("attention_factor"),
        beta_fast=rope.positive("beta_fast", 32.0),
        beta_slow=rope.positive("beta_slow", 1.0),
        mscale=rope.optional_positive("mscale"),
        mscale_all_dim=rope.optional_positive("mscale_all_dim"),
        truncate=rope.flag("truncate", True),
        low_frequency_factor=rope.positive("low_freq_factor", None if kind == "llama3" else 1.0),
        high_frequency_factor=rope.positive("high_freq_factor", None if kind == "llama3" else 4.0),
        short_factor=rope.numbers("short_factor", head_dim // 2) if kind == "longrope" else (),
        long_factor=rope.numbers("long_factor", head_dim // 2) if kind == "longrope" else (),
    )
    _check_rope(config, rope)
    return config


def _rope_kind(rope: Fields) -> RopeKind:
    if any(isinstance(value, dict) for value in rope.values.values()):
        raise _unsupported("Rotary embedding that differs between layers")
    named = rope.get("rope_type") or rope.get("type") or "default"
    for kind in ROPE_KINDS:
        if kind == named:
            return kind
    raise _unsupported(f"RoPE type {named!r}")


def _check_rope(config: RopeConfig, rope: Fields) -> None:
    if config.kind in ("linear", "dynamic", "llama3") and config.factor is None:
        raise rope.fail("factor", f"a number of at least 1 for RoPE type {config.kind}")
    if config.kind != "default" and config.factor is not None and config.factor < 1:
        raise rope.fail("factor", "a number of at least 1")
    if config.kind == "longrope" and config.original_max_positions < 2:
        raise rope.fail("original_max_position_embeddings", "a whole number of at least 2")
    if config.beta_fast <= config.beta_slow:
        raise rope.fail("beta_fast", f"more than beta_slow ({config.beta_slow:g})")
    if config.high_frequency_factor <= config.low_frequency_factor:
        raise rope.fail("high_freq_factor", f"more than low_freq_factor ({config.low_frequency_factor:g})")
    if config.base <= 1:
        raise rope.fail("rope_theta", "a number above 1")
