"""What linear layers and embeddings compute, in float64: the oracle of the kernels' tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.quantized_tensor import LinearWeight, QuantizedTensor

__all__ = ["embedding", "linear", "weight_values"]


def weight_values(weight: LinearWeight) -> NDArray[np.float64]:
    """Return the exact ``[n, k]`` values of a weight."""
    if not isinstance(weight, QuantizedTensor):
        return weight.astype(np.float64)
    codes = weight.unpacked_codes().astype(np.float64).reshape(*weight.scales.shape, weight.block)
    zeros = weight.unpacked_zero_points().astype(np.float64)
    values = (codes - zeros[:, :, None]) * weight.scales.astype(np.float64)[:, :, None]
    return values.reshape(weight.rows, weight.columns)


def linear(
    x: NDArray[Any], members: Sequence[LinearWeight], kept: Sequence[tuple[int, int]] | None = None
) -> NDArray[np.float64]:
    """Return ``x [m, k]`` times the kept rows of each member, side by side, ``[m, kept rows]``."""
    spans = kept if kept is not None else [(0, None)] * len(members)
    exact = x.astype(np.float64)
    parts = [
        exact @ weight_values(member)[start:stop].T
        for member, (start, stop) in zip(members, spans, strict=True)
    ]
    return np.concatenate(parts, axis=1)


def embedding(
    tokens: NDArray[np.integer[Any]], table: LinearWeight, scale: float = 1.0
) -> NDArray[np.float64]:
    """Return the scaled table rows ``[m, k]`` of ``tokens [m]``."""
    rows: NDArray[np.float64] = weight_values(table)[tokens] * scale
    return rows
