"""Which forms a part can be written in, by its number format and shape: what backends offer from."""

from __future__ import annotations

from heterollm.kernels.npu.protocol import CHUNK_COLUMNS, TILE_TOKENS, Form
from heterollm.kernels.ops import WeightFormat

__all__ = ["chunked_block_forms", "every_block_form", "every_form", "reshaped_forms"]


def every_form(
    weight: WeightFormat,
    floats: tuple[Form, ...],
    *,
    columns: int,
    length: int,
    integer_inputs: bool = False,
) -> tuple[Form, ...]:
    """Return the forms of a slice for a backend that runs them all.

    Args:
        weight: Number format of the slice's weight.
        floats: The plain forms of float weights, the one to take where nothing was measured first.
        columns: Inputs ``k``.
        length: Tokens of one run.
        integer_inputs: Whether the inputs must be rounded to int8 for each block of the weight.
    """
    plain = floats
    if weight.quantized:
        plain = ("matmul_nbits_int8",) if integer_inputs else ("matmul_nbits",)
    elif integer_inputs:
        return ()
    return plain + reshaped_forms(weight, columns=columns, length=length, integer_inputs=integer_inputs)


def every_block_form(weight: WeightFormat, *, width: int, integer_inputs: bool) -> tuple[Form, ...]:
    """Return the forms of a feed-forward block for a backend that runs them all.

    Args:
        weight: Number format of its weights.
        width: Intermediate width ``c`` of the part.
        integer_inputs: Whether the inputs must be rounded to int8 for each block of the weights.
    """
    plain: tuple[Form, ...] = ("ffn", "ffn_weight_first")
    if weight.quantized:
        plain = ("ffn_int8",) if integer_inputs else ("ffn",)
    elif integer_inputs:
        return ()
    return plain + chunked_block_forms(weight, width=width, integer_inputs=integer_inputs)


def reshaped_forms(
    weight: WeightFormat, *, columns: int, length: int, integer_inputs: bool = False
) -> tuple[Form, ...]:
    """Return the forms beside the plain ones that a slice's shape allows, whatever the backend.

    Args:
        weight: Number format of the slice's weight.
        columns: Inputs ``k``.
        length: Tokens of one run.
        integer_inputs: Whether the inputs must be rounded to int8 for each block of the weight.
    """
    if weight.quantized:
        # Pieces are whole pairs of blocks: the 4-bit zero points of a pair share a byte.
        if columns <= CHUNK_COLUMNS or 2 * weight.block > CHUNK_COLUMNS:
            return ()
        return ("k_chunked_int8",) if integer_inputs else ("k_chunked",)
    if integer_inputs:
        return ()
    forms: list[Form] = ["conv_1x1"]
    if length >= 2 * TILE_TOKENS and length % TILE_TOKENS == 0:
        forms.append("token_tiles")
    if columns > CHUNK_COLUMNS:
        forms.append("k_chunked")
    return tuple(forms)


def chunked_block_forms(
    weight: WeightFormat, *, width: int, integer_inputs: bool = False
) -> tuple[Form, ...]:
    """Return the forms of a feed-forward block with its last linear in pieces, where there are any.

    Args:
        weight: Number format of its weights.
        width: Inputs ``c`` of the last linear.
        integer_inputs: Whether the inputs must be rounded to int8 for each block of the weights.
    """
    if width <= CHUNK_COLUMNS or 2 * weight.block > CHUNK_COLUMNS:
        return ()
    if integer_inputs:
        return ("ffn_k_chunked_int8",) if weight.quantized else ()
    return ("ffn_k_chunked",)
