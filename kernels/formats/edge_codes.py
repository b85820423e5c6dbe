"""Codes of 8 or 16 bits at the edges of integer NPU graphs: their grids, and the oracle of GPU kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

CodeBits: TypeAlias = Literal[8, 16]

ZERO_CODE: Final = 1 << 15
"""The 16-bit code of 0."""
LARGEST_CODE: Final = (1 << 15) - 1
"""Largest 16-bit code above that of 0; the smallest lies one further below it."""

SMALLEST_FACTOR: Final = 2.0**-100
"""A token whose largest magnitude is smaller becomes zeros: floats do not hold the quotient."""


def zero_code(bits: CodeBits) -> int:
    """Return the code of 0."""
    return 1 << (bits - 1)


def largest_code(bits: CodeBits) -> int:
    """Return the largest code above that of 0; the smallest lies one further below it."""
    return zero_code(bits) - 1


def code_dtype(bits: CodeBits) -> np.dtype[Any]:
    """Return the element type of codes."""
    return np.dtype(np.uint8 if bits == 8 else np.uint16)


def on_grid(values: NDArray[np.float32], step: float, bits: CodeBits) -> NDArray[np.float32]:
    """Return values rounded to a grid and clipped at its ends."""
    codes = np.clip(np.rint(values / np.float32(step)), -zero_code(bits), largest_code(bits))
    rounded: NDArray[np.float32] = codes * np.float32(step)
    return rounded


@dataclass(frozen=True, slots=True)
class CodeGrid:
    """Grids of a graph's input and output codes.

    A value is ``(code - zero) * step`` with a zero of 128 or 32768, times a factor of its token: the largest
    magnitude of the token's input, or 1.

    Args:
        input_step: Difference between adjacent input codes.
        output_step: Difference between adjacent output codes.
        per_token: Whether tokens have factors other than 1. The graph must then be linear.
        bits: Of a code.
        member_steps: Steps of the members' output codes in place of ``output_step``, if they have their own.
    """

    input_step: float
    output_step: float
    per_token: bool
    bits: CodeBits = 16
    member_steps: tuple[float, ...] = ()

    @property
    def dtype(self) -> np.dtype[Any]:
        """Element type of the codes."""
        return code_dtype(self.bits)

    @property
    def limits(self) -> tuple[float, float]:
        """The smallest and the largest input that codes hold, of tokens with the factor 1."""
        zero = zero_code(self.bits)
        return -zero * self.input_step, (zero - 1) * self.input_step

    def codes(self, x: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.float32]]:
        """Return codes of inputs ``[m, k]`` and the factors ``[m]``, as the GPU's kernels compute them."""
        x, zero = x.astype(np.float32), zero_code(self.bits)
        factors = np.abs(x).max(axis=1) if self.per_token else np.ones(len(x), np.float32)
        factors[factors <= SMALLEST_FACTOR] = 0
        with np.errstate(divide="ignore"):
            steps = np.where(factors > 0, np.float32(1 / self.input_step) / factors, np.float32(0))
        limited = np.clip(np.rint(x * steps[:, None]), -zero, zero - 1)
        return (limited + zero).astype(self.dtype), factors

    def values(
        self, codes: NDArray[Any], factors: NDArray[np.float32], member_rows: tuple[int, ...] = ()
    ) -> NDArray[np.float32]:
        """Return the values of output codes ``[m, n]``, as the GPU's kernels compute them.

        Args:
            codes: The codes.
            factors: Of the tokens.
            member_rows: Outputs of each member, where they have steps of their own.
        """
        steps = np.full(1, self.output_step, np.float32)
        if self.member_steps:
            steps = np.repeat(np.array(self.member_steps, np.float32), member_rows)
        centred = codes.astype(np.float32) - np.float32(zero_code(self.bits))
        found: NDArray[np.float32] = centred * (steps * factors[:, None])
        return found
