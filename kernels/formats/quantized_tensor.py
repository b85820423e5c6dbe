"""The canonical weight: block-quantised integers in the layout of ONNX Runtime's MatMulNBits.

Only this form is cached and hashed; both processors pack their shards from it.
Layout: https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md#com.microsoft.MatMulNBits
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CheckpointError
from heterollm.kernels.ops import ScaleKind, WeightFormat

BITS_OF_DTYPE: dict[np.dtype[Any], Literal[16, 32]] = {np.dtype(np.float16): 16, np.dtype(np.float32): 32}


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A weight ``[n, k]`` as integers with one FP16 scale per block of inputs.

    Element ``(i, j)`` in block ``g = j // block`` is ``(code - zero) * scales[i, g]``, where ``zero`` is
    ``2 ** (bits - 1)`` when symmetric and ``zero_points`` otherwise. With ``minimums`` it is
    ``code * scales[i, g] + minimums[i, g]``.

    Args:
        codes: uint8 ``[n, k/block, block*bits/8]``; with 4 bits the even input is the low nibble.
        scales: float16 ``[n, k/block]``.
        zero_points: uint8 ``[n, ceil(k/block*bits/8)]``, packed like ``codes``; None when symmetric, or with
            minimums.
        bits: 4 or 8.
        block: Inputs that share one scale.
        scale_kind: Kind of the scales; with ``tensor`` all scales of a stored tensor are equal.
        minimums: float16 ``[n, k/block]``; None without.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float16]
    zero_points: NDArray[np.uint8] | None
    bits: Literal[4, 8]
    block: int
    scale_kind: ScaleKind = "free"
    minimums: NDArray[np.float16] | None = None

    @property
    def rows(self) -> int:
        """Output rows ``n``."""
        return int(self.codes.shape[0])

    @property
    def columns(self) -> int:
        """Inputs ``k``."""
        return int(self.codes.shape[1]) * self.block

    @property
    def format(self) -> WeightFormat:
        """The number format."""
        minimum = self.minimums is not None
        symmetric = self.zero_points is None and not minimum
        return WeightFormat(self.bits, self.block, symmetric, self.scale_kind, minimum)

    @property
    def size_bytes(self) -> int:
        """Bytes of codes, scales, and zero points or minimums."""
        arrays = (self.codes, self.scales, self.zero_points, self.minimums)
        return sum(array.nbytes for array in arrays if array is not None)

    def unpacked_codes(self) -> NDArray[np.uint8]:
        """Return the codes, one per byte, ``[n, k]``."""
        flat = self.codes.reshape(self.rows, self.columns * self.bits // 8)
        return flat if self.bits == 8 else _unpack_nibbles(flat)

    def unpacked_zero_points(self) -> NDArray[np.uint8]:
        """Return the zero points of the blocks, one per byte, ``[n, k/block]``."""
        if self.zero_points is None:
            return np.full(self.scales.shape, 1 << (self.bits - 1), np.uint8)
        if self.bits == 8:
            return self.zero_points
        return _unpack_nibbles(self.zero_points)[:, : self.scales.shape[1]]

    def dequantize(self, dtype: type[np.float32 | np.float64] = np.float32) -> NDArray[Any]:
        """Return the dequantised weight ``[n, k]``, exact in float64."""
        values: NDArray[Any] = self.unpacked_codes().astype(dtype).reshape(*self.scales.shape, self.block)
        if self.minimums is None:
            np.subtract(values, self.unpacked_zero_points()[:, :, None], out=values)
        np.multiply(values, self.scales[:, :, None], out=values)
        if self.minimums is not None:
            np.add(values, self.minimums[:, :, None], out=values)
        return values.reshape(self.rows, self.columns)

    def with_minimums(self) -> QuantizedTensor:
        """Return the codes with a minimum for each block, the value of code 0, in place of zero points.

        Raises:
            CheckpointError: A minimum is beyond the range of FP16.
        """
        with np.errstate(over="ignore"):
            minimums = -self.scales * self.unpacked_zero_points().astype(np.float16)
        if not np.isfinite(minimums).all():
            raise CheckpointError(f"A weight is too large for {self.bits} bits with minimums in FP16.")
        return QuantizedTensor(self.codes, self.scales, None, self.bits, self.block, minimums=minimums)


LinearWeight: TypeAlias = QuantizedTensor | NDArray[np.float16] | NDArray[np.float32]
"""A linear weight ``[n, k]`` in any supported format."""


def weight_format(weight: LinearWeight) -> WeightFormat:
    """Return the number format of a weight."""
    if isinstance(weight, QuantizedTensor):
        return weight.format
    return WeightFormat(BITS_OF_DTYPE[weight.dtype])


def take_rows(weight: LinearWeight, ranges: Iterable[tuple[int, int]]) -> LinearWeight:
    """Return the output rows ``[start, stop)`` of each range, stacked in order.

    A single range is a view; several are copied.
    """
    parts = list(ranges)
    if isinstance(weight, QuantizedTensor):
        arrays = (weight.codes, weight.scales, weight.zero_points, weight.minimums)
        codes, scales, zeros, minimums = (None if own is None else _take(own, parts) for own in arrays)
        assert codes is not None
        assert scales is not None
        kind = weight.bits, weight.block, weight.scale_kind
        return QuantizedTensor(codes, scales, zeros, *kind, minimums)
    return _take(weight, parts)


def take_columns(weight: LinearWeight, start: int, stop: int) -> LinearWeight:
    """Return the inputs ``[start, stop)`` of every row, as a view.

    Args:
        weight: ``[n, k]``.
        start: A multiple of the block; of two blocks if 4-bit zero points share a byte.
        stop: A multiple of the block.

    Raises:
        ValueError: The range does not fit the weight or its blocks.
    """
    if not isinstance(weight, QuantizedTensor):
        if not 0 <= start < stop <= weight.shape[1]:
            raise ValueError(f"inputs [{start}, {stop}) do not lie in {weight.shape[1]}")
        return weight[:, start:stop]
    first, last = start // weight.block, stop // weight.block
    zeros, bits = weight.zero_points, weight.bits
    whole = start % weight.block == stop % weight.block == 0 and (zeros is None or first * bits % 8 == 0)
    if not whole or not 0 <= start < stop <= weight.columns:
        raise ValueError(f"inputs [{start}, {stop}) of {weight.columns} are not whole {weight.format} blocks")
    if zeros is not None:
        zeros = zeros[:, first * bits // 8 : -(-last * bits // 8)]
    return QuantizedTensor(
        weight.codes[:, first:last],
        weight.scales[:, first:last],
        zeros,
        bits,
        weight.block,
        weight.scale_kind,
        None if weight.minimums is None else weight.minimums[:, first:last],
    )


def concatenate_rows(weights: Sequence[LinearWeight]) -> LinearWeight:
    """Stack weights of one format and width by their output rows."""
    if len(weights) == 1:
        return weights[0]
    if len({weight_format(weight) for weight in weights}) != 1:
        raise ValueError("weights of different formats cannot be stacked")
    quantized = [weight for weight in weights if isinstance(weight, QuantizedTensor)]
    if not quantized:
        return _stacked([weight for weight in weights if not isinstance(weight, QuantizedTensor)])
    zeros = [weight.zero_points for weight in quantized if weight.zero_points is not None]
    minimums = [weight.minimums for weight in quantized if weight.minimums is not None]
    return QuantizedTensor(
        _stacked([weight.codes for weight in quantized]),
        _stacked([weight.scales for weight in quantized]),
        _stacked(zeros) if zeros else None,
        quantized[0].bits,
        quantized[0].block,
        quantized[0].scale_kind,
        _stacked(minimums) if minimums else None,
    )


def _take(array: NDArray[Any], ranges: list[tuple[int, int]]) -> NDArray[Any]:
    if len(ranges) == 1:
        return array[ranges[0][0] : ranges[0][1]]
    return _stacked([array[start:stop] for start, stop in ranges])


def _stacked(arrays: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Stack arrays by rows; arrays that repeat one value without memory stay so."""
    if any(any(array.strides) for array in arrays):
        return np.concatenate(arrays)
    return np.broadcast_to(arrays[0].flat[0], (sum(map(len, arrays)), *arrays[0].shape[1:]))


def _unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    unpacked = np.empty((packed.shape[0], packed.shape[1] * 2), np.uint8)
    np.bitwise_and(packed, 15, out=unpacked[:, 0::2])
    np.right_shift(packed, 4, out=unpacked[:, 1::2])
    return unpacked
