"""Shadow outliers: inputs beyond the range of an integer NPU graph, times float weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import KernelError, round_up
from heterollm.kernels.gpu import (
    Argument,
    Defines,
    DeviceMemory,
    GlueKernels,
    GpuWork,
    Launch,
    SharedArray,
    pointwise_work,
)
from heterollm.kernels.operators.data import Data
from heterollm.kernels.operators.operator import (
    Exact,
    Form,
    OperatorCheck,
    StepCategory,
    Timed,
    Values,
    by_width,
)

LOW, HIGH = -1.28, 1.27
"""Range of the codes of checks."""

ROOM: Final = 16
"""Cold channels of a batch of checks, so few that they need several."""

CHANNELS: Final = (16, 128)
"""Channels whose products are measured."""

STEPS: Final[Mapping[str, StepCategory]] = {
    "finding of outliers": "other",
    "outliers": "other",
    "cold outliers": "other",
}

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


def find_outliers(
    on: GlueKernels, x: SharedArray, found: OutlierList, hot: HotWeights, *, tokens: int
) -> tuple[Launch, Launch]:
    """Return the launches that list the channels of ``x [tokens, columns]`` with outliers."""
    label, columns = "finding of outliers", hot.columns
    x.require(tokens * columns * on.item_bytes, f"{label} input")
    found.flags.require(outlier_flag_bytes(columns), f"{label} flag")
    found.found.require(found_bytes(columns), f"{label} list")
    kernel, style, items = on.kernel(FILES, "find_outliers", widths=(columns,))
    limits = map(np.float32, (hot.low, hot.high))
    span = SPAN[style]
    sizes = map(np.int32, (tokens, columns, span, TOKEN_STEP))
    size = round_up(-(-columns // span), items), -(-tokens // TOKEN_STEP)
    work: Any = functools.partial(pointwise_work, tokens * columns, 2, on.item_bytes, 0)
    arguments: tuple[Argument, ...] = (x, found.flags, *limits, *sizes)
    finding = on.runtime.launch(kernel, arguments, size, (items, 1), label, work=work)
    words = -(-columns // 32)
    kernel, _, items = on.kernel(FILES, "list_outliers")
    arguments = (found.flags, hot.place, found.found, np.int32(words))
    work = functools.partial(pointwise_work, words, 32, WORD_BYTES, WORD_BYTES)
    listing = on.runtime.launch(kernel, arguments, (items,), (items,), "list of outliers", work=work)
    return finding, listing


def multiply_outliers(
    on: GlueKernels,
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
        on: The device's kernels.
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
    x.require(covered * hot.columns * on.item_bytes, f"{label} input")
    y.require(tokens * hot.rows * on.item_bytes, f"{label} output")
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
    kernel, _, items = on.kernel(FILES, "multiply_outliers", lambda _: defines, widths=widths)
    memory: tuple[Argument, ...] = (x, found.found, hot.place, hot.weights, y)
    if fetched is not None:
        memory = (x, found.found, found.batch, fetched, y)
    limits = map(np.float32, (hot.low, hot.high))
    sizes = map(np.int32, (covered, tokens, hot.columns, hot.rows))
    arguments = (*memory, on.runtime.upload(np.array(ranges, np.int32)), *limits, *sizes)
    size = len(ranges) * items, -(-tokens // step)

    def work() -> GpuWork:
        channels = hot.expected if fetched is None else int(found.batch.view(np.int32, (2,))[1])
        return _product_work(on, tokens, sum(npu_rows), channels, joined=fetched is None)

    return on.runtime.launch(kernel, arguments, size, (items, 1), label, work=work)


def _product_work(on: GlueKernels, tokens: int, rows: int, channels: int, *, joined: bool) -> GpuWork:
    read = channels * (rows + tokens) * on.item_bytes
    return GpuWork(
        "shadow" if joined else "elementwise",
        2 * tokens * rows * channels,
        read,
        tokens * rows * on.item_bytes,
    )


@dataclass(frozen=True, slots=True)
class OutlierCase:
    """Channels with outliers that are found and multiplied, those of cold channels in batches.

    About half of the hot channels have outliers. The NPU computes the ``npu_rows`` leading rows of each
    member, for the tokens that it covers (None for all).
    """

    tokens: int
    columns: int
    member_rows: tuple[int, ...]
    npu_rows: tuple[int, ...]
    channels: int
    hot: int
    covered: int | None = None
    repeats: int = 1
    seed: int = 0

    def launches(self, on: GlueKernels, data: Data) -> Iterator[Launch]:
        """Yield the launches.

        Raises:
            KernelError: The list has other channels.
        """
        generator, columns, rows = np.random.default_rng(self.seed), self.columns, sum(self.member_rows)
        covered = self.tokens if self.covered is None else self.covered
        dtype = np.float16 if on.item_bytes == 2 else np.float32
        used = generator.choice(columns, self.channels, replace=False)
        known = np.concatenate([used[: self.hot // 2], np.setdiff1d(np.arange(columns), used)])[: self.hot]
        values = generator.uniform(-1.2, 1.2, (self.tokens, columns))
        at, signs = generator.integers(0, covered, self.channels), generator.choice([-1, 1], self.channels)
        values[at, used] = generator.uniform(2, 60, self.channels) * signs
        # Rows that the NPU does not compute are not read.
        values[covered:] = np.nan
        weights = generator.standard_normal((columns, rows)).astype(dtype)
        place = np.full(columns, -1, np.int32)
        place[known] = np.arange(len(known))
        x, _ = data.put("x", values.astype(dtype)), data.put("weights", weights)
        held = weights[known] if len(known) else np.full((1, rows), np.nan, dtype)
        memory = data.put("hot weights", held), data.put("places", place)
        hot = HotWeights(*memory, self.member_rows, columns, LOW, HIGH)
        found, fetched = _list(data, columns, []), data.put("fetched", np.full((ROOM, rows), np.nan, dtype))
        options: dict[str, Any] = {"tokens": self.tokens, "covered": covered, "npu_rows": self.npu_rows}
        inputs = x, found, hot, data.put("products", np.ones((self.tokens, rows), dtype))
        for _ in range(self.repeats):
            yield from find_outliers(on, x, found, hot, tokens=covered)
            yield multiply_outliers(on, *inputs, **options)
            on.runtime.finish()
            found.found.acquire()
            cold = found.cold.copy()
            found.found.release()
            adding = multiply_outliers(on, *inputs, **options, fetched=fetched)
            for first in range(0, len(cold), ROOM):
                own = cold[first : first + ROOM]
                _write(fetched, weights[own])
                _write(found.batch, np.array([first, len(own)], np.int32))
                yield adding
                on.runtime.finish()
        hot_found = sorted(set(known.tolist()) & set(used.tolist()))
        cold_found = sorted(set(used.tolist()) - set(known.tolist()))
        on.runtime.finish()
        found.found.acquire()
        listed = found.found.view(np.int32, (FIRST_FOUND + self.channels,)).tolist()
        found.found.release()
        if listed != [len(hot_found), len(cold_found), *hot_found, *cold_found]:
            raise KernelError(f"Outliers are in channels {hot_found} and {cold_found}, not {listed}.")

    def exact(self, data: Values) -> Exact:
        x = data["x"][: self.covered].astype(np.float32)
        rest = x - np.clip(x, np.float32(LOW), np.float32(HIGH))
        pairs = zip(self.member_rows, self.npu_rows, strict=True)
        own = np.concatenate([np.arange(rows) < npu for rows, npu in pairs])
        products = np.tile(np.where(own, 0.0, 1.0), (self.tokens, 1))
        products[: len(x), own] = rest.astype(np.float64) @ data["weights"][:, own].astype(np.float64)
        return {"products": products}


def _write(memory: SharedArray, values: NDArray[Any]) -> None:
    memory.acquire()
    memory.view(values.dtype, values.shape)[...] = values
    memory.release()


CHECKS: Final = (
    OperatorCheck(
        "shadow outliers",
        "9 of 192 channels",
        OutlierCase(5, 192, (96, 64), (64, 32), channels=9, hot=8),
        "products",
    ),
)


@dataclass(frozen=True, slots=True)
class FindCase:
    """The search for channels with outliers, of which there are none."""

    tokens: int
    columns: int

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch, ...]:
        columns = self.columns
        x, place = data.inputs("x", self.tokens, columns), data.put("places", np.full(columns, -1, np.int32))
        hot = HotWeights(x, place, (columns,), columns, -np.inf, np.inf)
        return find_outliers(on, x, _list(data, columns, []), hot, tokens=self.tokens)


@dataclass(frozen=True, slots=True)
class MultiplyCase:
    """The products of some channels."""

    tokens: int
    columns: int
    rows: int
    channels: int

    def launches(self, on: GlueKernels, data: Data) -> tuple[Launch]:
        tokens, columns, rows, count = self.tokens, self.columns, self.rows, self.channels
        channels = np.arange(count) * columns // count
        place = np.full(columns, -1, np.int32)
        place[channels] = np.arange(count)
        weights = data.inputs("weights of channels", count, rows)
        launch = multiply_outliers(
            on,
            data.inputs("x", tokens, columns),
            _list(data, columns, [count, 0, *channels.tolist()]),
            HotWeights(weights, data.put("places", place), (rows,), columns, -0.5, 0.5, expected=count),
            data.output("products", tokens, rows),
            tokens=tokens,
            covered=tokens,
            npu_rows=(rows,),
        )
        return (launch,)


def _list(data: Data, columns: int, words: Sequence[int]) -> OutlierList:
    flags = data.put("flags of channels", np.zeros(columns, np.int32))
    found = np.zeros(FIRST_FOUND + columns, np.int32)
    found[: len(words)] = words
    return OutlierList(flags, data.put("channels", found), data.put("batch", np.zeros(2, np.int32)))


FIND_OUTLIERS: Final = Timed(
    forms={Form(): "find_outliers"},
    case=lambda at: FindCase(at.sizes.tokens, at.sizes.hidden),
    points=by_width(lambda scope: (spec.columns for spec in scope.layer if scope.has_shadows)),
)
MULTIPLY_OUTLIERS: Final = Timed(
    forms={Form(): "multiply_outliers"},
    case=lambda at: MultiplyCase(at.sizes.tokens, at.model.hidden_size, at.sizes.hidden, at.sizes.context),
    points=by_width(lambda scope: (spec.rows for spec in scope.layer if scope.has_shadows), CHANNELS),
)
