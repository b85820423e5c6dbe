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

from heterollm.kernels.ops import ScaleKind, WeightFormat

__all__ = [
    "LinearWeight",
    "QuantizedTensor",
    "concatenate_rows",
    "take_columns",
    "take_rows",
    "weight_format",
]

BITS_OF_DTYPE: dict[np.dtype[Any], Literal[16, 32]] = {np.dtype(np.float16): 16, np.dtype(np.float32): 32}


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedTensor:
    """A weight ``[n, k]`` as integers with one FP16 scale per block of inputs.

    Element ``(i, j)`` in block ``g = j // block`` is ``(code - zero) * scales[i, g]``, where ``zero`` is
    ``2 ** (bits - 1)`` when symmetric and ``zero_points`` otherwise.

    Args:
        codes: uint8 ``[n, k/block, block*bits/8]``; with 4 bits the even input is the low nibble.
        scales: float16 ``[n, k/block]``.
        zero_points: uint8 ``[n, ceil(k/block*bits/8)]``, packed like ``codes``; None when symmetric.
        bits: 4 or 8.
        block: Inputs that share one scale.
        scale_kind: Kind of the scales; with ``tensor`` all scales of a stored tensor are equal.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float16]
    zero_points: NDArray[np.uint8] | None
    bits: Literal[4, 8]
    block: int
    scale_kind: ScaleKind = "free"

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
        return WeightFormat(self.bits, self.block, self.zero_points is None, self.scale_kind)

    @property
    def size_bytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        zeros = 0 if self.zero_points is None else self.zero_points.nbytes
        return self.codes.nbytes + self.scales.nbytes + zeros

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

    def dequantize(self) -> NDArray[np.float32]:
        """Return the dequantised weight, float32 ``[n, k]``."""
        values = self.unpacked_codes().astype(np.float32).reshape(*self.scales.shape, self.block)
        values -= self.unpacked_zero_points().astype(np.float32)[:, :, None]
        values *= self.scales.astype(np.float32)[:, :, None]
        return values.reshape(self.rows, self.columns)


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
        zeros = weight.zero_points
        return QuantizedTensor(
            _take(weight.codes, parts),
            _take(weight.scales, parts),
            None if zeros is None else _take(zeros, parts),
            weight.bits,
            weight.block,
            weight.scale_kind,
        )
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
    return QuantizedTensor(
        _stacked([weight.codes for weight in quantized]),
        _stacked([weight.scales for weight in quantized]),
        _stacked(zeros) if zeros else None,
        quantized[0].bits,
        quantized[0].block,
        quantized[0].scale_kind,
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
