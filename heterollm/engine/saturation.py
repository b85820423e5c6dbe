"""Counts the outputs of integer graphs that reached the end of their calibrated range."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterollm.engine.step import Call
from heterollm.kernels.npu import StaticRanges, step_of

__all__ = ["SaturationCount"]

LOWEST_CODE, HIGHEST_CODE = -32768, 32767


class SaturationCount:
    """Counts saturated outputs by operator, after each run of its graphs.

    Half floats near the end of a range have steps of up to 32 codes, so that a count at ``float16`` includes
    values up to 0.1 % below the end.
    """

    def __init__(self) -> None:
        self._counts: dict[str, NDArray[np.int64]] = {}
        self._mask = np.empty(0, np.bool_)

    def counted(self, run: Call, y: NDArray[Any], ranges: StaticRanges, name: str) -> Call:
        """Return a call that runs a graph and counts.

        Args:
            run: The graph's call.
            y: Its output without the rows of padding, C-contiguous.
            ranges: Ranges of the graph.
            name: The operator.
        """
        counts = self._counts.setdefault(name, np.zeros(2, np.int64))
        if self._mask.size < y.size:
            self._mask = np.empty(y.size, np.bool_)
        mask = self._mask[: y.size]
        step = np.float32(step_of(ranges.outputs))
        ends = (np.array([LOWEST_CODE, HIGHEST_CODE], np.float32) * step).astype(y.dtype)
        # Integers of equal bits compare several times as fast as half floats.
        words = np.dtype(f"i{y.dtype.itemsize}")
        low, high = ends.view(words)
        codes = y.reshape(-1).view(words)
        equal, count, size = np.equal, np.count_nonzero, y.size

        def call() -> None:
            run()
            equal(codes, low, out=mask)
            counts[0] += count(mask)
            equal(codes, high, out=mask)
            counts[0] += count(mask)
            counts[1] += size

        return call

    def fractions(self) -> Iterator[tuple[str, int, int]]:
        """Yield the name, the saturated and all outputs of each operator with saturated ones."""
        for name, (saturated, outputs) in self._counts.items():
            if saturated:
                yield name, int(saturated), int(outputs)

    def notes(self) -> tuple[str, ...]:
        """Return a sentence on the saturated outputs; none if there are none."""
        found = sorted(self.fractions(), key=lambda one: one[1] / one[2], reverse=True)
        if not found:
            return ()
        name, saturated, outputs = found[0]
        return (
            f"Outputs of {len(found)} operators left their calibrated ranges, most of all {saturated} of "
            f"{outputs} of {name}. Calibrate with text of this kind.",
        )

    def reset(self) -> None:
        """Count from 0 again, for the same graphs."""
        for counts in self._counts.values():
            counts[:] = 0

    def clear(self) -> None:
        """Forget all operators."""
        self._counts.clear()
