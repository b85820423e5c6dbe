"""Legal graph forms of a shard by its shape and length; backends choose among them."""

from __future__ import annotations

from heterollm.kernels.npu.protocol import K_SPLIT_COLUMNS, TILE_OF_INTEGERS, TILE_TOKENS, GraphForm
from heterollm.kernels.npu.shapes import (
    AttentionShape,
    ExpertsShape,
    FfnShape,
    GraphShape,
    LinearShape,
    ScoresShape,
    WeightShape,
)

FUSED_FORMS: frozenset[GraphForm] = frozenset(
    {*("matmul_nbits", "k_chunked", "integer"), *("ffn", "ffn_k_chunked", "ffn_integer")}
)
"""Forms of graphs with a norm of the residual stream, all for rows of tokens and weights in blocks."""

SHARED_TILE_TOKENS = 32
"""Hexagon pads attention and scores to tiles of 32 tokens."""


def every_form(shape: GraphShape, length: int, floats: tuple[GraphForm, ...]) -> tuple[GraphForm, ...]:
    """Return the forms for a backend that runs them all, the default first.

    Args:
        shape: Shape of the graph.
        length: Tokens of one run.
        floats: The plain forms of a linear with float weights.
    """
    if isinstance(shape, ScoresShape | AttentionShape):
        return shared_forms(shape, length)
    if isinstance(shape, ExpertsShape):
        return experts_forms(every_form(shape.one, length, floats))
    rounded, ffn = shape.integer_inputs, isinstance(shape, FfnShape)
    plain: tuple[GraphForm, ...]
    if shape.weight.scales == "tensor":
        return fused_forms(shape, integer_forms(shape, length))
    if not shape.weight.quantized:
        plain = () if rounded else ("ffn", "ffn_weight_first") if ffn else floats
    elif ffn:
        plain = ("ffn_int8",) if rounded else ("ffn",)
    else:
        plain = ("matmul_nbits_int8",) if rounded else ("matmul_nbits",)
    return fused_forms(shape, plain + reshaped_forms(shape, length) + integer_forms(shape, length))


def hexagon_forms(shape: GraphShape, length: int, *, takes_4_bits: bool = True) -> tuple[GraphForm, ...]:
    """Return the legal forms on a Hexagon with float16, the default first.

    Weight first leads: at 5 to 32 tokens the compiler lays activation first out in 265 memory blocks and
    weight first in 41 (512 x 512). It takes up to 7.7 times as long to emulate, which says nothing of
    silicon.

    QNN fuses a sigmoid into an activation-first product before it, at NMSE 1.4e-5 (measured on the
    emulator), far past the gate. SiLU between float weights therefore has weight-first forms only.
    """
    if isinstance(shape, ScoresShape | AttentionShape):
        return shared_forms(shape, length)
    if isinstance(shape, ExpertsShape):
        return experts_forms(hexagon_forms(shape.one, length, takes_4_bits=takes_4_bits))
    weight = shape.weight
    # MatMulNBits on HTP has float activations only.
    if weight.bits == 32 or shape.integer_inputs:
        return ()
    integer = integer_forms(shape, length)
    if weight.scales == "tensor" or (weight.quantized and not takes_4_bits):
        return fused_forms(shape, integer)
    plain: tuple[GraphForm, ...]
    if isinstance(shape, LinearShape):
        plain = ("matmul_nbits",) if weight.quantized else ("weight_first", "activation_first")
    elif weight.quantized:
        plain = ("ffn",)
    else:
        plain = ("ffn_weight_first",) if shape.activation == "silu" else ("ffn_weight_first", "ffn")
    return fused_forms(shape, plain + reshaped_forms(shape, length) + integer)


def fused_forms(shape: WeightShape, forms: tuple[GraphForm, ...]) -> tuple[GraphForm, ...]:
    """Return those of some forms in which a graph can have a norm of the residual stream, if it has one."""
    if not shape.normed:
        return forms
    return tuple(form for form in forms if shape.weight.in_blocks and form in FUSED_FORMS)


def shared_forms(shape: ScoresShape | AttentionShape, length: int) -> tuple[GraphForm, ...]:
    """Return the legal forms of attention, or of its scores, of any sizes."""
    if length % SHARED_TILE_TOKENS:
        return ()
    return ("scores",) if isinstance(shape, ScoresShape) else ("attention",)


def experts_forms(forms: tuple[GraphForm, ...]) -> tuple[GraphForm, ...]:
    """Return the legal forms of a group from those of one expert: experts have no calibrated ranges."""
    return tuple(form for form in forms if form not in TILE_OF_INTEGERS)


def integer_forms(shape: WeightShape, length: int) -> tuple[GraphForm, ...]:
    """Return the legal forms with calibrated ranges.

    Weights with one scale for a tensor have no other forms: their activations are to have 8 bits, or 16 where
    the calibration says so. Their ffns have no forms: 8 bits within one graph would not be enough.
    """
    scales, linear = shape.weight.scales, isinstance(shape, LinearShape)
    forms: tuple[GraphForm, ...] = ()
    if scales == "stepped" and linear:
        forms = ("integer",)
    elif scales == "stepped" and isinstance(shape, FfnShape) and shape.activation == "silu" and shape.gated:
        forms = ("ffn_integer",)
    elif scales == "tensor" and linear:
        forms = ("static_int8", "integer")
    if shape.integer_inputs:
        return ()
    return tuple(form for form in forms if length % TILE_OF_INTEGERS[form] == 0)


def reshaped_forms(shape: WeightShape, length: int) -> tuple[GraphForm, ...]:
    """Return the forms beside the plain ones, for any backend: the k-split of an ffn is one of down."""
    weight, rounded = shape.weight, shape.integer_inputs
    if rounded and not weight.quantized:
        return ()
    # A k-split takes whole pairs of blocks: the 4-bit zero points of a pair share a byte.
    inputs = shape.width if isinstance(shape, FfnShape) else shape.columns
    splits = inputs > K_SPLIT_COLUMNS and 2 * weight.block <= K_SPLIT_COLUMNS
    if isinstance(shape, FfnShape):
        ffn: GraphForm = "ffn_k_chunked_int8" if rounded else "ffn_k_chunked"
        return (ffn,) if splits else ()
    linear: GraphForm = "k_chunked_int8" if rounded else "k_chunked"
    forms: list[GraphForm] = []
    if not weight.quantized:
        forms.append("conv_1x1")
        if length >= 2 * TILE_TOKENS and length % TILE_TOKENS == 0:
            forms.append("token_tiles")
    return (*forms, linear) if splits else tuple(forms)
