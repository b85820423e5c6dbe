"""Memory for the codes at the edges of integer NPU graphs (opencl/codes.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from heterollm.base import KernelError
from heterollm.kernels.formats import CodeGrid
from heterollm.kernels.gpu.launch import Argument
from heterollm.kernels.gpu.memory import DeviceMemory, SharedArray

LARGEST_CODE_BYTES: Final = 2
"""Bytes of a code of 16 bits."""
FACTOR_BYTES: Final = 4
COUNT_WORDS: Final = 2
"""Words that count for an operator: codes at the end of their range, and tokens."""


@dataclass(frozen=True, slots=True)
class NpuCodes:
    """The codes of an operator with an integer NPU graph.

    Args:
        inputs: ``[tokens, k]`` in the type of the grid, which kernels write and the NPU reads.
        outputs: ``[tokens, n]`` in the same type, which the NPU writes and a kernel reads.
        factors: float32 ``[tokens]``.
        counts: uint32, the counts of all operators.
        place: First word of this operator's counts.
        grid: The grids of the codes.
        clamps: Whether inputs beyond their range are expected, and not counted.
    """

    inputs: SharedArray
    outputs: SharedArray
    factors: DeviceMemory
    counts: DeviceMemory
    place: int
    grid: CodeGrid
    clamps: bool = False

    @property
    def defines(self) -> dict[str, str | int]:
        """Defines of the kernels that write the codes of their output."""
        defines: dict[str, str | int] = {"NPU_CODES": self.grid.bits}
        if self.clamps:
            defines["CLAMPED"] = 1
        return defines

    @property
    def code_bytes(self) -> int:
        """Size of a code."""
        return self.grid.bits // 8

    def arguments(self, tokens: int, columns: int, label: str) -> tuple[Argument, ...]:
        """Return the last arguments of a kernel that writes the codes of ``[tokens, columns]``.

        Raises:
            KernelError: A slot is too small, or rows are not whole eights.
        """
        if columns % 8:
            raise KernelError(f"{label}: rows of {columns} inputs are not whole eights, as codes must be.")
        self.inputs.require(tokens * columns * self.code_bytes, f"{label} code")
        self.require_factors(tokens, label)
        steps, per_token = np.float32(1 / self.grid.input_step), np.int32(self.grid.per_token)
        return self.inputs, self.factors, self.counts, np.int32(self.place), steps, per_token

    def require_factors(self, tokens: int, label: str) -> None:
        """Refuse memory for factors or counts that is too small.

        Raises:
            KernelError: It is.
        """
        self.factors.require(tokens * FACTOR_BYTES, f"{label} factor")
        self.counts.require((self.place + COUNT_WORDS) * 4, f"{label} count")
