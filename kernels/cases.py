"""Operators on random data beside their float64 oracles, for `heterollm doctor` and the kernel tests.

A case returns the output of the GPU and the exact result. Outputs have a guard pattern behind them, inputs
have NaN where a kernel must not read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterollm.base import KernelError
from heterollm.kernels.formats import CodeGrid, reference_layers
from heterollm.kernels.gpu import (
    COUNT_WORDS,
    FACTOR_BYTES,
    KV_CODES,
    STEP_HEAD_ROW,
    STEP_LENGTH,
    STEP_POSITION,
    STEP_WORDS,
    DeviceMemory,
    GpuBuffer,
    GpuGlue,
    GpuRuntime,
    HeadShape,
    KvLayer,
    Launch,
    NpuCodes,
    Rotation,
    Scores,
    Segments,
    SharedArray,
    head_stride,
    scales_start,
)
from heterollm.kernels.ops import Activation, Join

Numbers: TypeAlias = tuple[NDArray[Any], NDArray[np.float64]]
"""The output of the processor and the exact result."""

GUARD: Final = 0xA5
GUARD_BYTES: Final = 4096
PADDING_ROWS: Final = 3
EPSILON: Final = 1e-5


def fill_slot(gpu: GpuRuntime, values: NDArray[Any]) -> SharedArray:
    """Return shared memory with these values."""
    slot = gpu.shared(values.shape, values.dtype)
    slot.acquire()
    slot.array[...] = values
    slot.release()
    return slot


def slot_values(slot: SharedArray) -> NDArray[Any]:
    """Return a copy of the values that the memory holds."""
    slot.acquire()
    values = slot.array.copy()
    slot.release()
    return values


def run_launches(gpu: GpuRuntime, launches: Iterable[Launch]) -> None:
    """Run the launches one after the other and wait for the last."""
    for launch in launches:
        launch()
    gpu.finish()


def step_slot(gpu: GpuRuntime, position: int = 0, length: int = 0, head_row: int = 0) -> SharedArray:
    """Return the words that a pass reads: position, length and first row of the head."""
    words = np.zeros(STEP_WORDS, np.int32)
    words[[STEP_POSITION, STEP_LENGTH, STEP_HEAD_ROW]] = position, length, head_row
    return fill_slot(gpu, words)


def split_segments(
    gpu: GpuRuntime, values: NDArray[Any], rows: tuple[int, ...], splits: tuple[int, ...]
) -> Segments:
    """Return both segments of a value; the first has NaN rows behind it, as padded NPU output may."""
    a, b = reference_layers.split_members(values, rows, splits)
    a = np.concatenate([a, np.full((PADDING_ROWS, a.shape[1]), np.nan, a.dtype)])
    dummy = np.full((1, 1), np.nan, values.dtype)
    first, second = (fill_slot(gpu, part if part.size else dummy) for part in (a, b))
    return Segments(first, second, rows, splits)


def summed_segments(
    gpu: GpuRuntime, values: NDArray[Any], added: NDArray[Any], rows: tuple[int, ...], splits: tuple[int, ...]
) -> tuple[Segments, NDArray[np.float64]]:
    """Return segments of a value and of another that is added to its leading rows, and the sum."""
    a = split_segments(gpu, added, rows, splits).a
    leading = [np.arange(count) < split for count, split in zip(rows, splits, strict=True)]
    total = values + np.where(np.concatenate(leading), added.astype(np.float64), 0.0)
    return Segments(a, fill_slot(gpu, values), rows, splits, join="sum"), total


def empty_cache(gpu: GpuRuntime, shape: HeadShape, dtype: DTypeLike, layers: int = 2) -> SharedArray:
    """Return a KV cache full of NaN, or of guard patterns if it has codes."""
    size = layers * 2 * shape.kv_heads * head_stride(shape.capacity, shape.head_dim, np.dtype(dtype))
    return fill_slot(gpu, np.full(size, _unused(dtype), dtype))


def cache_view(memory: NDArray[Any], shape: HeadShape) -> NDArray[Any]:
    """Return ``[layer, k|v, kv_head, position, head_dim]`` of a cache's memory, as a view."""
    blocks = _head_blocks(memory, shape)[..., : shape.capacity * shape.head_dim]
    return blocks.reshape(*blocks.shape[:3], shape.capacity, shape.head_dim)


