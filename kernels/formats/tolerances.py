"""The gates that every part is held to, and the error measures they are stated in.

All errors are against float64 on the dequantised weights. NMSE is ``sum((a - e)²) / sum(e²)``; SQNR is the
same ratio in decibels, negated. A sum of few products can come out near zero, where rounding alone is a large
relative error; a row or token of fewer than :data:`FEW_ELEMENTS` outputs is therefore held against the mean
power of all where its own is smaller.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "LINEAR_NMSE",
    "LOGITS_SQNR_DB",
    "LOGITS_WORST_DROP_DB",
    "SINGLE_FACTOR",
    "ComputeType",
    "LinearErrors",
    "linear_errors",
    "sqnr_db",
]

ComputeType = Literal["fp32", "fp16"]

LINEAR_NMSE: dict[ComputeType, float] = {"fp32": 1e-10, "fp16": 1e-6}
"""Largest NMSE of one linear layer, by the type it computes in."""

SINGLE_FACTOR = 10.0
"""How much worse than the whole a single output row or token may be: one wrong row in 2048 hides."""

LOGITS_SQNR_DB: dict[ComputeType, float] = {"fp32": 90.0, "fp16": 45.0}
"""Smallest SQNR of a model's logits."""

LOGITS_WORST_DROP_DB = 15.0
"""How far below :data:`LOGITS_SQNR_DB` the worst vocabulary row or position may lie."""


FEW_ELEMENTS = 8


class LinearErrors(NamedTuple):
    """NMSE of one linear layer's output: as a whole, of its worst output row and of its worst token."""

    nmse: float
    worst_row: float
    worst_token: float

    def within(self, compute: ComputeType) -> bool:
        """Whether all three pass the gate; NaN does not."""
        gate = LINEAR_NMSE[compute]
        single = SINGLE_FACTOR * gate
        return self.nmse <= gate and self.worst_row <= single and self.worst_token <= single


def linear_errors(actual: NDArray[Any], expected: NDArray[Any]) -> LinearErrors:
    """Compare a linear layer's output ``[m, n]`` with the exact one.

    Raises:
        ValueError: The shapes differ or are not ``[m, n]``.
    """
    if actual.shape != expected.shape or actual.ndim != 2:
        raise ValueError(f"expected two equal [m, n] arrays, got {actual.shape} and {expected.shape}")
    exact = expected.astype(np.float64)
    error = np.square(actual.astype(np.float64) - exact)
    power = np.square(exact)
    return LinearErrors(
        _worst_ratio(error.sum(keepdims=True), power.sum(keepdims=True), error.size),
        _worst_ratio(error.sum(axis=0), power.sum(axis=0), error.shape[0]),
        _worst_ratio(error.sum(axis=1), power.sum(axis=1), error.shape[1]),
    )


def sqnr_db(actual: NDArray[Any], expected: NDArray[Any]) -> float:
    """Return the signal-to-quantisation-noise ratio in decibels (infinite where equal).

    Raises:
        ValueError: The shapes differ.
    """
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {actual.shape} and {expected.shape}")
    exact = expected.astype(np.float64)
    error = float(np.square(actual.astype(np.float64) - exact).sum())
    if error == 0.0:
        return float("inf")
    with np.errstate(divide="ignore"):
        return float(10.0 * np.log10(np.square(exact).sum() / error))


def _worst_ratio(error: NDArray[np.float64], power: NDArray[np.float64], elements: int) -> float:
    """Return the largest quotient, where no error over no signal is no error and NaN stays NaN."""
    if elements < FEW_ELEMENTS:
        power = np.maximum(power, power.mean())
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where((error == 0.0) & (power == 0.0), 0.0, error / power).max())
