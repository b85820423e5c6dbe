"""Block quantisation with scales of least squared error, in NumPy.

A scale of ``max / 7`` fits only the largest weight of a block. Here several initial scales per block are
tried. For the integers of each, the scale of least squared error is ``<w, q> / <q, q>``; the scale with the
smallest block error after rounding to FP16 is kept. ``make_qx_quants`` in
https://github.com/ggml-org/ggml/blob/master/src/ggml-quants.c uses the same idea.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CheckpointError, OptionError
from heterollm.kernels.formats.quantized_tensor import QuantizedTensor
from heterollm.kernels.formats.stepped_scales import LARGEST_MULTIPLE, choose_steps, nearest_multiples
from heterollm.kernels.formats.tensor_scale import largest_weight, scale_of_largest, tensor_codes
from heterollm.kernels.ops import ScaleKind

QUANTIZER_VERSION = 1
"""Part of every cache key; raise it when equal weights would give other codes or scales."""

STEPPED_VERSION = 1
"""The same for stepped scales, in the keys of such weights only."""

MINIMUM_BLOCK = 16
"""Smallest block of MatMulNBits."""

BATCH_BYTES = 256 * 1024
"""Float32 weights per batch; a batch and its scratch copy fit a core's L2 cache."""

LARGEST_SCALE = float(np.finfo(np.float16).max)
SMALLEST_SCALE = float(np.finfo(np.float16).smallest_subnormal)

SYMMETRIC_REACH: dict[int, tuple[float, ...]] = {4: (7.0, 7.6, 8.2, 8.8, 9.6), 8: (127.0,)}
"""Candidate codes for the largest magnitude of a block, on the longer, negative side.

The first is plain scaling by the maximum; values above 8 clip the largest weights.
"""

ASYMMETRIC_SHRINK: dict[int, tuple[float, ...]] = {4: (1.0, 0.95, 0.9, 0.84), 8: (1.0,)}
"""Fractions of the block's range that the codes span."""


@dataclass(frozen=True, slots=True)
class ScaleGrid:
    """Scale, lowest and highest step of every block of a batch."""

    scale: NDArray[np.float32]
    low: NDArray[np.float32] | np.float32
    high: NDArray[np.float32] | np.float32


def effective_block(columns: int, block: int) -> int:
    """Return the largest power of two from 16 to ``block`` that divides ``columns``.

    Raises:
        OptionError: ``block`` is no power of two of at least 16, or no such power divides ``columns``.
    """
    _check_block(block)
    candidate = block
    while candidate >= MINIMUM_BLOCK:
        if columns % candidate == 0:
            return candidate
        candidate //= 2
    raise OptionError(
        f"A weight with {columns} inputs cannot be quantised in blocks of {MINIMUM_BLOCK} to {block}: "
        "none of these powers of two divides it.",
        fix="Use precision fp16.",
    )


