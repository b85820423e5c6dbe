"""Lists the operators of a model that a plan places, with the formats of their weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from heterollm.kernels.formats import effective_block
from heterollm.kernels.ops import OpSpec, Precision, Scales, WeightFormat
from heterollm.model.block import GroupShape
from heterollm.model.config import ModelConfig
from heterollm.model.fusion import fusion_obstacle
from heterollm.model.layers import kind_names
from heterollm.model.layout import HEAD_LAYER, group_shapes
from heterollm.model.stored_formats import StoredFormats

EMBEDDING_BITS: Literal[8] = 8
"""Bits of embedding and LM head, always symmetric: in 8 bits a zero point has no measurable gain."""


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
    stored, kinds = kept_formats(config, precision, scales), kind_names(config.per_layer)

    def spec(layer: int, shape: GroupShape) -> OpSpec:
        columns = shape.columns
        weight = WeightFormat(float_bits)
        if precision != "fp16":
            block = effective_block(columns, group_size)
            weight = WeightFormat(4, block, symmetric, scales)
            if stored is not None:
                weight = stored.of_group(shape.group, columns)
            elif layer == HEAD_LAYER:
                weight = WeightFormat(EMBEDDING_BITS, block)
            elif precision == "w8a8":
                weight = WeightFormat(8, block, scales="tensor")
        return OpSpec(
            *(shape.group, layer, shape.members, columns, weight, shape.source, shape.target),
            integer_inputs=precision == "w4a8",
            kind="" if layer == HEAD_LAYER else kinds[layer],
            before=shape.before,
            reader=shape.reader,
            fusible=layer in fusible and shape.group in ("qkv", "gate_up"),
        )

    fusible = {layer for layer in range(config.layers) if not fusion_obstacle(config, layer)}
    layers = (*range(config.layers), HEAD_LAYER)
    return tuple(spec(layer, shape) for layer in layers for shape in group_shapes(config, layer))


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
