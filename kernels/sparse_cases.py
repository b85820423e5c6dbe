"""Sparse attention on random data beside its oracles, for the kernel tests.

Memory that no query sees is NaN, or garbage where it holds codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterollm.kernels.cases import (
    GuardedOutput,
    Numbers,
    cache_view,
    empty_cache,
    fill_slot,
    run_launches,
    slot_values,
    step_slot,
)
from heterollm.kernels.formats import BucketCount, ScoreScale, buckets, reference_sparse
from heterollm.kernels.gpu import (
    GpuRuntime,
    GpuSparseAttention,
    HeadTable,
    KvLayer,
    ScoreMemory,
    Scores,
    Selection,
    SparseShape,
)

GARBAGE: Final = 0xA5
"""Code in memory that no kernel has written."""

Selected: TypeAlias = list[list[NDArray[np.int32]]]
"""Positions by query head and block."""


@dataclass(frozen=True, slots=True)
class SparsePass:
    """A pass of sparse attention.

    Args:
        shape: Sizes, those of the cache included.
        position: Position of the first token.
        length: Tokens that exist.
        scores: Scale, window and soft cap.
        order: Key head of each slot.
        keep: Share of the positions that each query head keeps.
        exponent: Of the graph's constant.
        buckets: Number of buckets.
    """

    shape: SparseShape
    position: int
    length: int
    scores: Scores
    order: tuple[int, ...]
    keep: tuple[float, ...]
    exponent: int = 5
    buckets: BucketCount = 1


class SparseCase:
    """A pass on random data, step by step.

    Args:
        gpu: The device.
        sparse: Its launches.
        dtype: Type of activations.
        kv_dtype: Type of the KV cache.
        own: The pass.
        generator: Makes the data.
    """

    def __init__(
        self,
        gpu: GpuRuntime,
        sparse: GpuSparseAttention,
        dtype: DTypeLike,
        kv_dtype: DTypeLike,
        own: SparsePass,
        generator: np.random.Generator,
    ) -> None:
        self.gpu, self.sparse, self.dtype, self.own, self.generator = gpu, sparse, dtype, own, generator
        shape, heads, rng = own.shape, own.shape.heads, generator
        sizes = np.exp2(rng.uniform(-1.5, 1.5, heads.heads)).astype(np.float32)[:, None]
        self.queries = rng.standard_normal((own.length, heads.heads, heads.head_dim), np.float32) * sizes
        content = np.full_like(slot_values(empty_cache(gpu, heads, kv_dtype)), np.nan)
        seen = cache_view(content, heads)[1][:, :, : own.position + own.length]
        seen[...] = rng.standard_normal(seen.shape)
        self.keys, self.values = seen.copy()
        self.cache = KvLayer(fill_slot(gpu, content), 1)
        self.q = fill_slot(gpu, self.queries.reshape(own.length, -1))
        self.step = step_slot(gpu, own.position, own.length)
        self.scales = [
            ScoreScale(tuple(rng.uniform(0.01, 0.04, heads.group).tolist()), step, own.exponent)
            for step in rng.uniform(0.01, 0.04, heads.kv_heads).tolist()
        ]
        pairs = buckets(own.buckets)
        self.table = HeadTable.upload(gpu, heads, self.scales, order=own.order, keep=own.keep, buckets=pairs)
        self.memory, self.selection = ScoreMemory.allocate(gpu, shape), Selection.allocate(gpu, shape)
        for slot in (self.memory.queries, self.memory.keys, self.memory.scores):
            slot.acquire()
            slot.array[...] = GARBAGE
            slot.release()

    def quantise(self) -> tuple[tuple[NDArray[Any], ...], tuple[NDArray[Any], ...]]:
        """Return the codes of queries and keys and the score steps, and those of the oracle."""
        options: dict[str, Any] = {"shape": self.own.shape, "tokens": self.own.length}
        run_launches(
            self.gpu,
            self.sparse.quantise(self.q, self.cache, self.memory, self.table, self.step, **options),
        )
        steps = np.empty(self.own.shape.heads.heads, np.float32)
        self.gpu.copy(steps, self.memory.steps.buffer)
        return (slot_values(self.memory.queries), slot_values(self.memory.keys), steps), self._exact_codes()

    def estimate(self, slots: tuple[int, int]) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        """Return the scores of slots from random codes, and those of the oracle."""
        for slot in (self.memory.queries, self.memory.keys):
            slot.acquire()
            slot.array[...] = self.generator.integers(0, 256, slot.array.shape)
            slot.release()
        queries, keys = slot_values(self.memory.queries), slot_values(self.memory.keys)
        options: dict[str, Any] = {"shape": self.own.shape, "slots": slots, "exponent": self.own.exponent}
        run_launches(self.gpu, [self.sparse.estimate(self.memory, **options)])
        part = slice(*slots)
        exact = np.full((len(queries), queries.shape[1], keys.shape[1]), GARBAGE, np.uint8)
        exact[part] = reference_sparse.estimate(queries[part], keys[part], self.own.exponent)
        return slot_values(self.memory.scores), exact

    def put_scores(self, codes: NDArray[Any], steps: Sequence[float] | NDArray[Any]) -> None:
        """Write codes of scores, and their steps by query head."""
        self.memory.scores.acquire()
        self.memory.scores.array[...] = codes
        self.memory.scores.release()
        self.gpu.copy(self.memory.steps.buffer, np.asarray(steps, np.float32))

    def select(self, *ranges: tuple[int, int]) -> Selected:
        """Select the positions of some ranges of slots, default all; return those of all heads."""
        shape = self.own.shape
        inputs = self.memory, self.table, self.selection, self.step
        run_launches(
            self.gpu,
            [
                self.sparse.select(*inputs, shape=shape, slots=slots, scores=self.own.scores)
                for slots in ranges or ((0, shape.heads.kv_heads),)
            ],
        )
        counts = np.empty((shape.heads.heads, shape.blocks), np.int32)
        positions = np.empty((*counts.shape, shape.keys), np.int32)
        self.gpu.copy(counts, self.selection.counts.buffer)
        self.gpu.copy(positions, self.selection.positions.buffer)
        return [
            [row[:count].copy() for row, count in zip(rows, held, strict=True)]
            for rows, held in zip(positions, counts, strict=True)
        ]

    def block_weights(
        self, codes: NDArray[Any], steps: NDArray[Any], head: int, block: int
    ) -> NDArray[np.float64] | None:
        """Return the oracle's weights of one block of a head; None for a block of padding."""
        own, shape, group = self.own, self.own.shape, self.own.shape.heads.group
        first, stop = block * shape.block, min((block + 1) * shape.block, own.length)
        if first >= stop:
            return None
        start = head % group * shape.tokens
        return reference_sparse.weights(
            codes[own.order.index(head // group), start + first : start + stop],
            own.position + first,
            float(steps[head]) * own.scores.scale,
            window=own.scores.window,
            soft_cap=own.scores.soft_cap,
        )

    def attend(self, selected: Selected) -> Numbers:
        """Attend to what the last selection has left on the device; return the output and the exact one."""
        own, heads, block = self.own, self.own.shape.heads, self.own.shape.block
        out = GuardedOutput(self.gpu, self.queries.shape, self.dtype)
        inputs = self.q, self.cache, self.table, self.selection, out.slot, self.step
        options: dict[str, Any] = {"shape": own.shape, "scores": own.scores, "tokens": own.length}
        run_launches(self.gpu, self.sparse.attend(*inputs, slots=(0, heads.kv_heads), **options))
        exact = np.zeros(self.queries.shape)
        for head, blocks in enumerate(selected):
            for first, kept in zip(range(0, own.length, block), blocks, strict=False):
                exact[first : first + block, head] = reference_sparse.attention(
                    self.queries[first : first + block, head],
                    self.keys[head // heads.group],
                    self.values[head // heads.group],
                    kept,
                    position=own.position + first,
                    scale=own.scores.scale,
                    window=own.scores.window,
                    soft_cap=own.scores.soft_cap,
                )
        return out.read().reshape(own.length, -1), exact.reshape(own.length, -1)

    def _exact_codes(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float64]]:
        own, heads = self.own, self.own.shape.heads
        queries = np.full((heads.kv_heads, heads.group, own.shape.tokens, heads.head_dim), 128, np.uint8)
        keys = np.full((heads.kv_heads, own.shape.keys, heads.head_dim), 128, np.uint8)
        steps = np.zeros((heads.kv_heads, heads.group))
        for slot, head in enumerate(own.order):
            scale = self.scales[head]
            members = self.queries[:, head * heads.group : (head + 1) * heads.group]
            largest = (np.abs(members).max(axis=(0, 2)) / np.array(scale.query_steps)).max()
            largest_key = float(np.abs(self.keys[head]).max()) / scale.key_step
            pairs = buckets(own.buckets)
            factors = reference_sparse.nearest_bucket(float(largest), largest_key, pairs)
            known = own.position + own.length
            keys[slot, :known] = reference_sparse.codes(self.keys[head], 1 / scale.key_step / factors[1])
            for member, step in enumerate(scale.query_steps):
                codes = reference_sparse.codes(members[:, member], 1 / step / factors[0])
                queries[slot, member, : own.length] = codes
            steps[head] = np.array(scale.score_steps) * (factors[0] * factors[1])
        return queries.reshape(heads.kv_heads, -1, heads.head_dim), keys, steps.ravel()
