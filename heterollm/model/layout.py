"""Lists the tensors and the operators of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from heterollm.kernels.formats import effective_block
from heterollm.kernels.ops import GROUPS, Group, Member, OpSpec, Precision, Scales, WeightFormat
from heterollm.model.config import ModelConfig
from heterollm.model.families import FAMILIES, Norm, TensorNames

__all__ = [
    "HEAD_LAYER",
    "TensorRows",
    "bias_names",
    "block_norms",
    "embedding_name",
    "expected_tensors",
    "final_norm_name",
    "head_name",
    "layer_norms",
    "layer_of",
    "linear_names",
    "linear_rows",
    "norm_name",
    "op_specs",
    "shortened_blocks",
]

HEAD_LAYER = -1
"""Layer number of the LM head."""

HEAD_NORMS: tuple[Norm, ...] = ("query_head", "key_head")
"""Norms of one attention head's width."""

EMBEDDING_BITS: Literal[8] = 8
"""Bits of embedding and LM head, always symmetric: in 8 bits a zero point has no measurable gain."""


@dataclass(frozen=True, slots=True)
class TensorRows:
    """The rows ``[start, stop)`` of a tensor that hold a linear's weight."""

    name: str
    start: int
    stop: int


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
        "head": False,
    }
    return {
        group: {member: f"{name.removesuffix('.weight')}.bias" for member, name in members.items()}
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


def embedding_name(config: ModelConfig) -> str:
    """Return the tensor name of the token embedding."""
    return f"{_tensors(config).embedding}.weight"


def head_name(config: ModelConfig) -> str:
    """Return the tensor name of an untied LM head."""
    return f"{_tensors(config).head}.weight"


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
                width = config.head_dim if norm in HEAD_NORMS else config.hidden_size
                shapes[norm_name(config, layer, norm)] = (width,)
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
    """List every group of every layer in order of execution, and the head.

    At ``w4a16`` and ``w4a8`` the layers have 4 bits and the head 8; at ``w4a8`` all groups, including the
    head, read inputs that are rounded to int8. At ``w8a8`` all have 8 bits, the layers with one scale for a
    tensor. If ``group_size`` does not divide the inputs of a group, the
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

    def spec(layer: int, group: Group) -> OpSpec:
        columns = _columns(config, group)
        weight = WeightFormat(float_bits)
        if precision != "fp16":
            block = effective_block(columns, group_size)
            head = group == "head"
            weight = WeightFormat(4, block, symmetric, scales)
            if head:
                weight = WeightFormat(EMBEDDING_BITS, block)
            elif precision == "w8a8":
                weight = WeightFormat(8, block, scales="tensor")
        members = tuple(
            Member(member, _rows(config, member)) for member in linear_names(config, layer)[group]
        )
        source, target = SOURCES[group]
        rounded = precision == "w4a8"
        return OpSpec(group, layer, members, columns, weight, source, target, integer_inputs=rounded)

    layers = (spec(layer, group) for layer in range(config.layers) for group in GROUPS if group != "head")
    return (*layers, spec(HEAD_LAYER, "head"))


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
