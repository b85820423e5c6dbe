"""Stepped scales: every block scale of a row is 1 to 16 times one number of that row, and 16 occurs.

Hexagon's integer matrix unit takes 4-bit weights in blocks only with such scales. They are ordinary FP16
scales to all other code, so that GPU kernels, MatMulNBits and the integer graph share codes and scales. The
row's number, its *step*, has 7 significant bits, so that FP16 holds each of its multiples exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

LARGEST_MULTIPLE = 16
STEP_BITS = 7
"""Significant bits of a step; a multiple of up to 15 adds 4, which makes the 11 of FP16."""

SMALLEST_STEP = float(np.finfo(np.float16).smallest_subnormal)
LARGEST_STEP = float(np.finfo(np.float16).max) // LARGEST_MULTIPLE

STEP_RANGE = np.geomspace(0.62, 1.08, 49)
"""Candidate steps as fractions of a sixteenth of a row's largest free scale: 49 of about 51 that 7 bits
tell apart."""


@dataclass(frozen=True, slots=True)
class RowSteps:
    """The steps of a weight's rows.

    Args:
        step: float64 ``[n]``, the largest number of which all scales of a row are whole multiples.
        multiples: int64 ``[n, k/block]``.
    """

    step: NDArray[np.float64]
    multiples: NDArray[np.int64]

    @property
    def stepped(self) -> NDArray[np.bool_]:
        """Whether no multiple of a row exceeds 16, ``[n]``."""
        stepped: NDArray[np.bool_] = self.multiples.max(axis=1) <= LARGEST_MULTIPLE
        return stepped

    @property
    def reaches_largest(self) -> NDArray[np.bool_]:
        """Whether a sixteenth of the row's largest scale is a step of it too, ``[n]``.

        QNN's compiler takes that for the step. It fails for a range of a row's blocks without the largest.
        """
        largest = self.multiples.max(axis=1, keepdims=True)
        whole: NDArray[np.bool_] = (self.multiples * LARGEST_MULTIPLE % largest == 0).all(axis=1)
        return whole


def row_steps(scales: NDArray[np.float16]) -> RowSteps:
    """Find the steps of scales ``[n, k/block]``, which are positive."""
    units = np.rint(scales.astype(np.float64) / SMALLEST_STEP).astype(np.int64)
    step = np.maximum(np.gcd.reduce(units, axis=1, keepdims=True), 1)
    return RowSteps(step[:, 0] * SMALLEST_STEP, units // step)


def choose_steps(scales: NDArray[np.float32], weights: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the step of each row, ``[n]``, that approximates its free scales best.

    Args:
        scales: Free scales ``[n, k/block]``, of least squared error alone, positive.
        weights: Cost of a scale's squared deviation: the sum of the block's squared codes.
    """
    sixteenth = scales.max(axis=1) / np.float32(LARGEST_MULTIPLE)
    best = np.full(len(scales), np.inf, np.float64)
    chosen = _round_step(sixteenth)
    for fraction in STEP_RANGE:
        step = _round_step(sixteenth * np.float32(fraction))
        deviation = nearest_multiples(scales, step) * step[:, None] - scales
        cost = np.einsum("ij,ij,ij->i", weights, deviation, deviation, dtype=np.float64)
        better = cost < best
        np.copyto(best, cost, where=better)
        np.copyto(chosen, step, where=better)
    return chosen


def nearest_multiples(scales: NDArray[np.float32], step: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the multiples of steps ``[n]``, 1 to 16, nearest to scales ``[n, k/block]``.

    The largest scale of each row gets 16.
    """
    multiples: NDArray[np.float32] = np.clip(np.rint(scales / step[:, None]), 1, LARGEST_MULTIPLE)
    np.put_along_axis(multiples, scales.argmax(axis=1)[:, None], LARGEST_MULTIPLE, axis=1)
    return multiples


def _round_step(step: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round to 7 significant bits and to a multiple of FP16's smallest number."""
    exponent = np.frexp(step)[1]
    unit = np.maximum(np.ldexp(np.float32(1), exponent - STEP_BITS), SMALLEST_STEP)
    rounded: NDArray[np.float64] = np.clip(np.rint(step / unit) * unit, SMALLEST_STEP, LARGEST_STEP)
    return rounded.astype(np.float32)
