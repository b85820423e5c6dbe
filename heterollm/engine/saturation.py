"""Counts of values at integer graphs that reached the end of their calibrated range."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from heterollm.kernels.gpu import COUNT_WORDS, DeviceMemory, GpuRuntime

WORD_BYTES: Final = 4


class SaturationCount:
    """The counts of all operators, in memory of the GPU: kernels that write and read codes add to them.

    Args:
        runtime: The GPU.
        operators: Most operators.

    Attributes:
        memory: uint32, the counts.
    """

    def __init__(self, runtime: GpuRuntime, operators: int) -> None:
        self._runtime = runtime
        self._words = operators * COUNT_WORDS
        self._values: dict[str, int] = {}
        size = self._words * WORD_BYTES
        self.memory = DeviceMemory(runtime.scratch(size), size)

    def place(self, name: str, values: int) -> int:
        """Return the first word of an operator's counts; ``values`` of each token may saturate."""
        self._values.setdefault(name, values)
        return list(self._values).index(name) * COUNT_WORDS

    def fractions(self) -> Iterator[tuple[str, int, int]]:
        """Yield the name, the saturated and all values of each operator with saturated ones."""
        if not self._values or not self._runtime.computes:
            return
        counts = np.empty((self._words // COUNT_WORDS, COUNT_WORDS), np.uint32)
        self._runtime.copy(counts, self.memory.buffer)
        for (name, values), (saturated, tokens) in zip(self._values.items(), counts.tolist(), strict=False):
            if saturated:
                yield name, saturated, tokens * values

    def notes(self) -> tuple[str, ...]:
        """Return a sentence on the saturated values; none if there are none."""
        found = sorted(self.fractions(), key=lambda one: one[1] / one[2], reverse=True)
        if not found:
            return ()
        name, saturated, values = found[0]
        return (
            f"Values at {len(found)} operators left their calibrated ranges, most of all {saturated} of "
            f"{values} at {name}. Calibrate with text of this kind.",
        )

    def reset(self) -> None:
        """Count from 0 again; the queue must be empty."""
        if self._runtime.computes:
            self._runtime.copy(self.memory.buffer, np.zeros(self._words, np.uint32))
