"""Lists the tensors and the operators of a model."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Literal

from heterollm.kernels.formats import effective_block
from heterollm.kernels.ops import GROUPS, Group, Member, OpSpec, Precision, Scales, WeightFormat
from heterollm.model.config import ModelConfig
from heterollm.model.expert_layout import TensorRows, expert_tensors
from heterollm.model.families import FAMILIES
from heterollm.model.family import Norm, TensorNames
from heterollm.model.stored_formats import StoredFormats

HEAD_LAYER = -1
"""Layer number of the LM head."""

HEAD_NORMS: tuple[Norm, ...] = ("query_head", "key_head")
"""Norms of one attention head's width."""

EMBEDDING_BITS: Literal[8] = 8
"""Bits of embedding and LM head, always symmetric: in 8 bits a zero point has no measurable gain."""


SOURCES: Mapping[Group, tuple[str, str]] = MappingProxyType(
    {
        "qkv": ("attention_input", "qkv"),
        "o": ("attention_output", "attention_delta"),
        "gate_up": ("feed_forward_input", "gate_up"),
        "down": ("activated", "feed_forward_delta"),
        "head": ("head_input", "logits"),
    }
)
"""Input and output of each group."""


def linear_names(config: ModelConfig, layer: int) -> dict[Group, dict[str, str]]:
    """Return the weight name of each member of each group of a layer, or of ``HEAD_LAYER``.

    A tied head has the embedding's name; members that are stacked in one tensor share its name.
    """
    names = _tensors(config)
    if layer == HEAD_LAYER:
        return {"head": {"head": embedding_name(config) if config.tie_word_embeddings else head_name(config)}}
    prefix = names.layer.format(layer=layer)
    return {
        group: {member: f"{prefix}{module}.weight" for member, module in modules.items()}
        for group, modules in names.modules.items()
        if config.intermediate_size or group not in ("gate_up", "down")
    }


def linear_rows(config: ModelConfig, layer: int) -> dict[Group, dict[str, TensorRows]]:
    """Return the weight's tensor and rows for each member of each group, as :func:`linear_names`."""
    found: dict[Group, dict[str, TensorRows]] = {}
    for group, members in linear_names(config, layer).items():
        used: dict[str, int] = {}
        found[group] = {}
        for member, name in members.items():
            start = used.get(name, 0)
            used[name] = start + _rows(config, member)
            found[group][member] = TensorRows(name, start, used[name])
    return found


def bias_names(config: ModelConfig, layer: int) -> dict[Group, dict[str, str]]:
    """Return the bias name of each member of each group that has biases, as :func:`linear_names`."""
    biased: dict[Group, bool] = {
        "qkv": config.qkv_bias,
        "o": config.o_bias,
        "gate_up": config.mlp_bias,
        "down": config.mlp_bias,
    }
    if layer == HEAD_LAYER:
        # Also the bias of a tied head has a name of its own.
        return {"head": {"head": _bias_name(head_name(config))}} if config.head_bias else {}
    return {
        group: {member: _bias_name(name) for member, name in members.items()}
        for group, members in linear_names(config, layer).items()
        if biased[group]
    }


def layer_norms(config: ModelConfig) -> tuple[Norm, ...]:
    """Return the norms that each layer has."""
    return tuple(_tensors(config).norms)


def block_norms(config: ModelConfig) -> int:
    """Return how many norms a layer has before or behind attention and feed-forward network."""
    return sum(norm not in HEAD_NORMS for norm in layer_norms(config))


def norm_name(config: ModelConfig, layer: int, norm: Norm) -> str:
    """Return the tensor name of one norm of a layer."""
    names = _tensors(config)
    return f"{names.layer.format(layer=layer)}{names.norms[norm]}.weight"


def final_norm_name(config: ModelConfig) -> str:
    """Return the tensor name of the norm before the head."""
    return f"{_tensors(config).final_norm}.weight"


def norm_bias_name(config: ModelConfig, layer: int, norm: Norm) -> str:
    """Return the tensor name of the bias of one norm of a layer."""
    return _bias_name(norm_name(config, layer, norm))


def final_norm_bias_name(config: ModelConfig) -> str:
    """Return the tensor name of the bias of the norm before the head."""
    return _bias_name(final_norm_name(config))


def embedding_name(config: ModelConfig) -> str:
    """Return the tensor name of the token embedding."""
    return f"{_tensors(config).embedding}.weight"