def quantize(
    weight: NDArray[np.float32],
    *,
    bits: Literal[4, 8],
    block: int,
    symmetric: bool = True,
    scale_kind: ScaleKind = "free",
    tensor_scale: float | None = None,
) -> QuantizedTensor:
    """Quantise a float32 weight ``[n, k]`` in blocks of ``block`` inputs.

    The squared error of a block is at most that of scaling by its maximum, unless its scale is below FP16's
    normal range. Scales can be negative: codes have one more step below zero than above, and the sign puts
    that step on the side of the largest weight.

    Args:
        weight: Finite values ``[n, k]``.
        bits: 4 or 8.
        block: A power of two of at least 16 that divides ``k``.
        symmetric: Whether the zero point is the middle code instead of a stored one per block.
        scale_kind: ``stepped`` for scales of which each is 1 to 16 times one positive number of its row, and
            16 occurs, with the least squared error under this constraint (4 symmetric bits only); ``tensor``
            for one positive scale (8 symmetric bits only).
        tensor_scale: That one scale, if ``weight`` is part of a tensor; default that of ``weight``.

    Raises:
        OptionError: ``bits`` or ``block`` is not legal for this shape, or ``scale_kind`` for this format.
        CheckpointError: A value is NaN or infinite, or too large for an FP16 scale.
    """
    rows, columns = weight.shape
    if bits not in SYMMETRIC_REACH:
        raise OptionError(f"{bits}-bit weights are not supported.", fix="Use 4 or 8 bits.")
    _check_block(block)
    if columns % block:
        raise OptionError(f"A weight with {columns} inputs cannot be quantised in blocks of {block}.")
    if scale_kind == "stepped":
        if bits != 4 or not symmetric:
            raise OptionError("Stepped scales are for symmetric weights of 4 bits only.")
        return _quantize_stepped(weight, block)
    if scale_kind == "tensor":
        if bits != 8 or not symmetric:
            raise OptionError("One scale for a tensor is for symmetric weights of 8 bits only.")
        scale = scale_of_largest(largest_weight(weight)) if tensor_scale is None else tensor_scale
        same = np.full((rows, columns // block), scale, np.float16)
        return QuantizedTensor(tensor_codes(weight, scale, block), same, None, 8, block, "tensor")
    blocks = np.ascontiguousarray(weight, np.float32).reshape(-1, block)
    codes = np.empty((blocks.shape[0], block * bits // 8), np.uint8)
    scales = np.empty(blocks.shape[0], np.float16)
    zeros = np.empty(0 if symmetric else blocks.shape[0], np.uint8)
    for batch, values, steps in _batches(blocks):
        grid = _symmetric_grid(values, steps, bits) if symmetric else _asymmetric_grid(values, steps, bits)
        _round_to_steps(values, grid, steps)
        steps -= grid.low
        codes[batch] = _pack(steps.astype(np.uint8), bits).T
        scales[batch] = grid.scale
        if not symmetric:
            zeros[batch] = -grid.low
    per_row = columns // block
    return QuantizedTensor(
        codes.reshape(rows, per_row, -1),
        scales.reshape(rows, per_row),
        None if symmetric else _pack_zero_points(zeros.reshape(rows, per_row), bits),
        bits,
        block,
    )


def _quantize_stepped(weight: NDArray[np.float32], block: int) -> QuantizedTensor:
    """Quantise in batches of whole rows, which share a step."""
    rows, columns = weight.shape
    per_row = columns // block
    codes = np.empty((rows, per_row, block // 2), np.uint8)
    scales = np.empty((rows, per_row), np.float16)
    at_once = max(1, BATCH_BYTES // (4 * columns))
    for start in range(0, rows, at_once):
        batch = slice(start, min(start + at_once, rows))
        values = np.ascontiguousarray(weight[batch].reshape(-1, block).T, np.float32)
        steps = np.empty_like(values)
        grid = _stepped_grid(values, steps, per_row)
        _round_to_steps(values, grid, steps)
        steps -= grid.low
        codes[batch] = _pack(steps.astype(np.uint8), 4).T.reshape(-1, per_row, block // 2)
        scales[batch] = grid.scale.reshape(-1, per_row)
    return QuantizedTensor(codes, scales, None, 4, block, scale_kind="stepped")


def _check_block(block: int) -> None:
    if block < MINIMUM_BLOCK or block & (block - 1):
        raise OptionError(
            f"A block of {block} is not a power of two of at least {MINIMUM_BLOCK}.", fix="Use 32, 64 or 128."
        )


def _batches(blocks: NDArray[np.float32]) -> Iterator[tuple[slice, NDArray[np.float32], NDArray[np.float32]]]:
    """Yield batches of ``[count, block]`` as ``(slice of blocks, values [block, batch], scratch)``."""
    # With the blocks on the inner axis, NumPy sums and scales whole vectors instead of 32 elements at a time.
    count, block = blocks.shape
    size = max(1, min(count, BATCH_BYTES // (4 * block)))
    values = np.empty((block, size), np.float32)
    scratch = np.empty_like(values)
    for start in range(0, count, size):
        batch = slice(start, min(start + size, count))
        taken = batch.stop - start
        np.copyto(values[:, :taken], blocks[batch].T)
        yield batch, values[:, :taken], scratch[:, :taken]


def _symmetric_grid(values: NDArray[np.float32], steps: NDArray[np.float32], bits: int) -> ScaleGrid:
    highest, lowest = values.max(axis=0), values.min(axis=0)
    extreme = np.where(highest >= -lowest, highest, lowest)
    half = 1 << (bits - 1)
    _check_range(extreme, half - 1)
    low, high = np.float32(-half), np.float32(half - 1)
    return _best_grid(
        values, steps, [ScaleGrid(_to_scale(extreme / -reach), low, high) for reach in SYMMETRIC_REACH[bits]]
    )


def _stepped_grid(values: NDArray[np.float32], steps: NDArray[np.float32], per_row: int) -> ScaleGrid:
    """Choose each row's step by the free scales, then the best of three multiples for each block."""
    extreme = np.abs(values).max(axis=0)
    low, high = np.float32(-8), np.float32(7)
    _check_range(extreme, 7)
    free = _best_grid(
        values, steps, [ScaleGrid(_to_scale(extreme / reach), low, high) for reach in SYMMETRIC_REACH[4]]
    )
    _round_to_steps(values, free, steps)
    squares = np.einsum("ij,ij->j", steps, steps).reshape(-1, per_row)
    free_scales = free.scale.reshape(-1, per_row)
    step = choose_steps(free_scales, squares)
    nearest = nearest_multiples(free_scales, step)
    largest = nearest == LARGEST_MULTIPLE
    best = np.full(nearest.size, np.inf, np.float32)
    scale = np.empty_like(best)
    for change in (0, -1, 1):
        # The row's largest multiple must stay.
        multiples = np.where(largest, nearest, np.clip(nearest + change, 1, LARGEST_MULTIPLE))
        candidate = (multiples * step[:, None]).reshape(-1)
        _round_to_steps(values, ScaleGrid(candidate, low, high), steps)
        product = np.einsum("ij,ij->j", values, steps)
        square = np.einsum("ij,ij->j", steps, steps)
        error = candidate * (candidate * square - 2 * product)
        better = error < best
        np.copyto(best, error, where=better)
        np.copyto(scale, candidate, where=better)
    return ScaleGrid(scale, low, high)


def _asymmetric_grid(values: NDArray[np.float32], steps: NDArray[np.float32], bits: int) -> ScaleGrid:
    highest, lowest = np.maximum(values.max(axis=0), 0), np.minimum(values.min(axis=0), 0)
    levels = (1 << bits) - 1
    _check_range(np.maximum(highest, -lowest), levels // 2)
    candidates = []
    for shrink in ASYMMETRIC_SHRINK[bits]:
        scale = _to_scale((highest - lowest) * (shrink / levels))
        low = np.clip(np.rint(lowest * shrink / scale), -levels, 0)
        candidates.append(ScaleGrid(scale, low, low + levels))
    return _best_grid(values, steps, candidates)


def _best_grid(
    values: NDArray[np.float32], steps: NDArray[np.float32], candidates: list[ScaleGrid]
) -> ScaleGrid:
    """Refit the scale of each candidate to its integers, and keep the best of each block."""
    best = np.full(values.shape[1], np.inf, np.float32)
    scale = np.empty_like(best)
    low = np.empty_like(best)
    for grid in candidates:
        _round_to_steps(values, grid, steps)
        product = np.einsum("ij,ij->j", values, steps)
        square = np.einsum("ij,ij->j", steps, steps)
        refitted = _to_scale(product / np.maximum(square, 1))
        # The squared error less <w, w>, which all candidates share.
        error = refitted * (refitted * square - 2 * product)
        better = error < best
        np.copyto(best, error, where=better)
        np.copyto(scale, refitted, where=better)
        np.copyto(low, grid.low, where=better)
    first = candidates[0]
    if isinstance(first.low, np.float32):
        return ScaleGrid(scale, first.low, first.high)
    return ScaleGrid(scale, low, low + (first.high - first.low))


def _round_to_steps(values: NDArray[np.float32], grid: ScaleGrid, steps: NDArray[np.float32]) -> None:
    """Write each value as the nearest legal number of scale steps to ``steps``."""
    np.multiply(values, 1 / grid.scale, out=steps)
    np.rint(steps, out=steps)
    np.clip(steps, grid.low, grid.high, out=steps)


def _to_scale(scale: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to FP16, but never to zero, so that the scale can divide."""
    magnitude = np.clip(np.abs(scale), SMALLEST_SCALE, LARGEST_SCALE).astype(np.float16)
    return np.copysign(magnitude.astype(np.float32), scale)


def _check_range(extreme: NDArray[np.float32], steps: int) -> None:
    largest = float(np.abs(extreme).max(initial=0.0))
    if not largest <= LARGEST_SCALE * steps:
        raise CheckpointError(
            f"A weight of magnitude {largest:g} cannot be quantised: its FP16 scale would overflow.",
            fix="The checkpoint is damaged, or was not trained as a language model.",
        )


def _pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Pack codes along the first axis: two nibbles per byte, the even one low."""
    if bits == 8:
        return codes
    packed = np.left_shift(codes[1::2], 4, dtype=np.uint8)
    packed |= codes[0::2]
    return packed


def _pack_zero_points(zeros: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    if bits == 4 and zeros.shape[1] % 2:
        zeros = np.pad(zeros, ((0, 0), (0, 1)))
    return np.ascontiguousarray(_pack(zeros.T, bits).T)
