"""Codes of 16 bits at the edges of integer NPU graphs: their grids, and the oracle of the GPU's kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["LARGEST_CODE", "ZERO_CODE", "CodeGrid"]

ZERO_CODE: Final = 1 << 15
LARGEST_CODE: Final = (1 << 15) - 1
"""Largest code above that of 0; the smallest lies one further below it."""

SMALLEST_FACTOR: Final = 2.0**-100
"""A token whose largest magnitude is smaller becomes zeros: floats do not hold the quotient."""


@dataclass(frozen=True, slots=True)
class CodeGrid:
    """Grids of a graph's input and output codes.

    A value is ``(code - 32768) * step``, times a factor of its token: the largest magnitude of the token's
    input, or 1.

    Args:
        input_step: Difference between adjacent input codes.
        output_step: Difference between adjacent output codes.
        per_token: Whether tokens have factors other than 1. The graph must then be linear.
    """

    input_step: float
    output_step: float
    per_token: bool

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest and the largest input that codes hold, of tokens with the factor 1."""
        return -ZERO_CODE * self.input_step, LARGEST_CODE * self.input_step

    def codes(self, x: NDArray[Any]) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
        """Return codes of inputs ``[m, k]`` and the factors ``[m]``, as the GPU's kernels compute them."""
        x = x.astype(np.float32)
        factors = np.abs(x).max(axis=1) if self.per_token else np.ones(len(x), np.float32)
        factors[factors <= SMALLEST_FACTOR] = 0
        with np.errstate(divide="ignore"):
            steps = np.where(factors > 0, np.float32(1 / self.input_step) / factors, np.float32(0))
        limited = np.clip(np.rint(x * steps[:, None]), -ZERO_CODE, LARGEST_CODE)
        return (limited + ZERO_CODE).astype(np.uint16), factors

    def values(self, codes: NDArray[np.uint16], factors: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the values of output codes ``[m, n]``, as the GPU's kernels compute them."""
        steps = np.float32(self.output_step) * factors
        centred = codes.astype(np.float32) - np.float32(ZERO_CODE)
        found: NDArray[np.float32] = centred * steps[:, None]
        return found
