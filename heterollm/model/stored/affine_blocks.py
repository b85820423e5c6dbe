"""Weights in blocks of integers with a scale each, and perhaps a float minimum, as files store them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.formats import QuantizedTensor
from heterollm.kernels.ops import WeightFormat

STORED_VERSION: Final = 2
"""Part of the cache key of stored weights; raise it when equal files would give other codes or scales."""


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

    def with_columns(self, order: Sequence[int]) -> AffineBlocks:
        """Return the weight with equal runs of columns in another order: for each, where it stands here."""
        if not order:
            return self

        def moved(values: NDArray[Any]) -> NDArray[Any]:
            rows = len(values)
            return values.reshape(rows, len(order), -1)[:, order].reshape(values.shape)

        minimums = None if self.minimums is None else moved(self.minimums)
        return AffineBlocks(moved(self.codes), moved(self.scales), minimums, self.block)


def canonical(blocks: AffineBlocks, weight: WeightFormat) -> QuantizedTensor | None:
    """Return finite blocks in a canonical format, with equal values as far as FP16 scales and minimums allow.

    Integers stay, and scales and minimums are rounded to FP16. A rounded minimum takes up the mean error of
    its block's scale.

    Returns:
        None if the format does not suit: its blocks are larger than the stored ones, it has too few bits, or
        no minimums that the stored blocks have.
    """
    if weight.scales != "free" or blocks.block % weight.block:
        return None
    repeats = blocks.block // weight.block
    scales = np.repeat(blocks.scales, repeats, axis=1)
    codes = blocks.codes.reshape(*scales.shape, weight.block)
    low, high = codes.min(axis=2).astype(np.int16), codes.max(axis=2).astype(np.int16)
    half = 1 << (weight.bits - 1)
    if blocks.minimums is not None:
        if not weight.minimum:
            return None
        zeros = np.zeros(low.shape, np.int16)
    elif weight.symmetric or weight.minimum:
        zeros = np.full(low.shape, half, np.int16)
    else:
        zeros = np.maximum(-low, 0)
    if (low + zeros).min(initial=0) < 0 or max(
        (high + zeros).max(initial=0), zeros.max(initial=0)
    ) >= 2 * half:
        return None
    halves, minimums = _to_half(scales), None
    if weight.minimum and halves is not None:
        wanted = -half * scales
        if blocks.minimums is not None:
            wanted = np.repeat(blocks.minimums, repeats, axis=1)
            wanted = wanted + (scales - halves) * codes.mean(axis=2, dtype=np.float32)
        minimums = _to_half(wanted)
    if halves is None or (weight.minimum and minimums is None):
        return None
    packed = _packed((codes + zeros[:, :, None]).astype(np.uint8), weight.bits)
    packed_zeros = None
    if not weight.symmetric and not weight.minimum:
        packed_zeros = _packed(zeros.astype(np.uint8), weight.bits)
    bits: Literal[4, 8] = 4 if weight.bits == 4 else 8
    return QuantizedTensor(packed, halves, packed_zeros, bits, weight.block, minimums=minimums)


def _to_half(numbers: NDArray[np.float32]) -> NDArray[np.float16] | None:
    """Return numbers in FP16; None if one is beyond its range."""
    with np.errstate(over="ignore", under="ignore"):
        halves = numbers.astype(np.float16)
    return halves if np.isfinite(halves).all() else None


def _packed(codes: NDArray[np.uint8], bits: int) -> NDArray[Any]:
    """Pack codes along the last axis: two 4-bit ones per byte, the even one in the low nibble."""
    if bits == 8:
        return codes
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros((*codes.shape[:-1], 1), np.uint8)], axis=-1)
    return codes[..., 0::2] | codes[..., 1::2] << 4
