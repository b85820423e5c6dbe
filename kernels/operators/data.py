"""Data of operators: random values with guards around them, which the oracles read too.

Outputs have a guard pattern behind them, inputs have NaN where a kernel must not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterollm.base import KernelError
from heterollm.kernels.formats import CodeGrid, LinearWeight, random_weight, reference
from heterollm.kernels.gpu import (
    COUNT_WORDS,
    KV_CODES,
    PAGE_POSITIONS,
    STEP_HEAD_ROW,
    STEP_LENGTH,
    STEP_POSITION,
    STEP_STATE_READ,
    STEP_STATE_WRITTEN,
    STEP_WORDS,
    GlueKernels,
    GpuRuntime,
    HeadShape,
    KvLayer,
    Launch,
    NpuCodes,
    RoundedInputs,
    Segments,
    SharedArray,
    code_bytes,
    head_elements,
    page_elements,
    pages_of,
)
from heterollm.kernels.ops import Join, WeightFormat

Numbers: TypeAlias = tuple[NDArray[Any], NDArray[np.float64]]
"""The output of the processor and the exact result."""

GUARD: Final = 0xA5
GUARD_BYTES: Final = 4096
PADDING_ROWS: Final = 3
MOST_PAGES: Final = 256
"""Pages in the step buffers of checks whose cache lies in order."""


def fill_slot(gpu: GpuRuntime, values: NDArray[Any]) -> SharedArray:
    """Return shared memory with these values."""
    slot = gpu.shared(values.shape, values.dtype)
    slot.write(values)
    return slot


def run_launches(gpu: GpuRuntime, launches: Iterable[Launch]) -> None:
    """Run the launches one after the other and wait for the last."""
    for launch in launches:
        launch()
    gpu.finish()


def step_slot(gpu: GpuRuntime, position: int = 0, length: int = 0, head_row: int = 0) -> SharedArray:
    """Return the words that a pass reads: position, length, first row of the head, and pages in order."""
    words = np.arange(-STEP_WORDS, MOST_PAGES, dtype=np.int32)
    words[:STEP_WORDS] = 0
    words[[STEP_POSITION, STEP_LENGTH, STEP_HEAD_ROW]] = position, length, head_row
    return fill_slot(gpu, words)


def split_segments(
    gpu: GpuRuntime, values: NDArray[Any], rows: tuple[int, ...], splits: tuple[int, ...]
) -> Segments:
    """Return both segments of a value; the first has NaN rows behind it, as padded NPU output may."""
    a, b = _split_members(values, rows, splits)
    a = np.concatenate([a, np.full((PADDING_ROWS, a.shape[1]), np.nan, a.dtype)])
    dummy = np.full((1, 1), np.nan, values.dtype)
    first, second = (fill_slot(gpu, part if part.size else dummy) for part in (a, b))
    return Segments(first, second, rows, splits)


def _split_members(
    value: NDArray[Any], rows: Sequence[int], splits: Sequence[int]
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Divide ``[m, sum(rows)]`` into the two segments of a row split."""
    members = np.split(value, np.cumsum(rows)[:-1], axis=1)
    pairs = list(zip(members, splits, strict=True))
    first = np.concatenate([member[:, :split] for member, split in pairs], axis=1)
    second = np.concatenate([member[:, split:] for member, split in pairs], axis=1)
    return first, second


def summed_segments(
    gpu: GpuRuntime, values: NDArray[Any], added: NDArray[Any], rows: tuple[int, ...], splits: tuple[int, ...]
) -> tuple[Segments, NDArray[np.float64]]:
    """Return segments of a value and of another that is added to its leading rows, and the sum."""
    a = split_segments(gpu, added, rows, splits).a
    leading = [np.arange(count) < split for count, split in zip(rows, splits, strict=True)]
    total = values + np.where(np.concatenate(leading), added.astype(np.float64), 0.0)
    return Segments(a, fill_slot(gpu, values), rows, splits, join="sum"), total


def empty_cache(gpu: GpuRuntime, shape: HeadShape, dtype: DTypeLike) -> SharedArray:
    """Return pages of a layer's keys and values for each position, full of NaN, or of guards if in codes."""
    count = pages_of(shape.capacity) * page_elements(shape.kv_heads, shape.head_dim, dtype)
    return fill_slot(gpu, np.full(count, _unused(dtype), dtype))


def cache_view(memory: NDArray[Any], shape: HeadShape) -> NDArray[Any]:
    """Return ``[page, k|v, kv_head, row, head_dim]`` of a cache's memory, as a view."""
    blocks = _head_blocks(memory, shape)[..., : PAGE_POSITIONS * shape.head_dim]
    return blocks.reshape(*blocks.shape[:3], PAGE_POSITIONS, shape.head_dim)


def scales_view(memory: NDArray[np.int8], shape: HeadShape) -> NDArray[np.float32]:
    """Return the scales ``[page, k|v, kv_head, row]`` of a cache of codes, as a view."""
    return _head_blocks(memory, shape)[..., PAGE_POSITIONS * shape.head_dim :].view(np.float32)


