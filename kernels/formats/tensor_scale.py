"""One scale for all 8-bit codes of a tensor, as static int8 NPU graphs take it.

The scale of least squared error clips a few weights. The error of a candidate comes from counts of
magnitudes, so that one pass over a tensor is enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import CheckpointError

__all__ = ["TENSOR_VERSION", "Magnitudes", "best_tensor_scale", "tensor_codes"]

TENSOR_VERSION: Final = 1
"""Part of the cache keys of such weights; raise it when equal ones would give other codes or scales."""

LARGEST_WEIGHT_CODE: Final = 127
ZERO_WEIGHT_CODE: Final = 128

CUTS: Final = np.linspace(0.2, 1.0, 161)
"""Candidate scales as fractions of the one that clips nothing."""

BIN_SHIFT: Final = 16
"""Magnitudes are counted by the upper half of their float32: to 1 part in 128."""
BINS: Final = 1 << (31 - BIN_SHIFT)

LARGEST_SCALE: Final = float(np.finfo(np.float16).max)
SMALLEST_SCALE: Final = float(np.finfo(np.float16).smallest_subnormal)


@dataclass(frozen=True, slots=True, eq=False)
class Magnitudes:
    """The magnitudes of weights.

    Args:
        counts: int64, weights by the upper half of their magnitude's float32.
        largest: The largest magnitude.
    """

    counts: NDArray[np.int64]
    largest: float

    @classmethod
    def of(cls, values: NDArray[np.float32]) -> Magnitudes:
        """Count some weights.

        Raises:
            CheckpointError: One is NaN or infinite, or too large for an FP16 scale.
        """
        patterns = np.ascontiguousarray(values, np.float32).view(np.uint32).ravel() & np.uint32(0x7FFFFFFF)
        largest = float(patterns.max(initial=0).astype(np.uint32).view(np.float32))
        if not largest <= LARGEST_SCALE * LARGEST_WEIGHT_CODE:
            raise CheckpointError(
                f"A weight of magnitude {largest:g} cannot be quantised: its FP16 scale would overflow.",
                fix="The checkpoint is damaged, or was not trained as a language model.",
            )
        return cls(np.bincount(patterns >> BIN_SHIFT, minlength=BINS), largest)

    def __add__(self, other: Magnitudes) -> Magnitudes:
        return Magnitudes(self.counts + other.counts, max(self.largest, other.largest))


def best_tensor_scale(found: Magnitudes) -> float:
    """Return the scale of least squared error, a positive FP16 number."""
    used = np.flatnonzero(found.counts)
    counts = found.counts[used].astype(np.float64)
    centres = ((used.astype(np.uint32) << BIN_SHIFT) + (1 << (BIN_SHIFT - 1))).view(np.float32)
    values = np.minimum(centres, found.largest).astype(np.float64)
    best, chosen = np.inf, SMALLEST_SCALE
    for cut in CUTS:
        scale = _to_fp16(cut * found.largest / LARGEST_WEIGHT_CODE)
        # A value between two codes is off by a twelfth of a squared step in the mean.
        errors = np.where(values < scale / 2, values**2, scale**2 / 12)
        clipped = np.maximum(values - LARGEST_WEIGHT_CODE * scale, 0)
        error = float(counts @ np.maximum(errors, clipped**2))
        if error <= best:
            best, chosen = error, scale
    return chosen


def tensor_codes(values: NDArray[np.float32], scale: float, block: int) -> NDArray[np.uint8]:
    """Return the codes ``[n, k/block, block]`` of weights ``[n, k]``, whose zero is 128."""
    steps = values * np.float32(1 / scale)
    np.rint(steps, out=steps)
    np.clip(steps, -LARGEST_WEIGHT_CODE, LARGEST_WEIGHT_CODE, out=steps)
    steps += ZERO_WEIGHT_CODE
    codes: NDArray[np.uint8] = steps.astype(np.uint8).reshape(len(values), -1, block)
    return codes


def _to_fp16(scale: float) -> float:
    return float(np.float16(np.clip(scale, SMALLEST_SCALE, LARGEST_SCALE)))
