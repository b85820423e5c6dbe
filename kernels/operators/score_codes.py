"""Codes of queries and keys, and the scores that are estimated from them on the GPU (shadowAttn)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.base import KernelError
from heterollm.kernels.formats import largest_code, zero_code
from heterollm.kernels.gpu import (
    KV_CODES,
    Argument,
    Defines,
    DeviceMemory,
    GlueKernels,
    GpuWork,
    HeadShape,
    HeadTable,
    KernelStyle,
    KvLayer,
    Launch,
    ScoreMemory,
    SharedArray,
    SparseShape,
)
from heterollm.kernels.npu import NpuBackend, ScoresShard
from heterollm.kernels.operators.attention_work import visible
from heterollm.kernels.operators.operator import StepCategory

STEPS: Final[Mapping[str, StepCategory]] = {"score codes": "attention", "scores": "attention"}

CODE_FILES: Final = ("codes.h", "sparse.h")
ESTIMATE_TILE: Final[dict[KernelStyle, tuple[int, int]]] = {"vector": (64, 64), "simt": (64, 8)}
"""Keys and rows of a work-group of the estimator, as in score_estimate.cl."""


def write_score_codes(
    on: GlueKernels,
    q: DeviceMemory,
    cache: KvLayer,
    memory: ScoreMemory,
    table: HeadTable,
    step: SharedArray,
    *,
    shape: SparseShape,
    window: int = 0,
    tokens: int | None = None,
) -> tuple[Launch, ...]:
    """Return the launches that write the codes of all queries and visible keys, and the score steps.

    With several buckets each key head takes the nearest one: the largest codes that its keys and its
    members' queries would have are compared with 127 times the bucket's factors, by the sum of both
    squared differences. Rows of tokens and keys that do not exist have the code 128, whatever lies in
    memory.

    Args:
        on: The device's kernels.
        q: float32 ``[tokens, heads * head_dim]``, after RoPE.
        cache: Keys and values, those of this pass included.
        memory: Target of the codes.
        table: Constants of the layer.
        step: The step buffer.
        shape: OperatorSizes of the pass.
        window: Positions visible to a token, 0 for all; those before may be in no page of the cache.
        tokens: Rows of ``q``; by default those of the shape, its padding included.
    """
    heads = shape.heads
    q.require((tokens or shape.tokens) * heads.query_columns * 4, "attention query")
    memory.require(shape)
    if on.kv_dtype == KV_CODES:
        raise KernelError("Sparse attention reads no KV cache of 8 bits.")
    buckets: Defines = {"BUCKETS": table.buckets} if table.buckets > 1 else {}
    defines = sparse_defines(shape) | on.cache_defines | buckets
    sizes = on.table(cache, heads), *map(np.int32, (window, shape.tokens, shape.keys))
    inputs = q, cache.memory, step, table.order, table.numbers
    position_bytes = on.position_bytes(heads)
    work = functools.partial(score_codes_work, heads, step.array, shape.tokens, position_bytes)

    def launch(name: str, label: str, arguments: tuple[Argument, ...], written: int) -> Launch:
        files = (*CODE_FILES, "score_codes.cl")
        kernel, _, items = on.kernel(files, name, lambda _: defines, widths=(heads.head_dim,))
        size = shape.runs * items, heads.kv_heads
        own = functools.partial(work, written)
        return on.runtime.launch(kernel, arguments, size, (items, 1), label, work=own)

    targets = memory.queries, memory.keys, memory.steps
    writing = launch(
        "write_score_codes",
        "score codes",
        (*inputs, *targets, *sizes, *((memory.largest, table.factors) if buckets else ())),
        shape.query_bytes + shape.key_bytes,
    )
    if not buckets:
        return (writing,)
    return launch("find_largest_steps", "score ranges", (*inputs, memory.largest, *sizes), 0), writing


def estimate_scores(
    on: GlueKernels, memory: ScoreMemory, *, shape: SparseShape, slots: tuple[int, int], exponent: int
) -> Launch:
    """Return the launch that writes the score codes of slots, the same that an NPU's graph computes.

    A code is the sum of products of both codes times ``2 ** -exponent``, to the nearest integer, halves
    to the even one, within the range.

    Args:
        on: The device's kernels.
        memory: The codes, and the target.
        shape: OperatorSizes of the pass.
        slots: First slot, and the one behind the last.
        exponent: Of the graph's constant.
    """
    memory.require(shape)
    count, _ = slot_counts(shape, slots)
    files = (*CODE_FILES, "score_estimate.cl")
    kernel, style, items = on.kernel(files, "estimate_scores", lambda _: sparse_defines(shape))
    keys, rows = ESTIMATE_TILE["vector" if style == "vector" else "simt"]
    arguments: tuple[Argument, ...] = (
        *(memory.queries, memory.keys, memory.scores),
        *map(np.int32, (slots[0], shape.rows, shape.keys)),
        np.float32(2.0**-exponent),
    )
    size = -(-shape.keys // keys) * items, -(-shape.rows // rows), count
    work = functools.partial(estimate_work, count, shape.rows, shape.keys, shape.heads.head_dim)
    return on.runtime.launch(kernel, arguments, size, (items, 1, 1), "score estimate", work=work)


def score_codes_work(
    shape: HeadShape, step: NDArray[np.int32], tokens: int, position_bytes: int, written_bytes: int
) -> GpuWork:
    """Return the work of writing the codes of queries and keys, or of finding their maxima.

    Args:
        shape: OperatorSizes of the heads.
        step: The step buffer.
        tokens: Tokens of the pass.
        position_bytes: Bytes of the cache for one position of a head.
        written_bytes: Bytes of the codes, padding included.
    """
    rows, _, last = visible(step, tokens, 0)
    queries, keys = rows * shape.query_columns, last * shape.kv_heads
    flops = 4 * (queries + keys * shape.head_dim)
    return GpuWork("elementwise", flops, 4 * queries + position_bytes * keys, written_bytes)


def estimate_work(heads: int, rows: int, keys: int, head_dim: int) -> GpuWork:
    """Return the work of estimating scores on the GPU, padding included.

    Args:
        heads: Key heads.
        rows: Rows of queries of each.
        keys: Keys of each.
        head_dim: Elements of a head.
    """
    scores = heads * rows * keys
    return GpuWork("attention", 2 * scores * head_dim, heads * (rows + keys) * head_dim, scores, rows)


def exact_codes(values: NDArray[Any], reciprocal_step: float) -> NDArray[np.uint8]:
    """Return 8-bit codes of values, to the nearest step, halves to the even one, within the range."""
    steps = values.astype(np.float32) * np.float32(reciprocal_step)
    rounded: NDArray[np.uint8] = (np.clip(np.rint(steps), -128, 127) + 128).astype(np.uint8)
    return rounded


def nearest_bucket(
    query_steps: float, key_steps: float, factors: tuple[tuple[float, float], ...]
) -> tuple[float, float]:
    """Return the factors of the bucket nearest to the largest codes of a head without buckets."""
    distances = [(query_steps - 127 * own[0]) ** 2 + (key_steps - 127 * own[1]) ** 2 for own in factors]
    return factors[int(np.argmin(distances))]


def exact_estimate(queries: NDArray[np.uint8], keys: NDArray[np.uint8], exponent: int) -> NDArray[np.uint8]:
    """Return the codes of the scores of ``queries [slots, rows, d]`` and ``keys [slots, keys, d]``."""
    rows, columns = (part.astype(np.int64) - 128 for part in (queries, keys))
    exact = rows @ columns.swapaxes(1, 2) * 2.0**-exponent
    rounded: NDArray[np.uint8] = (np.clip(np.rint(exact), -128, 127) + 128).astype(np.uint8)
    return rounded


def sparse_defines(shape: SparseShape) -> Defines:
    """Return the definitions of all kernels on codes of queries and keys."""
    return {"HEAD_DIM": shape.heads.head_dim, "GROUP": shape.heads.group, "NPU_CODES": 8}


def slot_counts(shape: SparseShape, slots: tuple[int, int]) -> tuple[int, int]:
    """Return the numbers of slots and of their query heads."""
    first, stop = slots
    if not 0 <= first < stop <= shape.heads.kv_heads:
        raise KernelError(f"Slots {first} to {stop} are not among those of {shape.heads.kv_heads} heads.")
    return stop - first, (stop - first) * shape.heads.group


@dataclass(frozen=True, slots=True)
class ScoresCase:
    """Scores of several heads.

    Args:
        heads: Key heads of the graph.
        tokens: Queries of each head.
        keys: Keys of each head.
        head_dim: Elements of a query and of a key.
        seed: Of the random codes.
    """

    heads: int
    tokens: int
    keys: int
    head_dim: int
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.heads} head{'s' * (self.heads > 1)}, {self.tokens} tokens, {self.keys} keys"

    def data(self) -> tuple[ScoresShard, dict[str, NDArray[np.uint8]], NDArray[np.int64]]:
        """Return the shard, the codes of queries and keys, and the exact codes ``[heads, tokens, keys]``."""
        generator = np.random.default_rng(self.seed)
        inputs = {
            name: generator.integers(0, 256, (self.heads, count, self.head_dim), np.uint8)
            for name, count in (("queries", self.tokens), ("keys", self.keys))
        }
        queries, keys = (codes.astype(np.int64) - zero_code(8) for codes in inputs.values())
        products = queries @ keys.swapaxes(1, 2)
        # The largest scores saturate.
        exponent = math.frexp(float(np.abs(products).max()) / largest_code(8))[1] - 1
        shard = ScoresShard(self.heads, self.keys, self.head_dim, max(exponent, 0))
        exact = np.rint(products * 2.0**-shard.exponent).astype(np.int64)
        zero = zero_code(8)
        return shard, inputs, np.clip(exact, -zero, largest_code(8)) + zero

    def on_npu(self, npu: NpuBackend) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the codes that an NPU computes, and the exact ones."""
        shard, inputs, exact = self.data()
        scores = np.zeros(exact.shape, np.uint8)
        npu.prepare(shard, self.tokens).bind(inputs, {"scores": scores})()
        return scores, exact