def by_position(view: NDArray[Any]) -> NDArray[Any]:
    """Return a copy ``[k|v, kv_head, position, …]`` of such a view of pages that lie in order."""
    return np.concatenate(list(view), axis=2)


def _head_blocks(memory: NDArray[Any], shape: HeadShape) -> NDArray[Any]:
    return memory.reshape(-1, 2, shape.kv_heads, head_elements(shape.head_dim, memory.dtype))


def _unused(dtype: DTypeLike) -> Any:  # noqa: ANN401 - of any type of cache
    """Return the element that stands for an unwritten one: NaN, or the guard pattern, whose scale is tiny."""
    return np.uint8(GUARD).view(np.int8) if np.dtype(dtype) == KV_CODES else np.nan


class GuardedOutput:
    """An output with a guard pattern behind it.

    Args:
        gpu: The device.
        shape: Of the output.
        dtype: Of the output.
        values: Its first content; default the guard pattern.
    """

    def __init__(
        self, gpu: GpuRuntime, shape: tuple[int, ...], dtype: DTypeLike, values: NDArray[Any] | None = None
    ) -> None:
        self._shape, self._dtype = shape, np.dtype(dtype)
        self._used = int(np.prod(shape)) * self._dtype.itemsize
        content = np.full(self._used + GUARD_BYTES, GUARD, np.uint8)
        if values is not None:
            content[: self._used] = np.ascontiguousarray(values, self._dtype).view(np.uint8).reshape(-1)
        self.slot = fill_slot(gpu, content)

    def read(self) -> NDArray[Any]:
        """Return the output.

        Raises:
            KernelError: Bytes behind it were written.
        """
        content = self.slot.read()
        if np.any(content[self._used :] != GUARD):
            raise KernelError("A kernel wrote behind its output.")
        return content[: self._used].view(self._dtype).reshape(self._shape)


