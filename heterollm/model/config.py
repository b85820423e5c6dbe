"""Reads and checks a checkpoint's ``config.json``.

Features that the runtime would compute wrongly are refused by name, before any weight is read.
:mod:`heterollm.model.families` declares each family's defaults and optional fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from heterollm.base import CheckpointError, UnsupportedModelError
from heterollm.kernels.ops import Activation, Group
from heterollm.model.attention_blocks import AttentionBlock
from heterollm.model.block_config import BlockFields, is_biased
from heterollm.model.blocks import FfnBlock, LayerInputBlock, MixtureBlock
from heterollm.model.families import CONFIG_FIELDS, FAMILIES, SUPPORTED, unsupported
from heterollm.model.family import Family
from heterollm.model.fields import ROPE_FIELDS
from heterollm.model.json_fields import JsonFields, read_json_object
from heterollm.model.layers import AnyBlock, LayerConfig
from heterollm.model.missing import MISSING
from heterollm.model.rope import RopeConfig
from heterollm.model.sampling_defaults import read_generation
from heterollm.model.states import StateSpec
from heterollm.model.stored import refuse_foreign_weights
from heterollm.model.stored_formats import StoredFormats, read_stored_formats
from heterollm.model.token_ids import token_ids
from heterollm.model.wrappers import text_config

POST_NORM_EPS: Final = "post_norm_eps"
"""Field with the number added in norms of outputs, in families whose other norms add another."""

MOST_LAYERS = 10_000
"""A limit that refuses a damaged number before any list over layers is made."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape and features of a decoder.

    Args:
        model_type: A key of :data:`heterollm.model.families.FAMILIES`.
        family: Display name of the model type.
        hidden_size: Width of the residual stream.
        vocab_size: Rows of the embedding and of the LM head.
        max_positions: Longest supported context.
        rms_norm_eps: Added to the mean square in every norm. Where a multiplier scales what layers add to the
            residual stream, the stream is divided by it instead, and this number by its square.
        inner_norm_eps: Added to the mean square in norms inside blocks, which read no stream.
        rope: Rotary position embedding of layers with full attention.
        per_layer: The decoder layers.
        tie_word_embeddings: Whether the LM head is the embedding.
        head_bias: Whether the LM head has a bias.
        bos_ids: Token ids that begin a text.
        eos_ids: Token ids that end an answer, from ``generation_config.json``, else ``config.json``.
        pad_id: Padding token, if there is one.
        centered_norms: Whether norms subtract the mean.
        norm_biases: Whether norms have a bias.
        norm_offset: Added to the stored weight of every norm of a layer.
        final_norm_offset: Added to that of the norm before the head.
        output_norm_eps: Added to the mean square in norms of outputs.
        norms_embedding: Whether the embedding has a norm without weights.
        embedding_scale: Factor on the embedding.
        learned_positions: Whether a table of learned positions is added to the embedding.
        layer_vocabulary: Tokens that have an embedding for each layer; 0 without such embeddings.
        logit_soft_cap: Soft cap of the logits; 0 for none.
        logit_scale: Factor on the logits.
        linear_factors: Factors on the outputs of linears, by group and member, which the weights take on as
            they are read.
        stored: Formats of weights that the checkpoint stores quantised; None for floats.
    """

    model_type: str
    family: str
    hidden_size: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    inner_norm_eps: float
    rope: RopeConfig
    per_layer: tuple[LayerConfig, ...]
    tie_word_embeddings: bool
    head_bias: bool
    bos_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    pad_id: int | None
    centered_norms: bool
    norm_biases: bool
    norm_offset: float
    final_norm_offset: float
    output_norm_eps: float
    norms_embedding: bool
    embedding_scale: float
    learned_positions: bool
    layer_vocabulary: int
    logit_soft_cap: float
    logit_scale: float
    linear_factors: tuple[tuple[Group, str, float], ...] = ()
    stored: StoredFormats | None = None

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        return len(self.per_layer)

    def blocks(self, kind: type[AnyBlock]) -> dict[int, AnyBlock]:
        """Return the blocks of a kind by layer."""
        found = ((number, layer.find(kind)) for number, layer in enumerate(self.per_layer))
        return {number: block for number, block in found if block is not None}

    @property
    def states(self) -> tuple[tuple[int, StateSpec], ...]:
        """The states that a session keeps, with their layers; a layer may have two."""
        found = (
            (number, block.state()) for number, layer in enumerate(self.per_layer) for block in layer.blocks
        )
        return tuple((number, state) for number, state in found if state is not None)

    def state_bytes(self, context: int, longest: int, dtype: np.dtype[Any]) -> int:
        """Return the bytes that a session keeps between passes.

        Args:
            context: Positions of a session.
            longest: Most positions that a pass writes.
            dtype: Type of the KV cache.
        """
        return sum(spec.bytes(spec.kept(context, longest), dtype) for _, spec in self.states)

    @property
    def attention(self) -> AttentionBlock:
        """The attention of the first layer that has one."""
        return next(iter(self.blocks(AttentionBlock).values()))

    @property
    def streams(self) -> int:
        """Number of residual streams."""
        streams = self.per_layer[0].streams
        return 1 if streams is None else streams.count

    @property
    def layer_input_width(self) -> int:
        """Elements of a token's embedding for a layer; 0 without."""
        block = self.per_layer[0].find(LayerInputBlock)
        return 0 if block is None else block.width

    @property
    def layer_input_columns(self) -> int:
        """Elements of a token's embeddings for all layers; 0 without."""
        return self.layers * self.layer_input_width

    @property
    def has_alike_heads(self) -> bool:
        """Whether every layer with attention has as many heads, as wide, with keys of its own."""
        sizes = {
            (block.heads, block.kv_heads, block.head_dim, block.kv_layer)
            for block in self.blocks(AttentionBlock).values()
        }
        return len(sizes) == 1

    @property
    def mixture(self) -> MixtureBlock | None:
        """The mixture of the first layer that has one, equal in all; None without."""
        return next(iter(self.blocks(MixtureBlock).values()), None)

    @property
    def ffn(self) -> FfnBlock | None:
        """The network of the first layer that has one besides experts; None without."""
        return next(iter(self.blocks(FfnBlock).values()), None)

    @property
    def activation(self) -> Activation:
        """Activation of all networks."""
        network = self.ffn or self.mixture
        assert network is not None  # a layer has experts, a network, or both
        return network.activation

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
        values = text_config(values)
        family = _check_supported(JsonFields(values))
        read = CONFIG_FIELDS.read(values, str(values["model_type"]))
        own = {name: read[stated] for name, stated in family.renamed.items() if stated in read}
        fields = JsonFields({**family.defaults, **read, **own})
        if family.derived is not None:
            fields = JsonFields({**fields.values, **family.derived(fields)})
        hidden_size = fields.count("hidden_size")
        max_positions = fields.count("max_position_embeddings")
        layers = fields.count("num_hidden_layers", maximum=MOST_LAYERS)
        blocks = BlockFields(fields, family, layers, hidden_size, max_positions)
        per_layer = tuple(blocks.layer(number) for number in range(layers))
        if not any(layer.find(AttentionBlock) for layer in per_layer):
            raise unsupported("A model without attention")
        vocab_size = fields.count("vocab_size")

        stated = JsonFields(generation or {}, "generation_config.json")

        def special_ids(name: str, default: tuple[int, ...] = ()) -> tuple[int, ...]:
            return _special_ids(JsonFields(values), stated, name, vocab_size, default)

        # A stream that is divided by the multiplier of what is added to it gives the same norms.
        added = _multiplier(fields, family, "residual_multiplier")
        epsilon = fields.positive("rms_norm_eps", 1e-6) / added**2
        # In float32, as transformers computes it for float32 weights.
        embedding_scale = float(np.sqrt(np.float32(hidden_size))) if family.scales_embedding else 1.0
        return cls(
            model_type=str(fields.get("model_type")),
            family=family.name,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            max_positions=max_positions,
            rms_norm_eps=epsilon,
            inner_norm_eps=fields.positive("rms_norm_eps", 1e-6),
            rope=blocks.rope,
            per_layer=per_layer,
            tie_word_embeddings=fields.flag("tie_word_embeddings", False),
            head_bias=is_biased(fields, family, "head"),
            bos_ids=special_ids("bos_token_id", family.bos_ids),
            eos_ids=special_ids("eos_token_id", family.eos_ids),
            pad_id=next(iter(special_ids("pad_token_id")), None),
            centered_norms=family.centered_norms,
            norm_biases=family.centered_norms and family.norm_biases,
            norm_offset=family.norm_offset,
            final_norm_offset=0.0 if family.plain_final_norm else family.norm_offset,
            output_norm_eps=fields.positive(POST_NORM_EPS, epsilon)
            if POST_NORM_EPS in family.follows
            else epsilon,
            norms_embedding=family.norms_embedding,
            embedding_scale=embedding_scale * _multiplier(fields, family, "embedding_multiplier") / added,
            learned_positions=bool(family.tensors.positions),
            layer_vocabulary=_layer_vocabulary(fields, per_layer, vocab_size),
            logit_soft_cap=fields.optional_positive("final_logit_softcapping") or 0.0,
            logit_scale=fields.positive("logit_scale", 1.0) / _multiplier(fields, family, "logits_scaling"),
            linear_factors=() if family.linear_factors is None else family.linear_factors(fields),
            stored=read_stored_formats(fields),
        )