def scales_view(memory: NDArray[np.int8], shape: HeadShape) -> NDArray[np.float32]:
    """Return the scales ``[layer, k|v, kv_head, position]`` of a cache of codes, as a view."""
    start = scales_start(shape.capacity, shape.head_dim)
    return _head_blocks(memory, shape)[..., start : start + 4 * shape.capacity].view(np.float32)


def _head_blocks(memory: NDArray[Any], shape: HeadShape) -> NDArray[Any]:
    stride = head_stride(shape.capacity, shape.head_dim, memory.dtype)
    return memory.reshape(-1, 2, shape.kv_heads, stride)


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
        content = slot_values(self.slot)
        if np.any(content[self._used :] != GUARD):
            raise KernelError("A kernel wrote behind its output.")
        return content[: self._used].view(self._dtype).reshape(self._shape)


@dataclass(frozen=True, slots=True)
class _NormData:
    """Inputs of a norm with an added value, and the exact sum of both."""

    residual: NDArray[Any]
    slot: GuardedOutput
    weights: NDArray[Any]
    delta: Segments
    bias: GpuBuffer | None
    post: GpuBuffer | None
    total: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class LayerCases:
    """The operators between the linear layers, each as a method with the parameters of a case.

    Args:
        gpu: The device.
        layers: Its operators.
        activation_dtype: Type of inputs and outputs of linear layers.
        cache_dtype: Type of the KV cache.
        generator: Makes the data.
        join: How the segments of a linear's output combine.
    """

    gpu: GpuRuntime
    layers: GpuGlue
    activation_dtype: np.dtype[Any]
    cache_dtype: np.dtype[Any]
    generator: np.random.Generator
    join: Join = "concatenate"

    def norm(
        self,
        tokens: int,
        hidden: int,
        split: int,
        *,
        biased: bool = False,
        post: bool = False,
        scale: float = 1.0,
        centered: bool = False,
    ) -> tuple[Numbers, Numbers]:
        """Add a linear layer's output to the residual and norm the sum; return the norm and the sum.

        Args:
            tokens: Rows.
            hidden: Columns.
            split: Columns of the added value that lie in its first segment.
            biased: Whether the added value has a bias.
            post: Whether the added value is normed first.
            scale: Of the added value.
            centered: Whether the norm is a LayerNorm.
        """
        data = self._norm_data(tokens, hidden, split, biased, post, scale)
        out = GuardedOutput(self.gpu, (tokens, hidden), self.activation_dtype)
        launch = self.layers.rms_norm(
            data.slot.slot,
            self.gpu.upload(data.weights if centered else data.weights[0]),
            out.slot,
            hidden=hidden,
            tokens=tokens,
            epsilon=EPSILON,
            delta=data.delta,
            bias=data.bias,
            post=data.post,
            centered=centered,
        )
        run_launches(self.gpu, [launch])
        exact = _normed(data.total, data.weights, centered=centered)
        return (out.read(), exact), (data.slot.read(), data.total)

    def final_norm(
        self,
        tokens: int,
        hidden: int,
        split: int,
        *,
        head_row: int,
        biased: bool = False,
        post: bool = False,
        scale: float = 1.0,
        centered: bool = False,
    ) -> tuple[Numbers, Numbers]:
        """Norm the last rows of the sum without storing it; return the norm and the residual.

        Args:
            tokens: Rows.
            hidden: Columns.
            split: Columns of the added value that lie in its first segment.
            head_row: First row that is normed.
            biased: Whether the added value has a bias.
            post: Whether the added value is normed first.
            scale: Of the added value.
            centered: Whether the norm is a LayerNorm.
        """
        data = self._norm_data(tokens, hidden, split, biased, post, scale)
        out = GuardedOutput(self.gpu, (tokens - head_row, hidden), self.activation_dtype)
        launch = self.layers.final_norm(
            data.slot.slot,
            self.gpu.upload(data.weights if centered else data.weights[0]),
            out.slot,
            step_slot(self.gpu, 0, tokens, head_row),
            rows=tokens - head_row,
            epsilon=EPSILON,
            delta=data.delta,
            bias=data.bias,
            post=data.post,
            centered=centered,
        )
        run_launches(self.gpu, [launch])
        exact = _normed(data.total[head_row:], data.weights, centered=centered)
        return (out.read(), exact), (data.slot.read(), data.residual.astype(np.float64))

    def rope(
        self,
        tokens: int,
        position: int,
        shape: HeadShape,
        splits: tuple[int, int, int],
        *,
        rotary: int | None = None,
        biased: bool = False,
        normed: bool = False,
        joint: bool = False,
        limit: float = 0.0,
    ) -> tuple[Numbers, Numbers, Numbers]:
        """Turn queries and keys and store keys and values; return queries, keys and values.

        Args:
            tokens: Rows.
            position: First position.
            shape: Heads and the cache's capacity.
            splits: Columns of each member that lie in the first segment.
            rotary: Columns of a head that turn; default all.
            biased: Whether the members have biases.
            normed: Whether the heads of queries and keys are normed first.
            joint: Whether one norm spans all heads of queries, another all of keys.
            limit: Bound of the magnitude before the rotation; 0 for none.

        Raises:
            KernelError: Other positions of the cache were written.
        """
        generator, rows, head_dim = self.generator, shape.rows, shape.head_dim
        segments, qkv = self._output(tokens, rows, splits)
        widths = rows[:2] if joint else (head_dim, head_dim)
        bias, norms = _random(generator, sum(rows)), generator.uniform(0.5, 1.5, sum(widths))
        norms = norms.astype(np.float32)
        turned = head_dim if rotary is None else rotary
        angles = generator.uniform(0.0, 6.0, (shape.capacity, turned // 2))
        tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        # A table without columns still needs memory.
        cos, sin = (self.gpu.upload(table if table.size else np.zeros(1, np.float32)) for table in tables)
        queries = GuardedOutput(self.gpu, (tokens, rows[0]), np.float32)
        cache = empty_cache(self.gpu, shape, self.cache_dtype)
        launch = self.layers.rope_and_store(
            segments,
            self.gpu.upload(bias) if biased else None,
            queries.slot,
            KvLayer(cache, 1),
            step_slot(self.gpu, position, tokens),
            shape=shape,
            rotation=Rotation(
                *(cos, sin, rotary, self.gpu.upload(norms) if normed else None, EPSILON), joint, limit
            ),
            tokens=tokens,
        )
        run_launches(self.gpu, [launch])
        inputs = np.split(qkv + (bias if biased else 0), np.cumsum(rows)[:-1], axis=1)
        exact = inputs
        if normed:
            parts = zip(inputs, widths, np.split(norms, [widths[0]]), strict=False)
            exact[:2] = [
                reference_layers.rms_norm(part.reshape(-1, width), own, EPSILON) for part, width, own in parts
            ]
        if limit:
            exact = [np.clip(part, -limit, limit) for part in exact]
        q, k, v = (part.reshape(tokens, -1, head_dim) for part in exact)
        angle = [table[position : position + tokens] for table in tables]
        q, k = reference_layers.rotate(q, *angle), reference_layers.rotate(k, *angle)
        written = slot_values(cache)
        view = cache_view(written, shape)[1, :, :, position : position + tokens]
        stored, unused = view.copy(), _unused(self.cache_dtype)
        view[...] = unused
        if self.cache_dtype == KV_CODES:
            scales = scales_view(written, shape)[1, :, :, position : position + tokens]
            stored = stored * scales[..., None]
            scales.view(np.int8)[...] = unused
        keys, values = stored.transpose(0, 2, 1, 3).reshape(2, tokens, -1)
        if not np.array_equal(written, np.full_like(written, unused), equal_nan=unused != unused):
            raise KernelError("A kernel wrote other positions of the cache.")
        results = zip((queries.read(), keys, values), (q, k, v), strict=True)
        first, second, third = ((actual, part.reshape(tokens, -1)) for actual, part in results)
        return first, second, third

    def attention(
        self,
        tokens: int,
        position: int,
        shape: HeadShape,
        *,
        scores: Scores | None = None,
        spread: float = 0.0,
        bucket: int | None = None,
        parts: int | None = None,
    ) -> Numbers:
        """Attend to a cache that is NaN behind the last position.

        Args:
            tokens: Rows.
            position: First position.
            shape: Heads and the cache's capacity.
            scores: Scale, window and soft cap; default the scale alone.
            spread: Decades between the queries of the first head and those of the last.
            bucket: Positions that the kernel is made for; default the capacity.
            parts: Parts that positions are divided into; default the kernel's choice.
        """
        scores = scores or Scores(shape.head_dim**-0.5)
        sizes = np.logspace(-spread, spread / 2, shape.heads).astype(np.float32)[:, None]
        queries = _random(self.generator, (tokens, shape.heads, shape.head_dim), scale=2.0) * sizes
        content = slot_values(empty_cache(self.gpu, shape, self.cache_dtype))
        seen = cache_view(content, shape)[1, :, :, : position + tokens]
        exact_cache = seen
        if self.cache_dtype == KV_CODES:
            all_scales = scales_view(content, shape)
            all_scales[...] = np.nan
            scales = all_scales[1, :, :, : position + tokens]
            seen[...] = self.generator.integers(-127, 128, seen.shape)
            scales[...] = self.generator.uniform(0.005, 0.02, scales.shape)
            exact_cache = seen * scales.astype(np.float64)[..., None]
        else:
            seen[...] = self.generator.standard_normal(seen.shape)
        out = GuardedOutput(self.gpu, queries.shape, self.activation_dtype)
        launches = self.layers.attention(
            fill_slot(self.gpu, queries.reshape(tokens, -1)),
            KvLayer(fill_slot(self.gpu, content), 1),
            out.slot,
            step_slot(self.gpu, position, tokens),
            shape=shape,
            scores=scores,
            tokens=tokens,
            bucket=bucket or shape.capacity,
            parts=parts,
        )
        run_launches(self.gpu, launches)
        exact = reference_layers.attention(
            queries,
            *exact_cache.astype(np.float64),
            position=position,
            scale=scores.scale,
            window=scores.window,
            soft_cap=scores.soft_cap,
        )
        return out.read().reshape(tokens, -1), exact.reshape(tokens, -1)

    def gated(
        self,
        tokens: int,
        width: int,
        splits: tuple[int, int],
        *,
        activation: Activation = "silu",
        biased: bool = False,
        scale: float = 1.0,
    ) -> Numbers:
        """Multiply the activated gate with the up projection.

        Args:
            tokens: Rows.
            width: Columns of each.
            splits: Columns of each that lie in the first segment.
            activation: Of the gate.
            biased: Whether both have a bias.
            scale: Of the inputs.
        """
        segments, gate_up = self._output(tokens, (width, width), splits, scale)
        bias = _random(self.generator, 2 * width)
        out = GuardedOutput(self.gpu, (tokens, width), self.activation_dtype)
        launch = self.layers.gated_activation(
            segments,
            out.slot,
            tokens=tokens,
            intermediate=width,
            activation=activation,
            bias=self.gpu.upload(bias) if biased else None,
        )
        run_launches(self.gpu, [launch])
        exact = gate_up + (bias if biased else 0)
        gate, up = np.split(exact, 2, axis=1)
        return out.read(), reference_layers.gated_activation(gate, up, activation)

    def soft_cap(self, rows: int, vocabulary: int, cap: float) -> Numbers:
        """Cap logits from far below the cap to far above it, in place."""
        signs = self.generator.choice([-1.0, 1.0], (rows, vocabulary))
        logits = (signs * np.logspace(-5, 3, vocabulary)).astype(np.float32)
        slot = GuardedOutput(self.gpu, logits.shape, np.float32, logits)
        run_launches(self.gpu, [self.layers.soft_cap(slot.slot, cap, rows=rows, vocabulary=vocabulary)])
        return slot.read(), reference_layers.capped(logits, cap)

    def logits(self, rows: int, vocabulary: int, split: int) -> Numbers:
        """Join the segments of the logits as float32."""
        segments, logits = self._output(rows, (vocabulary,), (split,))
        out = GuardedOutput(self.gpu, logits.shape, np.float32)
        run_launches(self.gpu, [self.layers.join_logits(segments, out.slot, rows=rows)])
        return out.read(), logits

    def codes(self, tokens: int, columns: int, grid: CodeGrid) -> Numbers:
        """Write the codes of a random input, and read them back as if they were an NPU's output."""
        x = _random(self.generator, (tokens, columns), self.activation_dtype)
        slot = self.gpu.shared((tokens, columns), grid.dtype)
        count = max(1, len(grid.member_steps))
        share = columns // count
        members = (*[share] * (count - 1), columns - share * (count - 1))
        factors, counts = (
            DeviceMemory(self.gpu.scratch(size), size) for size in (tokens * FACTOR_BYTES, COUNT_WORDS * 4)
        )
        codes = NpuCodes(slot, slot, factors, counts, 0, grid)
        out = GuardedOutput(self.gpu, x.shape, self.activation_dtype)
        launches = (
            self.layers.write_codes(fill_slot(self.gpu, x), codes, tokens=tokens, columns=columns),
            self.layers.read_codes(codes, out.slot, tokens=tokens, member_rows=members),
        )
        run_launches(self.gpu, launches)
        return out.read(), grid.values(*grid.codes(x), members).astype(np.float64)

    def _output(
        self, tokens: int, rows: tuple[int, ...], splits: tuple[int, ...], scale: float = 1.0
    ) -> tuple[Segments, NDArray[np.float64]]:
        """Return a random output of a linear group, in segments, and its values."""
        values = _random(self.generator, (tokens, sum(rows)), self.activation_dtype, scale)
        if self.join == "sum":
            added = _random(self.generator, values.shape, self.activation_dtype, scale)
            return summed_segments(self.gpu, values, added, rows, splits)
        return split_segments(self.gpu, values, rows, splits), values.astype(np.float64)

    def _norm_data(
        self, tokens: int, hidden: int, split: int, biased: bool, post: bool, scale: float
    ) -> _NormData:
        """Return the inputs of a norm; see :meth:`norm` for the arguments."""
        own, *weights = self.generator.uniform(0.5, 1.5, (3, hidden)).astype(np.float32)
        residual = _random(self.generator, (tokens, hidden))
        segments, delta = self._output(tokens, (hidden,), (split,), scale)
        bias = _random(self.generator, hidden)
        return _NormData(
            residual=residual,
            slot=GuardedOutput(self.gpu, residual.shape, np.float32, residual),
            weights=np.array(weights),
            delta=segments,
            bias=self.gpu.upload(bias) if biased else None,
            post=self.gpu.upload(own) if post else None,
            total=_added(residual, delta, bias if biased else None, own if post else None),
        )


def _normed(x: NDArray[np.float64], weights: NDArray[Any], *, centered: bool) -> NDArray[np.float64]:
    if centered:
        return reference_layers.layer_norm(x, weights[0], weights[1], EPSILON)
    return reference_layers.rms_norm(x, weights[0], EPSILON)


def _random(
    generator: np.random.Generator,
    shape: int | tuple[int, ...],
    dtype: DTypeLike = np.float32,
    scale: float = 1.0,
) -> NDArray[Any]:
    return (generator.standard_normal(shape) * scale).astype(dtype)


def _added(
    residual: NDArray[Any], delta: NDArray[Any], bias: NDArray[Any] | None, post: NDArray[Any] | None
) -> NDArray[np.float64]:
    """Return the residual with the added value, which has its bias and its own norm."""
    added = delta.astype(np.float64) + (0 if bias is None else bias)
    if post is not None:
        added = reference_layers.rms_norm(added, post, EPSILON)
    return residual.astype(np.float64) + added
