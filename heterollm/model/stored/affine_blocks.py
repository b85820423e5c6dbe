"""Weights in blocks of integers with a scale each, and perhaps a float minimum, as files store them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.formats import QuantizedTensor, quantize
from heterollm.kernels.ops import WeightFormat

__all__ = ["STORED_VERSION", "AffineBlocks", "canonical"]

STORED_VERSION: Final = 1
"""Part of the cache key of stored weights; raise it when equal files would give other codes or scales."""

MOST_MULTIPLES: Final = 64
"""Largest number of 8-bit steps that replaces one step of a stored code."""


@dataclass(frozen=True, slots=True, eq=False)
class AffineBlocks:
    """A weight ``[n, k]`` whose element ``(i, j)`` is ``codes[i, j] * scales[i, g] + minimums[i, g]``.

    ``g`` is ``j // block``. Zero points are part of the codes already.

    Args:
        codes: int8 ``[n, k]``.
        scales: float32 ``[n, k/block]``.
        minimums: float32 ``[n, k/block]``; None for zeros.
        block: Inputs that share a scale.
    """

    codes: NDArray[np.int8]
    scales: NDArray[np.float32]
    minimums: NDArray[np.float32] | None
    block: int

    def values(self) -> NDArray[np.float32]:
        """Return the weight, float32 ``[n, k]``."""
        rows, columns = self.codes.shape
        values = self.codes.astype(np.float32).reshape(rows, -1, self.block)
        with np.errstate(invalid="ignore", over="ignore"):  # damaged scales; the caller checks the values
            values *= self.scales[:, :, None]
            if self.minimums is not None:
                values += self.minimums[:, :, None]
        return values.reshape(rows, columns)


def canonical(blocks: AffineBlocks, weight: WeightFormat) -> QuantizedTensor | None:
    """Return finite blocks in a canonical format, with equal values as far as FP16 scales allow.

    Integers stay, and their scales are rounded to FP16. Of a float minimum, 8 symmetric bits hold the nearest
    multiple of the scale that fits step and minimum best.

    Returns:
        None if the format does not suit: its blocks are larger than the stored ones, or it has too few bits.
    """
    if weight.scales != "free" or blocks.block % weight.block:
        return None
    repeats = blocks.block // weight.block
    scales = np.repeat(blocks.scales, repeats, axis=1)
    codes = blocks.codes.reshape(*scales.shape, weight.block)
    if blocks.minimums is not None:
        if weight.bits != 8 or not weight.symmetric:
            return None
        return _nearest_multiples(codes, scales, np.repeat(blocks.minimums, repeats, axis=1))
    low, high = codes.min(axis=2).astype(np.int16), codes.max(axis=2).astype(np.int16)
    half = 1 << (weight.bits - 1)
    zeros = np.full(low.shape, half, np.int16) if weight.symmetric else np.maximum(-low, 0)
    if (low + zeros).min(initial=0) < 0 or max(
        (high + zeros).max(initial=0), zeros.max(initial=0)
    ) >= 2 * half:
        return None
    halves = _to_half(scales)
    if halves is None:
        return None
    packed = _packed((codes + zeros[:, :, None]).astype(np.uint8), weight.bits)
    packed_zeros = None if weight.symmetric else _packed(zeros.astype(np.uint8), weight.bits)
    return QuantizedTensor(packed, halves, packed_zeros, 4 if weight.bits == 4 else 8, weight.block)


def _nearest_multiples(
    codes: NDArray[np.int8], scales: NDArray[np.float32], minimums: NDArray[np.float32]
) -> QuantizedTensor:
    """Return 8-bit codes ``a * code + b`` with the scale and the integers of least error in each block.

    Scale and minimum are rarely multiples of one number, but among the fractions ``scale / a`` one is close
    to a divisor of the minimum.
    """
    block = codes.shape[2]
    values = codes.astype(np.float32) * scales[:, :, None] + minimums[:, :, None]
    plain = quantize(values.reshape(len(values), -1), bits=8, block=block)
    best_scale = plain.scales.astype(np.float32)
    steps = plain.unpacked_codes().reshape(codes.shape).astype(np.int16) - 128
    best = np.square(steps * best_scale[:, :, None] - values, dtype=np.float64).sum(axis=2)
    low, high = codes.min(axis=2).astype(np.float32), codes.max(axis=2).astype(np.float32)
    total = codes.sum(axis=2, dtype=np.int64)
    squares = np.square(codes, dtype=np.int32).sum(axis=2, dtype=np.int64)
    multiple, offset = np.zeros(scales.shape, np.int16), np.zeros(scales.shape, np.int16)
    usable = scales != 0
    for factor in range(1, MOST_MULTIPLES + 1):
        with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
            scale = (scales / factor).astype(np.float16).astype(np.float32)
            shift = np.rint(minimums / scale)
            fits = usable & (factor * low + shift >= -128) & (factor * high + shift <= 127)
            per_code = (scale * factor - scales).astype(np.float64)
            constant = (scale * shift - minimums).astype(np.float64)
            error = per_code**2 * squares + 2 * per_code * constant * total + block * constant**2
            better = fits & np.isfinite(error) & (error < best)
        best[better], best_scale[better] = error[better], scale[better]
        multiple[better], offset[better] = factor, shift[better]
        if not fits.any():
            break
    chosen = (multiple > 0)[:, :, None]
    steps = np.where(chosen, codes * multiple[:, :, None] + offset[:, :, None], steps)
    return QuantizedTensor((steps + 128).astype(np.uint8), best_scale.astype(np.float16), None, 8, block)


def _to_half(scales: NDArray[np.float32]) -> NDArray[np.float16] | None:
    """Return FP16 scales; None if one is beyond their range."""
    with np.errstate(over="ignore", under="ignore"):
        halves = scales.astype(np.float16)
    return halves if np.isfinite(halves).all() else None


def _packed(codes: NDArray[np.uint8], bits: int) -> NDArray[Any]:
    """Pack codes along the last axis: two 4-bit ones per byte, the even one in the low nibble."""
    if bits == 8:
        return codes
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], 1), np.uint8)], axis=-1)
    return codes[..., 0::2] | codes[..., 1::2] << 4