def _multiplier(fields: JsonFields, family: Family, name: str) -> float:
    return fields.positive(name, 1.0) if name in family.follows else 1.0


def _check_supported(fields: JsonFields) -> Family:
    model_type = fields.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        lacks = MISSING.get(model_type) if isinstance(model_type, str) else None
        raise unsupported(f"Model type {model_type!r}{f' ({lacks})' if lacks else ''}")
    family = FAMILIES[model_type]
    architectures = fields.get("architectures")
    published = [[name.rpartition(".")[-1]] for name in family.published_code]
    if architectures and architectures not in ([family.architecture], *published):
        raise unsupported(f"Architecture {architectures!r}")
    code = fields.get("auto_map")
    named = code.get("AutoModelForCausalLM") if isinstance(code, dict) else None
    if code and named not in family.published_code:
        raise unsupported("A checkpoint that brings its own code (auto_map)")
    check_config(fields.values)
    return family


def _layer_vocabulary(fields: JsonFields, layers: Sequence[LayerConfig], vocabulary: int) -> int:
    """Return the rows of the table with an embedding of each token for each layer; 0 without one."""
    if layers[0].find(LayerInputBlock) is None:
        return 0
    return fields.count("vocab_size_per_layer_input", vocabulary)


def check_config(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Refuse a field of ``config.json`` that would be computed wrongly.

    Args:
        values: Content of the file, of a supported model type.

    Returns:
        Notes about fields that no table has, of the text part if there are others.

    Raises:
        UnsupportedModelError: A field is not supported.
    """
    values = text_config(values)
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
