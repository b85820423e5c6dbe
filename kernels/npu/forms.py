"""Legal graph forms of a shard by its number format and shape; backends choose among them.

The parameters are those of :meth:`heterollm.kernels.npu.NpuBackend.forms` and ``ffn_forms``; ``floats`` are
the plain forms of float weights, the default first.
"""

from __future__ import annotations

from heterollm.kernels.npu.protocol import K_SPLIT_COLUMNS, TILE_OF_INTEGERS, TILE_TOKENS, GraphForm
from heterollm.kernels.ops import Activation, WeightFormat

__all__ = ["every_ffn_form", "every_form", "integer_forms", "k_split_ffn_forms", "reshaped_forms"]


def every_form(
    weight: WeightFormat,
    floats: tuple[GraphForm, ...],
    *,
    columns: int,
    length: int,
    integer_inputs: bool = False,
) -> tuple[GraphForm, ...]:
    """Return the forms of a linear shard for a backend that runs them all, except integer ones."""
    plain = floats
    if weight.scales == "tensor":
        return ()
    if weight.quantized:
        plain = ("matmul_nbits_int8",) if integer_inputs else ("matmul_nbits",)
    elif integer_inputs:
        return ()
    return plain + reshaped_forms(weight, columns=columns, length=length, integer_inputs=integer_inputs)


def every_ffn_form(weight: WeightFormat, *, width: int, integer_inputs: bool) -> tuple[GraphForm, ...]:
    """Return the forms of an ffn shard for a backend that runs them all, except integer ones."""
    plain: tuple[GraphForm, ...] = ("ffn", "ffn_weight_first")
    if weight.scales == "tensor":
        return ()
    if weight.quantized:
        plain = ("ffn_int8",) if integer_inputs else ("ffn",)
    elif integer_inputs:
        return ()
    return plain + k_split_ffn_forms(weight, width=width, integer_inputs=integer_inputs)


def integer_forms(
    weight: WeightFormat, *, length: int, integer_inputs: bool = False, activation: Activation | None = None
) -> tuple[GraphForm, ...]:
    """Return the legal forms with calibrated ranges of a linear shard, or with an activation of an ffn.

    Weights with one scale for a tensor have no other forms: their activations are to have 8 bits, or 16 where
    the calibration says so. Their ffns have no forms: 8 bits within one graph would not be enough.
    """
    forms: tuple[GraphForm, ...] = ()
    if weight.scales == "stepped" and activation in (None, "silu"):
        forms = ("integer",) if activation is None else ("ffn_integer",)
    elif weight.scales == "tensor" and activation is None:
        forms = ("static_int8", "integer")
    if integer_inputs:
        return ()
    return tuple(form for form in forms if length % TILE_OF_INTEGERS[form] == 0)


def reshaped_forms(
    weight: WeightFormat, *, columns: int, length: int, integer_inputs: bool = False
) -> tuple[GraphForm, ...]:
    """Return the forms of a linear shard beside the plain ones, for any backend."""
    if weight.quantized:
        # A k-split takes whole pairs of blocks: the 4-bit zero points of a pair share a byte.
        if columns <= K_SPLIT_COLUMNS or 2 * weight.block > K_SPLIT_COLUMNS:
            return ()
        return ("k_chunked_int8",) if integer_inputs else ("k_chunked",)
    if integer_inputs:
        return ()
    forms: list[GraphForm] = ["conv_1x1"]
    if length >= 2 * TILE_TOKENS and length % TILE_TOKENS == 0:
        forms.append("token_tiles")
    if columns > K_SPLIT_COLUMNS:
        forms.append("k_chunked")
    return tuple(forms)


def k_split_ffn_forms(
    weight: WeightFormat, *, width: int, integer_inputs: bool = False
) -> tuple[GraphForm, ...]:
    """Return the legal ffn forms with a k-split of the last linear."""
    if width <= K_SPLIT_COLUMNS or 2 * weight.block > K_SPLIT_COLUMNS:
        return ()
    if integer_inputs:
        return ("ffn_k_chunked_int8",) if weight.quantized else ()
    return ("ffn_k_chunked",)
