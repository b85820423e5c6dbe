"""Launches of shadow outliers: inputs beyond the range of an integer NPU graph, times float weights."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import KernelError, round_up
from heterollm.kernels.gpu.glue_kernels import Defines, GlueKernels
from heterollm.kernels.gpu.launch import Argument, Launch
from heterollm.kernels.gpu.memory import DeviceMemory, SharedArray
from heterollm.kernels.gpu.work import GpuWork, pointwise_work

FILES: Final = ("outliers.cl",)
HOT_COUNT, COLD_COUNT, FIRST_FOUND = range(3)
"""Words of the list of outliers, as in outliers.cl."""

WORD_BYTES: Final = 4
SPAN: Final = {"vector": 512, "simt": 8}
"""Channels that a work-item examines."""

TOKEN_STEP: Final = 32
RANGE_COLUMNS: Final = 512
MOST_TOKENS: Final = 4


@dataclass(frozen=True, slots=True)
class OutlierList:
    """Memory for the outlier channels of one operator at a time.

    Args:
        flags: Of :func:`outlier_flag_bytes`, zeroed once.
        found: int32, of :func:`found_bytes`.
        batch: int32 ``[2]``: position of the first fetched one among the cold channels, and their number.
    """

    flags: DeviceMemory
    found: SharedArray
    batch: SharedArray

    def counts(self) -> memoryview:
        """Return the counts of hot and cold channels as the host sees them, whatever pass wrote them last."""
        return self.found.view(np.int32, (FIRST_FOUND,)).data

    @property
    def cold(self) -> NDArray[np.int32]:
        """Cold channels that were found, ascending, as the host sees them."""
        words = self.found.view(np.int32, (self.found.size_bytes // WORD_BYTES,))
        first = FIRST_FOUND + int(words[HOT_COUNT])
        channels: NDArray[np.int32] = words[first : first + int(words[COLD_COUNT])]
        return channels


@dataclass(frozen=True, slots=True)
class HotWeights:
    """Float weights of hot channels.

    Args:
        weights: ``[channels, rows]`` in the activation type.
        place: int32 ``[columns]``: the row of each channel in ``weights``, or -1.
        member_rows: Output rows of each member of the group.
        columns: Channels of the linear.
        low: Smallest input that the NPU's codes hold.
        high: Largest one.
        expected: Hot channels with outliers in a pass, from which simulated times follow.
    """

    weights: Argument
    place: Argument
    member_rows: tuple[int, ...]
    columns: int
    low: float
    high: float
    expected: int = 0

    @property
    def rows(self) -> int:
        """Output rows of all members."""
        return sum(self.member_rows)


def outlier_flag_bytes(columns: int) -> int:
    """Return the size of the flags of ``columns`` channels."""
    return -(-columns // 32) * WORD_BYTES


def found_bytes(columns: int) -> int:
    """Return the size of a list that holds ``columns`` channels."""
    return (FIRST_FOUND + columns) * WORD_BYTES


class GpuOutliers(GlueKernels):
    """Makes the launches of shadow outliers; see :class:`GlueKernels`."""

    def find(
        self, x: SharedArray, found: OutlierList, hot: HotWeights, *, tokens: int
    ) -> tuple[Launch, Launch]:
        """Return the launches that list the channels of ``x [tokens, columns]`` with outliers."""
        label, columns = "finding of outliers", hot.columns
        x.require(tokens * columns * self._item_bytes, f"{label} input")
        found.flags.require(outlier_flag_bytes(columns), f"{label} flag")
        found.found.require(found_bytes(columns), f"{label} list")
        kernel, style, items = self._kernel(FILES, "find_outliers", widths=(columns,))
        limits = map(np.float32, (hot.low, hot.high))
        span = SPAN[style]
        sizes = map(np.int32, (tokens, columns, span, TOKEN_STEP))
        size = round_up(-(-columns // span), items), -(-tokens // TOKEN_STEP)
        work: Any = functools.partial(pointwise_work, tokens * columns, 2, self._item_bytes, 0)
        arguments: tuple[Argument, ...] = (x, found.flags, *limits, *sizes)
        finding = self._runtime.launch(kernel, arguments, size, (items, 1), label, work=work)
        words = -(-columns // 32)
        kernel, _, items = self._kernel(FILES, "list_outliers")
        arguments = (found.flags, hot.place, found.found, np.int32(words))
        work = functools.partial(pointwise_work, words, 32, WORD_BYTES, WORD_BYTES)
        listing = self._runtime.launch(kernel, arguments, (items,), (items,), "list of outliers", work=work)
        return finding, listing

    def multiply(
        self,
        x: SharedArray,
        found: OutlierList,
        hot: HotWeights,
        y: DeviceMemory,
        *,
        tokens: int,
        covered: int,
        npu_rows: tuple[int, ...],
        fetched: SharedArray | None = None,
    ) -> Launch:
        """Return the launch that writes the products of outliers to the NPU's rows of ``y [tokens, rows]``.

        Args:
            x: ``[tokens, columns]`` in the activation type.
            found: The channels with outliers, of :meth:`find`.
            hot: The weights of hot channels.
            y: All rows of the group in the activation type; only the leading ``npu_rows`` are written.
            tokens: Rows to write.
            covered: Rows that the NPU computes; those behind become zeros.
            npu_rows: Leading rows of each member that the NPU computes.
            fetched: Weights ``[n, rows]`` of the batch of cold channels, whose products are added to ``y``;
                None for the weights of hot channels.
        """
        label = "outliers" if fetched is None else "cold outliers"
        x.require(covered * hot.columns * self._item_bytes, f"{label} input")
        y.require(tokens * hot.rows * self._item_bytes, f"{label} output")
        if len(npu_rows) != len(hot.member_rows):
            raise KernelError(f"{label}: {len(npu_rows)} row counts for {len(hot.member_rows)} members.")
        ranges, start = [], 0
        for own, whole in zip(npu_rows, hot.member_rows, strict=True):
            steps = range(start, start + own, RANGE_COLUMNS)
            ranges += [(first, min(first + RANGE_COLUMNS, start + own)) for first in steps]
            start += whole
        step = min(MOST_TOKENS, tokens)
        defines: Defines = {"TOKENS": step}
        if fetched is not None:
            defines["FETCHED"] = 1
        widths = (hot.columns, hot.rows, *(edge for pair in ranges for edge in pair))
        kernel, _, items = self._kernel(FILES, "multiply_outliers", lambda _: defines, widths=widths)
        memory: tuple[Argument, ...] = (x, found.found, hot.place, hot.weights, y)
        if fetched is not None:
            memory = (x, found.found, found.batch, fetched, y)
        limits = map(np.float32, (hot.low, hot.high))
        sizes = map(np.int32, (covered, tokens, hot.columns, hot.rows))
        arguments = (*memory, self._runtime.upload(np.array(ranges, np.int32)), *limits, *sizes)
        size = len(ranges) * items, -(-tokens // step)

        def work() -> GpuWork:
            channels = hot.expected if fetched is None else int(found.batch.view(np.int32, (2,))[1])
            return self._product_work(tokens, sum(npu_rows), channels)

        return self._runtime.launch(kernel, arguments, size, (items, 1), label, work=work)

    def _product_work(self, tokens: int, rows: int, channels: int) -> GpuWork:
        read = channels * (rows + tokens) * self._item_bytes
        return GpuWork("elementwise", 2 * tokens * rows * channels, read, tokens * rows * self._item_bytes)