class Data:
    """Random data for one run of a case, by name.

    Args:
        on: The device's kernels, which have the types of activations and of the KV cache.
        generator: Makes the data.

    Attributes:
        values: The inputs, as the oracle reads them.
        given: The output of a linear that runs before the operator; None for random numbers.
    """

    def __init__(self, on: GlueKernels, generator: np.random.Generator) -> None:
        self.on, self._gpu, self._generator = on, on.runtime, generator
        self.dtype = np.dtype(np.float16 if on.item_bytes == 2 else np.float32)
        self.values: dict[str, NDArray[Any]] = {}
        self._outputs: dict[str, Callable[[], NDArray[Any]]] = {}
        self._pages = np.empty(0, np.int32)
        self.given: Segments | None = None

    def put(self, name: str, values: NDArray[Any]) -> SharedArray:
        """Return memory with these values, which a kernel may change in place."""
        self.values[name] = values
        return self._guarded(name, values.shape, values.dtype, values)

    def floats(self, name: str, *shape: int, scale: float | NDArray[Any] = 1.0) -> SharedArray:
        """Return float32 of normal numbers."""
        return self.put(name, (self._generator.standard_normal(shape) * scale).astype(np.float32))

    def weights(self, name: str, *shape: int) -> SharedArray:
        """Return float32 near one."""
        return self.put(name, self._generator.uniform(0.5, 1.5, shape).astype(np.float32))

    def inputs(self, name: str, *shape: int) -> SharedArray:
        """Return normal numbers in the activation type."""
        return self.put(name, self._generator.standard_normal(shape).astype(self.dtype))

    def output(self, name: str, *shape: int, dtype: DTypeLike | None = None) -> SharedArray:
        """Return memory to write, by default in the activation type."""
        return self._guarded(name, shape, self.dtype if dtype is None else dtype)

    def table(self, rows: int, columns: int, weight: WeightFormat, name: str = "table") -> LinearWeight:
        """Return a weight, whose values have a name."""
        table = random_weight(self._generator, rows, columns, weight)
        self.values[name] = reference.weight_values(table)
        return table

    def linear(
        self, tokens: int, rows: tuple[int, ...], splits: tuple[int, ...], join: Join, scale: float = 1.0
    ) -> Segments:
        """Return the output of a group of linears, whose sum or concatenation is named ``linear``."""
        if self.given is not None:
            return self.given
        shape = (tokens, sum(rows))
        values, added = ((self._generator.standard_normal(shape) * scale).astype(self.dtype) for _ in "ab")
        if join == "sum":
            segments, self.values["linear"] = summed_segments(self._gpu, values, added, rows, splits)
            return segments
        self.values["linear"] = values.astype(np.float64)
        return split_segments(self._gpu, values, rows, splits)

    def cache(
        self, shape: HeadShape, known: int, written: range = range(0), pages: Sequence[int] = ()
    ) -> KvLayer:
        """Return ``keys`` and ``values`` of ``known`` positions, and of those that an operator writes.

        Args:
            shape: Sizes of the heads.
            known: Positions with values.
            written: Positions that the operator writes.
            pages: Page of memory of each page of positions, -1 for none; by default all lie in order.
        """
        table = np.array(pages or range(pages_of(shape.capacity)), np.int32)
        self._pages = np.maximum(table, 0)
        stored = replace(shape, capacity=PAGE_POSITIONS * (int(table.max()) + 1))
        places = (table[:, None] * PAGE_POSITIONS + np.arange(PAGE_POSITIONS)).ravel()
        held = places[:known] >= 0
        content = empty_cache(self._gpu, stored, self.on.kv_dtype).read()
        values = np.zeros((2, shape.kv_heads, known, shape.head_dim))
        rows = _places(places[:known][held])
        if self.on.kv_dtype == KV_CODES:
            all_scales = scales_view(content, stored)
            if known:
                all_scales[...] = np.nan
            codes = self._generator.integers(-127, 128, values.shape)
            scales = self._generator.uniform(0.005, 0.02, values.shape[:-1]).astype(np.float32)
            cache_view(content, stored)[rows] = np.moveaxis(codes[:, :, held], 2, 0)
            all_scales[rows] = np.moveaxis(scales[:, :, held], 2, 0)
            values[...] = codes * scales[..., None].astype(np.float64)
        else:
            values[...] = self._generator.standard_normal(values.shape).astype(self.on.kv_dtype)
            cache_view(content, stored)[rows] = np.moveaxis(values[:, :, held], 2, 0)
        self.values["keys"], self.values["values"] = values
        memory = fill_slot(self._gpu, content)
        for place, name in enumerate(("keys", "values")):
            own = places[written.start : written.stop]
            self._outputs[name] = partial(_written, memory, stored, own, place)
        return KvLayer(memory, STEP_WORDS)

    def step(
        self, position: int, length: int, head_row: int = 0, slots: tuple[int, int] = (0, 0)
    ) -> SharedArray:
        """Return the step buffer of a pass; ``slots`` are those of recurrent state, read and written."""
        words = np.zeros(STEP_WORDS, np.int32)
        words[[STEP_POSITION, STEP_LENGTH, STEP_HEAD_ROW]] = position, length, head_row
        words[[STEP_STATE_READ, STEP_STATE_WRITTEN]] = slots
        return self.put("step", np.concatenate([words, self._pages]))

    def int8(self, weight: WeightFormat | None, tokens: int, columns: int) -> RoundedInputs | None:
        """Return memory for the int8 codes that a linear of that format reads, if there is one."""
        if weight is None:
            return None
        sizes = code_bytes(tokens, columns, weight.block)
        codes = self.output("int8 codes", sizes[0], dtype=np.uint8)
        blocks = self.output("int8 blocks", sizes[1], dtype=np.uint8)
        return RoundedInputs(codes, blocks, weight.bits, weight.block)

    def rounded(self, weight: WeightFormat, tokens: int, columns: int) -> NDArray[np.float32]:
        """Return the values ``[tokens, columns]`` of the codes in that memory."""
        codes = self.read("int8 codes").view(np.int8)[: tokens * columns]
        if weight.bits == 4:
            codes = codes.reshape(-1, 2, 4).swapaxes(1, 2)
        scales = self.read("int8 blocks").view(np.float32).reshape(-1, 2)[: codes.size // weight.block, :1]
        return (codes.reshape(-1, weight.block) * scales).reshape(tokens, columns)

    def codes(self, grid: CodeGrid, tokens: int, columns: int) -> NpuCodes:
        """Return memory for the codes of an NPU graph, whose outputs are its inputs."""
        slot = self.output("codes", tokens, columns, dtype=grid.dtype)
        factors = self.output("factors", tokens, dtype=np.float32)
        return NpuCodes(slot, slot, factors, self.put("counts", np.zeros(COUNT_WORDS, np.uint32)), 0, grid)

    def read(self, name: str) -> NDArray[Any]:
        """Return an output.

        Raises:
            KernelError: A kernel wrote elsewhere.
        """
        return self._outputs[name]()

    def _guarded(
        self, name: str, shape: tuple[int, ...], dtype: DTypeLike, values: NDArray[Any] | None = None
    ) -> SharedArray:
        output = GuardedOutput(self._gpu, shape, dtype, values)
        self._outputs[name] = output.read
        return output.slot


def _written(memory: SharedArray, shape: HeadShape, places: NDArray[Any], place: int) -> NDArray[Any]:
    """Return keys (0) or values (1) ``[tokens, heads * head_dim]`` of the places that were written."""
    content, own = memory.read(), _places(places)
    view, unused = cache_view(content, shape), _unused(memory.array.dtype)
    stored = view[own]
    view[own] = unused
    if memory.array.dtype == KV_CODES:
        scales = scales_view(content, shape)
        stored = stored * scales[own][..., None]
        scales[own] = np.full(4, unused).view(np.float32)
    if not np.array_equal(content, np.full_like(content, unused), equal_nan=unused != unused):
        raise KernelError("A kernel wrote other positions of the cache.")
    found: NDArray[Any] = stored[:, place].reshape(len(places), -1)
    return found


def _places(places: NDArray[Any]) -> tuple[Any, ...]:
    """Return the index of places in a view of pages, which gives ``[place, k|v, kv_head, …]``."""
    return places // PAGE_POSITIONS, slice(None), slice(None), places % PAGE_POSITIONS
