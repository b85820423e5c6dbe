"""Error measures and tolerances of all kernels and graphs.

Errors are relative to float64 on the dequantised weights. NMSE is ``sum((a - e)²) / sum(e²)``; SQNR is the
same ratio in decibels, negated. A row or token of fewer than :data:`FEW_ELEMENTS` outputs can be near zero,
where rounding alone is a large relative error; its error is therefore relative to the mean power of all rows
or tokens if that is larger.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

ComputeType = Literal["fp32", "fp16"]

LINEAR_NMSE: dict[ComputeType, float] = {"fp32": 1e-10, "fp16": 1e-6}
"""Largest NMSE of one linear layer, by compute type."""

ATTENTION_NMSE: dict[ComputeType, float] = {"fp32": 1e-10, "fp16": 1e-5}
"""Largest NMSE of attention in an NPU graph, by compute type: a relative error of 1e-5, and 50 dB.

Scores have float16's error there, which the exponential multiplies by their size: NMSE 3e-7 to 7e-7 where
their standard deviation is 1, 7e-6 where it is 30 (measured on the emulator)."""

SINGLE_FACTOR = 10.0
"""Factor by which a single output row or token may be worse: the whole hides one wrong row in 2048."""

FEW_ELEMENTS = 8


class LinearErrors(NamedTuple):
    """NMSE of a linear layer's output, of its worst output row and of its worst token."""

    nmse: float
    worst_row: float
    worst_token: float

    def within(self, compute: ComputeType, gates: Mapping[ComputeType, float] = LINEAR_NMSE) -> bool:
        """Return whether all three are within tolerance; NaN is not."""
        gate = gates[compute]
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
    """Return the largest quotient; 0 / 0 counts as 0, NaN stays NaN."""
    if elements < FEW_ELEMENTS:
        power = np.maximum(power, power.mean())
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where((error == 0.0) & (power == 0.0), 0.0, error / power).max())
