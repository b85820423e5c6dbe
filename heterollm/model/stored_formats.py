"""Reads from ``config.json`` the number formats of weights that a checkpoint stores quantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from msgspec import structs

from heterollm.base import OptionError
from heterollm.kernels.formats import effective_block
from heterollm.kernels.ops import Group, WeightFormat
from heterollm.model.families import unsupported
from heterollm.model.json_fields import JsonFields

__all__ = ["StoredFormats", "read_stored_formats"]

LAYER_GROUPS: Final = ("qkv", "o", "gate_up", "down", "experts")

LARGEST_BLOCK = 128
"""Longer stored blocks are cut into such with equal scales."""


@dataclass(frozen=True, slots=True)
class StoredFormats:
    """The canonical formats that hold the weights of a checkpoint best.

    Args:
        layers: Format of each group of the layers; blocks that do not divide the inputs of one are halved.
        head: Format of embedding and head; None if the checkpoint stores both as floats.
    """

    layers: Mapping[str, WeightFormat]
    head: WeightFormat | None

    def of_group(self, group: Group, columns: int) -> WeightFormat:
        """Return the format of a group with some inputs; the head's is also the embedding's."""
        weight = self.layers.get(group)
        if group == "head":
            block = max(own.block for own in self.layers.values())
            weight = self.head or WeightFormat(8, block)
        assert weight is not None  # by the check of the groups' names
        return structs.replace(weight, block=effective_block(columns, weight.block))


def read_stored_formats(fields: JsonFields) -> StoredFormats | None:
    """Return the formats in ``quantization_config``; None without one.

    Raises:
        CheckpointError: A field has the wrong type or an impossible value.
        UnsupportedModelError: The method, or a variant of it, is not supported.
    """
    if fields.get("quantization_config") is None:
        return None
    own = JsonFields(fields.section("quantization_config"), f"{fields.where}, quantization_config")
    method = own.get("quant_method")
    if method == "gguf":
        head, layers = own.section("head"), own.section("layers")
        if set(layers) != set(LAYER_GROUPS):
            raise own.fail("layers", f"a format for each of {', '.join(LAYER_GROUPS)}")
        formats = {group: _format(JsonFields(layers, own.where).section(group), own) for group in layers}
        return StoredFormats(formats, _format(head, own) if head else None)
    if method == "gptq":
        in_order = not own.flag("desc_act", False)
        return _alike(_grouped(own, "bits", own.flag("sym", True), in_order=in_order))
    if method == "awq":
        if own.get("version") not in (None, "gemm"):
            raise unsupported(f"AWQ in the layout {own.get('version')!r:.40}")
        return _alike(_grouped(own, "bits", not own.flag("zero_point", True), in_order=True))
    if method == "compressed-tensors":
        return _alike(_compressed(own))
    raise unsupported(f"A checkpoint that is already quantised (quantization_config: {method!r:.80})")


def _alike(weight: WeightFormat) -> StoredFormats:
    return StoredFormats(dict.fromkeys(LAYER_GROUPS, weight), None)


def _compressed(own: JsonFields) -> WeightFormat:
    """Return the format of a checkpoint whose linears are all quantised alike, without their inputs."""
    groups = list(own.section("config_groups").values())
    group = groups[0] if groups and isinstance(groups[0], dict) else {}
    weights = JsonFields(group, own.where).section("weights")
    packed = own.get("format") == "pack-quantized" and weights.get("type", "int") == "int"
    if len(groups) != 1 or not packed or group.get("input_activations") is not None:
        raise unsupported(
            f"compressed-tensors in format {own.get('format')!r:.40} with {len(groups)} groups, or with "
            "quantised inputs, instead of pack-quantized integers in one group,"
        )
    fields = JsonFields(weights, f"{own.where}, weights")
    return _grouped(fields, "num_bits", fields.flag("symmetric", True), in_order=not fields.get("actorder"))


def _grouped(fields: JsonFields, bits: str, symmetric: bool, *, in_order: bool) -> WeightFormat:
    """Return the format of weights in groups of inputs; 8 bits where a group is no range of inputs."""
    if fields.get(bits) not in (4, 8):
        raise unsupported(f"Weights of {fields.get(bits)!r:.40} bits")
    whole = fields.get("group_size") in (None, -1)
    block = LARGEST_BLOCK if whole else fields.count("group_size")
    if not in_order or fields.get(bits) == 8:
        return _format({"bits": 8, "block": block if in_order else 32}, fields)
    return _format({"bits": 4, "block": block, "symmetric": symmetric}, fields)


def _format(values: Mapping[str, Any], own: JsonFields) -> WeightFormat:
    fields = JsonFields(values, own.where)
    bits: Literal[4, 8] = 4 if fields.count("bits", minimum=4, maximum=8) == 4 else 8
    block = min(fields.count("block"), LARGEST_BLOCK)
    try:
        effective_block(block, block)
    except OptionError:
        raise fields.fail("block", "a power of two of at least 16") from None
    minimum = fields.flag("minimum", False)
    return WeightFormat(bits, block, fields.flag("symmetric", not minimum), minimum=minimum)
