"""Linear layers and embeddings in float64: oracles of the kernel tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.formats.quantized_tensor import LinearWeight, QuantizedTensor


def weight_values(weight: LinearWeight) -> NDArray[np.float64]:
    """Return the exact ``[n, k]`` values of a weight."""
    if not isinstance(weight, QuantizedTensor):
        return weight.astype(np.float64)
    return weight.dequantize(np.float64)


def linear(
    x: NDArray[Any],
    members: Sequence[LinearWeight],
    kept: Sequence[tuple[int, int]] | None = None,
    columns: tuple[int, int] | None = None,
) -> NDArray[np.float64]:
    """Return ``x [m, k]`` times the kept rows of each member, side by side, ``[m, kept rows]``.

    With ``columns`` it has those inputs alone: a partial sum.
    """
    spans = kept if kept is not None else [(0, None)] * len(members)
    exact = x.astype(np.float64)
    parts = [
        exact @ weight_values(member)[start:stop, slice(*columns or (None,))].T
        for member, (start, stop) in zip(members, spans, strict=True)
    ]
    return np.concatenate(parts, axis=1)


def round_inputs(x: NDArray[Any], block: int) -> NDArray[np.float64]:
    """Return ``x [m, k]`` rounded as by linear layers with int8 activations.

    Each block of a row becomes codes from -127 to 127 times a scale, ``max|x| / 127``: a code is ``x`` times
    ``127 / max|x|``, in float32, to the nearest integer and halves to the even one. ONNX Runtime's
    MatMulNBits at accuracy level 4 gives the same bits (measured with version 1.31 on x86-64 over blocks of
    16 to 128, with 4-bit and 8-bit weights, exact halves included).
    """
    blocks = x.astype(np.float32).reshape(len(x), -1, block)
    largest = np.abs(blocks).max(axis=2, keepdims=True)
    limit = np.float32(127)
    factors = np.divide(limit, largest, out=np.zeros_like(largest), where=largest > 0)
    codes = np.rint(blocks * factors).astype(np.float64)
    values: NDArray[np.float64] = (codes * (largest / limit)).reshape(x.shape)
    return values


def embedding(
    tokens: NDArray[np.integer[Any]], table: LinearWeight, scale: float = 1.0
) -> NDArray[np.float64]:
    """Return the scaled table rows ``[m, k]`` of ``tokens [m]``."""
    rows: NDArray[np.float64] = weight_values(table)[tokens] * scale
    return rows
