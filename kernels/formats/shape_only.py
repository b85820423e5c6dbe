"""Weights with a shape and no content, which take no memory, for simulated devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterollm.kernels.formats.quantized_tensor import LinearWeight, QuantizedTensor
from heterollm.kernels.ops import WeightFormat


def shape_only_array(shape: Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """Return an array that repeats a single zero."""
    return np.broadcast_to(np.zeros((), dtype), tuple(shape))


def shape_only_weight(rows: int, columns: int, weight: WeightFormat) -> LinearWeight:
    """Return a weight ``[rows, columns]`` of a format, without content.

    Args:
        rows: Output rows ``n``.
        columns: Inputs ``k``, whole blocks of the format.
        weight: The format.
    """
    if not weight.quantized:
        return shape_only_array((rows, columns), np.float16 if weight.bits == 16 else np.float32)
    bits, blocks = cast("Literal[4, 8]", weight.bits), columns // weight.block
    codes = shape_only_array((rows, blocks, weight.block * bits // 8), np.uint8)
    scales = shape_only_array((rows, blocks), np.float16)
    zeros = None
    if not weight.symmetric and not weight.minimum:
        zeros = shape_only_array((rows, -(-blocks * bits // 8)), np.uint8)
    minimums = scales if weight.minimum else None
    return QuantizedTensor(codes, scales, zeros, bits, weight.block, weight.scales, minimums)
