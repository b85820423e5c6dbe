"""Packs linear weights into the GPU's layout (`kernels/gpu/opencl/linear.h`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from heterollm.base import KernelError, round_up
from heterollm.kernels.formats import LinearWeight, QuantizedTensor, weight_format
from heterollm.kernels.gpu.memory import aligned_empty
from heterollm.kernels.ops import WeightFormat

PackedArrays: TypeAlias = tuple[NDArray[Any], NDArray[Any] | None, NDArray[Any] | None]
"""Weights, scales, and zero points or minimums in tiles of 64 rows. Floats have no scales, symmetric codes no
zeros."""

COLUMNS_MULTIPLE: Final = 16
"""The inputs of a linear must be a multiple of this."""

BLOCKS: Final = (16, 32, 64, 128)
"""Scale blocks that the kernels support."""


def codes(weight: LinearWeight) -> NDArray[Any]:
    """Return a weight's codes, or its floats, ``[n, ...]``."""
    return weight.codes if isinstance(weight, QuantizedTensor) else weight


def check_members(members: Sequence[LinearWeight]) -> tuple[WeightFormat, int]:
    """Return the common number format and inputs ``k`` of a group's members.

    Raises:
        KernelError: They differ, or the kernels do not support them.
    """
    if not members:
        raise KernelError("A group needs at least one linear layer.")
    formats = {weight_format(member).layout for member in members}
    widths = {
        member.columns if isinstance(member, QuantizedTensor) else int(member.shape[1]) for member in members
    }
    if len(formats) != 1 or len(widths) != 1:
        raise KernelError(
            f"The linears of a group differ: formats {sorted(map(str, formats))}, inputs {sorted(widths)}."
        )
    number_format, columns = formats.pop(), widths.pop()
    if columns < 1 or columns % COLUMNS_MULTIPLE or not all(codes(member).shape[0] for member in members):
        raise KernelError(
            f"Linears with {columns} inputs and {[codes(member).shape[0] for member in members]} output "
            f"rows cannot be computed: inputs must be a multiple of {COLUMNS_MULTIPLE}, rows at least one."
        )
    if number_format.quantized and number_format.block not in BLOCKS:
        raise KernelError(f"A quantisation block of {number_format.block} is not one of {BLOCKS}.")
    return number_format, columns


def packed_arrays(number_format: WeightFormat, columns: int, tiles: int) -> PackedArrays:
    """Return uninitialised arrays for a number of row tiles."""
    if not number_format.quantized:
        floats = np.dtype(np.float32 if number_format.bits == 32 else np.float16)
        return aligned_empty((tiles, columns, 64), floats), None, None
    blocks = tiles, columns // number_format.block, 64
    kind = np.dtype(np.float16 if number_format.minimum else np.uint8)
    zeros = None if number_format.symmetric else aligned_empty(blocks, kind)
    words = aligned_empty((tiles, columns * number_format.bits // 32, 64), np.uint32)
    return words, aligned_empty(blocks, np.float16), zeros


def packed_bytes(number_format: WeightFormat, member_rows: Sequence[int], columns: int) -> int:
    """Return the size of packed members, as :func:`packed_arrays` makes them."""
    rows = sum(round_up(own, 64) for own in member_rows)
    blocks = rows * columns // number_format.block if number_format.quantized else 0
    zeros = 0 if number_format.symmetric else blocks * (2 if number_format.minimum else 1)
    return rows * columns * number_format.bits // 8 + 2 * blocks + zeros


def array_bytes(arrays: PackedArrays) -> int:
    """Return the size of packed weights."""
    return sum(array.nbytes for array in arrays if array is not None)


def pack_members(members: Sequence[LinearWeight], arrays: PackedArrays) -> None:
    """Write members into their row tiles, one behind the other."""
    first = 0
    for member in members:
        count = round_up(codes(member).shape[0], 64) // 64
        pack_member(member, first, count, *arrays)
        first += count


def pack_member(
    member: LinearWeight,
    first: int,
    count: int,
    weights: NDArray[Any],
    scales: NDArray[Any] | None,
    zeros: NDArray[Any] | None,
) -> None:
    """Write one member into its row tiles.

    Args:
        member: ``[n, k]``.
        first: Its first row tile.
        count: Its row tiles.
        weights: ``[tiles, words of k, 64]`` of all members.
        scales: float16 ``[tiles, k / block, 64]``, or None for floats.
        zeros: uint8 zero points or float16 minimums of the same shape, or None without.
    """
    if isinstance(member, QuantizedTensor):
        packed = np.ascontiguousarray(member.codes).reshape(member.rows, -1)
        _interleave(packed.view(np.uint32), weights[first : first + count])
        if scales is not None:
            _interleave(member.scales, scales[first : first + count])
        if zeros is not None:
            own = member.unpacked_zero_points() if member.minimums is None else member.minimums
            _interleave(own, zeros[first : first + count])
    else:
        _interleave(member, weights[first : first + count])


def _interleave(source: NDArray[Any], target: NDArray[Any]) -> None:
    """Write ``source [n, depth]`` into ``target [ceil(n / 64), depth, 64]``, padded with zeros."""
    whole, rest = divmod(source.shape[0], 64)
    target[:whole] = source[: whole * 64].reshape(whole, 64, source.shape[1]).transpose(0, 2, 1)
    if rest:
        target[whole] = 0
        target[whole, :, :rest] = source[whole * 64 :].T
