"""Reads from ``config.json`` the number formats of weights that a checkpoint stores quantised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from msgspec import structs

from heterollm.base import OptionError, UnsupportedModelError
from heterollm.kernels.formats import effective_block
from heterollm.kernels.ops import Group, WeightFormat
from heterollm.model.blocks import LAYER_GROUPS
from heterollm.model.families import unsupported
from heterollm.model.fields import FOREIGN_METHODS, QUANTIZATION_FIELDS
from heterollm.model.json_fields import JsonFields

FIX_FOREIGN: Final = "Take the checkpoint that it was made from, or a GGUF, GPTQ or AWQ file of it."

BITNET_VALUES: Final = {
    "linear_class": ("bitlinear", "autobitlinear"),
    "quantization_mode": ("offline", "online"),
}
"""Values of fields of BitNet, the default first."""

LARGEST_BLOCK = 128
"""Longer stored blocks are cut into such with equal scales."""


@dataclass(frozen=True, slots=True)
class StoredFormats:
    """The canonical formats that hold the weights of a checkpoint best.

    Args:
        layers: Format of each group that layers have; blocks that do not divide the inputs of one are halved.
        head: Format of embedding and head; None if the checkpoint stores both as floats.
    """

    layers: Mapping[str, WeightFormat]
    head: WeightFormat | None

    def of_group(self, group: Group, columns: int) -> WeightFormat:
        """Return the format of a group with some inputs; the head's is also the embedding's."""
        weight = self.head if group == "head" else self.layers.get(group)
        if weight is None:  # floats of the head; the check of tensors refuses a file that lacks other groups
            weight = WeightFormat(8, max(own.block for own in self.layers.values()))
        return structs.replace(weight, block=effective_block(columns, weight.block))


def read_stored_formats(fields: JsonFields) -> StoredFormats | None:
    """Return the formats in ``quantization_config``; None without one.

    Raises:
        CheckpointError: A field has the wrong type or an impossible value.
        UnsupportedModelError: The method, or a variant of it, is not supported.
    """
    if fields.get("quantization_config") is None:
        return None
    stated = normalized_quantization(fields.section("quantization_config"))
    own = JsonFields(stated, f"{fields.where}, quantization_config")
    method = own.get("quant_method")
    if method == "gguf":
        head, layers = own.section("head"), own.section("layers")
        if not layers or not set(layers) <= set(LAYER_GROUPS):
            raise own.fail("layers", f"formats of {', '.join(LAYER_GROUPS)}")
        formats = {group: _format(JsonFields(layers, own.where).section(group), own) for group in layers}
        return StoredFormats(formats, _format(head, own) if head else None)
    check_quantization(stated, own.where)
    if method == "mxfp4":
        return StoredFormats({"experts": WeightFormat(8, 32)}, None)
    if method == "bitnet":
        for name, known in BITNET_VALUES.items():
            if own.get(name) not in known:
                raise unsupported(f"BitNet with {name} {own.get(name)!r:.40}")
        return _alike(WeightFormat(4, LARGEST_BLOCK))
    if method == "gptq":
        if own.get("checkpoint_format") not in ("gptq", "gptq_v2"):
            raise unsupported(f"GPTQ in the layout {own.get('checkpoint_format')!r:.40}")
        in_order = not own.flag("desc_act", False)
        return _alike(_grouped(own, "bits", own.flag("sym", True), in_order=in_order))
    if method == "awq":
        if own.get("version") != "gemm":
            raise unsupported(f"AWQ in the layout {own.get('version')!r:.40}")
        return _alike(_grouped(own, "bits", not own.flag("zero_point", True), in_order=True))
    return _alike(_compressed(own))


def normalized_quantization(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``quantization_config`` with enumerated values in small letters, and older names resolved.

    transformers compares the formats of GPTQ and AWQ, and compressed-tensors its types and strategies,
    without regard to case; writers of methods vary, too.

    Args:
        stated: The section of ``config.json``.
    """
    found = {**stated, "quant_method": _small(stated.get("quant_method"))}
    if found["quant_method"] is None and (stated.get("load_in_4bit") or stated.get("load_in_8bit")):
        found["quant_method"] = "bitsandbytes"  # as transformers derives
    if found["quant_method"] == "gptq":
        # The older name precedes the newer one, in transformers, too.
        layout = stated.get("checkpoint_format") or stated.get("format") or "gptq"
        found["checkpoint_format"] = _small(layout)
        found.pop("format", None)
    elif found["quant_method"] == "awq":
        found["version"] = _small(stated.get("version") or stated.get("format") or "gemm")
        found["backend"] = _small(stated.get("backend"))
        found.setdefault("bits", 4)
        found.pop("format", None)
    elif found["quant_method"] == "bitnet":
        found |= {name: _small(stated.get(name, known[0])) for name, known in BITNET_VALUES.items()}
    elif found["quant_method"] == "compressed-tensors":
        found["format"] = _small(stated.get("format"))
    return found


def check_quantization(stated: Mapping[str, Any], where: str) -> tuple[str, ...]:
    """Refuse a method that is not read, and a field that would be computed wrongly.

    Args:
        stated: The section of ``config.json``, normalised.
        where: Its name, for messages.

    Returns:
        A note about fields that no table has.

    Raises:
        UnsupportedModelError: The method or a field is not supported.
    """
    method = stated.get("quant_method")
    table = QUANTIZATION_FIELDS.get(method) if isinstance(method, str) else None
    if table is None:
        known = FOREIGN_METHODS.get(method, "") if isinstance(method, str) else ""
        raise UnsupportedModelError(
            f"{where}: quant_method = {method!r:.80} is not supported{known and ': '}{known}.",
            fix=FIX_FOREIGN,
        )
    refused, notes = table.examine(stated, where)
    if refused:
        raise UnsupportedModelError(refused[0], fix=FIX_FOREIGN)
    return notes


def _small(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


def _alike(weight: WeightFormat) -> StoredFormats:
    return StoredFormats(dict.fromkeys(LAYER_GROUPS, weight), None)


def _compressed(own: JsonFields) -> WeightFormat:
    """Return the format of a checkpoint whose linears are all quantised alike, without their inputs."""
    groups = list(own.section("config_groups").values())
    group = groups[0] if groups and isinstance(groups[0], dict) else {}
    weights = JsonFields(group, own.where).section("weights")
    if len(groups) != 1:
        raise unsupported(f"compressed-tensors with {len(groups)} groups of linears, instead of one,")
    for layout in (own.get("format"), _small(group.get("format")) or "pack-quantized"):
        if layout != "pack-quantized":
            raise unsupported(f"compressed-tensors in format {layout!r:.40}, instead of pack-quantized,")
    if _small(weights.get("type", "int")) != "int":
        raise unsupported(f"compressed-tensors with weights of type {weights.get('type')!r:.40}")
    if _small(weights.get("strategy")) not in (None, "group", "channel"):
        raise unsupported(f"compressed-tensors with strategy {weights.get('strategy')!r:.40}")
    fields = JsonFields(weights, f"{own.where}, weights")
    in_order = _small(fields.get("actorder")) not in (True, "group", "dynamic")
    return _grouped(fields, "num_bits", fields.flag("symmetric", True), in_order=in_order)


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