def head_name(config: ModelConfig) -> str:
    """Return the tensor name of an untied LM head."""
    return f"{_tensors(config).head}.weight"


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return rows and columns of a weight; those of a stack of matrices are rows of one."""
    return math.prod(shape[:-1]), shape[-1]


def layer_of(config: ModelConfig, name: str) -> int | None:
    """Return the number of the decoder layer that a tensor belongs to; None outside the layers."""
    prefix = _tensors(config).layer.partition("{layer}")[0]
    number = name.removeprefix(prefix).partition(".")[0]
    return int(number) if name.startswith(prefix) and number.isdecimal() else None


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that the model computes with, by name."""
    shapes: dict[str, tuple[int, ...]] = {
        embedding_name(config): (config.vocab_size, config.hidden_size),
        final_norm_name(config): (config.hidden_size,),
    }
    if config.centered_norms:
        shapes[final_norm_bias_name(config)] = (config.hidden_size,)
    for layer in (*range(config.layers), HEAD_LAYER):
        biases = bias_names(config, layer)
        for group, members in linear_rows(config, layer).items():
            for member, rows in members.items():
                # The last member in a shared tensor determines its number of rows.
                shapes[rows.name] = (rows.stop, _columns(config, group))
                if group in biases:
                    shapes[biases[group][member]] = (rows.stop,)
        if layer != HEAD_LAYER:
            for norm in layer_norms(config):
                shapes[norm_name(config, layer, norm)] = (_norm_width(config, norm),)
                if config.centered_norms:
                    shapes[norm_bias_name(config, layer, norm)] = (_norm_width(config, norm),)
            if config.routing is not None:
                shapes |= expert_tensors(config, layer, config.routing.experts)
    return shapes


def op_specs(
    config: ModelConfig,
    precision: Precision,
    group_size: int,
    symmetric: bool,
    *,
    float_bits: Literal[16, 32] = 16,
    scales: Scales = "free",
) -> tuple[OpSpec, ...]:
    """List every group of every layer that a plan places, in order of execution, and the head.

    The experts of a mixture, which only the GPU computes, are in :func:`heterollm.model.expert_specs`.

    At ``w4a16`` and ``w4a8`` the layers have 4 bits and the head 8; at ``w4a8`` all groups, including the
    head, read inputs that are rounded to int8. At ``w8a8`` all have 8 bits, the layers with one scale for a
    tensor. At ``w4a16`` and ``w4a8`` with free scales, weights that the checkpoint stores quantised have the
    formats of ``config.stored``. If ``group_size`` does not divide the inputs of a group, the
    block is the largest power of two below it that does.

    Args:
        config: The model.
        precision: Precision of weights and activations.
        group_size: Inputs that share one scale.
        symmetric: Whether 4-bit weights have no zero points.
        float_bits: Bits of the weights at precision ``fp16``: 32 if the device computes in float32.
        scales: Scales of the 4-bit weights.

    Raises:
        OptionError: No legal block divides the inputs of some group.
    """
    stored = kept_formats(config, precision, scales)

    def spec(layer: int, group: Group) -> OpSpec:
        columns = _columns(config, group)
        weight = WeightFormat(float_bits)
        if precision != "fp16":
            block = effective_block(columns, group_size)
            head = group == "head"
            weight = WeightFormat(4, block, symmetric, scales)
            if stored is not None:
                weight = stored.of_group(group, columns)
            elif head:
                weight = WeightFormat(EMBEDDING_BITS, block)
            elif precision == "w8a8":
                weight = WeightFormat(8, block, scales="tensor")
        members = tuple(
            Member(member, _rows(config, member)) for member in linear_names(config, layer)[group]
        )
        source, target = SOURCES[group]
        rounded = precision == "w4a8"
        return OpSpec(group, layer, members, columns, weight, source, target, integer_inputs=rounded)

    groups = [group for group in GROUPS if group in linear_names(config, 0)]
    layers = (spec(layer, group) for layer in range(config.layers) for group in groups)
    return (*layers, spec(HEAD_LAYER, "head"))


def kept_formats(config: ModelConfig, precision: Precision, scales: Scales) -> StoredFormats | None:
    """Return the formats that weights keep from the checkpoint; None if they are quantised from floats."""
    return config.stored if precision in ("w4a16", "w4a8") and scales == "free" else None


def shortened_blocks(specs: tuple[OpSpec, ...], group_size: int) -> Iterator[str]:
    """Yield a note for each width whose block is smaller than requested."""
    found = {spec.columns: spec for spec in reversed(specs) if spec.weight.quantized}
    for columns, spec in sorted(found.items()):
        if spec.weight.block != group_size:
            yield (
                f"Weights with {columns} inputs ({spec.group}) have blocks of {spec.weight.block}: "
                f"{group_size} does not divide {columns}."
            )


def _tensors(config: ModelConfig) -> TensorNames:
    return FAMILIES[config.model_type].tensors


def _bias_name(name: str) -> str:
    return f"{name.removesuffix('.weight')}.bias"


def _norm_width(config: ModelConfig, norm: Norm) -> int:
    if norm not in HEAD_NORMS:
        return config.hidden_size
    heads = config.heads if norm == "query_head" else config.kv_heads
    return config.head_dim * (heads if config.joint_head_norms else 1)


def _rows(config: ModelConfig, member: str) -> int:
    key_rows = config.kv_heads * config.head_dim
    return {
        "q": config.heads * config.head_dim,
        "k": key_rows,
        "v": key_rows,
        "o": config.hidden_size,
        "gate": config.intermediate_size,
        "up": config.intermediate_size,
        "down": config.hidden_size,
        "head": config.vocab_size,
    }[member]


def _columns(config: ModelConfig, group: Group) -> int:
    if group == "o":
        return config.heads * config.head_dim
    return config.intermediate_size if group == "down" else config.hidden_size
