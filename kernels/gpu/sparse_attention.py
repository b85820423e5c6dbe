"""Sparse attention of a prefill pass as prepared launches (shadowAttn).

Four steps in the order of a pass: :meth:`GpuSparseAttention.quantise` writes codes of queries and keys; an
NPU's graph or :meth:`GpuSparseAttention.estimate` makes scores of them; :meth:`GpuSparseAttention.select`
takes the positions with the largest shares of attention for each block of queries;
:meth:`GpuSparseAttention.attend` attends to these positions alone. The last three serve a range of slots, so
that a unit's launches may follow its graph.
"""

from __future__ import annotations

import functools
from typing import Final

import numpy as np

from heterollm.base import KernelError
from heterollm.kernels.gpu.attention import LOG2_E, GpuAttention
from heterollm.kernels.gpu.attention_grid import PREFILL_ROWS, AttentionGrid
from heterollm.kernels.gpu.cache_layout import KV_CODES
from heterollm.kernels.gpu.glue_kernels import Defines
from heterollm.kernels.gpu.heads import KvLayer, Scores
from heterollm.kernels.gpu.launch import Argument, Launch
from heterollm.kernels.gpu.memory import DeviceMemory, SharedArray
from heterollm.kernels.gpu.parameters import KernelStyle
from heterollm.kernels.gpu.rounding import RoundedInputs
from heterollm.kernels.gpu.sparse_memory import HeadTable, ScoreMemory, Selection, SparseShape
from heterollm.kernels.gpu.variants import Variant
from heterollm.kernels.gpu.work import (
    estimate_work,
    score_codes_work,
    selection_work,
    sparse_attention_work,
)

CODE_FILES: Final = ("codes.h", "sparse.h")
ESTIMATE_TILE: Final[dict[KernelStyle, tuple[int, int]]] = {"vector": (64, 64), "simt": (64, 8)}
"""Keys and rows of a work-group of the estimator, as in score_estimate.cl."""


class GpuSparseAttention(GpuAttention):
    """Makes the launches of sparse attention; see :class:`GlueKernels`."""

    def quantise(
        self,
        q: DeviceMemory,
        cache: KvLayer,
        memory: ScoreMemory,
        table: HeadTable,
        step: SharedArray,
        *,
        shape: SparseShape,
        tokens: int | None = None,
    ) -> tuple[Launch, ...]:
        """Return the launches that write the codes of all queries and visible keys, and the score steps.

        With several buckets each key head takes the nearest one: the largest codes that its keys and its
        members' queries would have are compared with 127 times the bucket's factors, by the sum of both
        squared differences. Rows of tokens and keys that do not exist have the code 128, whatever lies in
        memory.

        Args:
            q: float32 ``[tokens, heads * head_dim]``, after RoPE.
            cache: Keys and values, those of this pass included.
            memory: Target of the codes.
            table: Constants of the layer.
            step: The step buffer.
            shape: Sizes of the pass.
            tokens: Rows of ``q``; by default those of the shape, its padding included.
        """
        heads = shape.heads
        q.require((tokens or shape.tokens) * heads.query_columns * 4, "attention query")
        memory.require(shape)
        if self._kv_dtype == KV_CODES:
            raise KernelError("Sparse attention reads no KV cache of 8 bits.")
        keys, _, stride = self._cache_offsets(cache, heads)
        buckets: Defines = {"BUCKETS": table.buckets} if table.buckets > 1 else {}
        defines = self._sparse_defines(shape) | self._kv_defines | buckets
        sizes = keys, stride, np.int32(shape.tokens), np.int32(shape.keys)
        inputs = q, cache.memory, step, table.order, table.numbers
        position_bytes = self._position_bytes(heads)
        work = functools.partial(score_codes_work, heads, step.array, shape.tokens, position_bytes)

        def launch(name: str, label: str, arguments: tuple[Argument, ...], written: int) -> Launch:
            files = (*CODE_FILES, "score_codes.cl")
            kernel, _, items = self._kernel(files, name, lambda _: defines, widths=(heads.head_dim,))
            size = shape.runs * items, heads.kv_heads
            own = functools.partial(work, written)
            return self._runtime.launch(kernel, arguments, size, (items, 1), label, work=own)

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

    def estimate(
        self, memory: ScoreMemory, *, shape: SparseShape, slots: tuple[int, int], exponent: int
    ) -> Launch:
        """Return the launch that writes the score codes of slots, the same that an NPU's graph computes.

        A code is the sum of products of both codes times ``2 ** -exponent``, to the nearest integer, halves
        to the even one, within the range.

        Args:
            memory: The codes, and the target.
            shape: Sizes of the pass.
            slots: First slot, and the one behind the last.
            exponent: Of the graph's constant.
        """
        memory.require(shape)
        count, _ = self._slots(shape, slots)
        files = (*CODE_FILES, "score_estimate.cl")
        kernel, style, items = self._kernel(files, "estimate_scores", lambda _: self._sparse_defines(shape))
        keys, rows = ESTIMATE_TILE["vector" if style == "vector" else "simt"]
        arguments = (
            *(memory.queries, memory.keys, memory.scores),
            *map(np.int32, (slots[0], shape.rows, shape.keys)),
            np.float32(2.0**-exponent),
        )
        size = -(-shape.keys // keys) * items, -(-shape.rows // rows), count
        work = functools.partial(estimate_work, count, shape.rows, shape.keys, shape.heads.head_dim)
        return self._runtime.launch(kernel, arguments, size, (items, 1, 1), "score estimate", work=work)

    def select(
        self,
        memory: ScoreMemory,
        table: HeadTable,
        selection: Selection,
        step: SharedArray,
        *,
        shape: SparseShape,
        slots: tuple[int, int],
        scores: Scores,
    ) -> Launch:
        """Return the launch that selects positions for the query heads of slots.

        A block of queries keeps the share ``keep`` of the positions that one of its queries sees, rounded
        up; at least the first and last ones that the shape names. Kept are the positions of the largest
        weights, of equal ones the lowest. The weight of a position is the sum of its shares in the softmax of
        each query that sees it.

        Args:
            memory: The estimated scores and their steps.
            table: Constants of the layer.
            selection: Target of the positions.
            step: The step buffer.
            shape: Sizes of the pass.
            slots: First slot, and the one behind the last.
            scores: Scale, window and soft cap of the scores.
        """
        memory.require(shape)
        selection.require(shape)
        _, count = self._slots(shape, slots)
        cap = scores.soft_cap
        kept: Defines = {"BLOCK": shape.block, "FIRST": shape.first, "LAST": shape.last}
        capped: Defines = {"SOFT_CAP": 1} if cap else {}
        files = (*CODE_FILES, "select.cl")
        kernel, _, items = self._kernel(
            files, "select_positions", lambda _: self._sparse_defines(shape) | kept | capped
        )
        arguments = (
            *(memory.scores, memory.steps, step, table.order, table.numbers),
            *(selection.positions, selection.counts),
            *map(np.int32, (slots[0], shape.tokens, shape.keys, scores.window)),
            *map(np.float32, (scores.scale / cap if cap else scores.scale * LOG2_E, cap * LOG2_E)),
        )
        work = functools.partial(
            selection_work, count, step.array, block=shape.block, tokens=shape.tokens, window=scores.window
        )
        size = shape.blocks * items, count
        return self._runtime.launch(kernel, arguments, size, (items, 1), "selection", work=work)

    def attend(
        self,
        q: DeviceMemory,
        cache: KvLayer,
        table: HeadTable,
        selection: Selection,
        out: SharedArray,
        step: SharedArray,
        *,
        shape: SparseShape,
        slots: tuple[int, int],
        scores: Scores,
        tokens: int | None = None,
        rounded: RoundedInputs | None = None,
        style: KernelStyle | None = None,
    ) -> tuple[Launch, ...]:
        """Return the launches of attention of the slots' query heads to the selected positions.

        Args:
            q: float32 ``[tokens, heads * head_dim]``, after RoPE.
            cache: Keys and values, those of this pass included.
            table: Constants of the layer.
            selection: The positions of :meth:`select`.
            out: ``[tokens, heads * head_dim]`` in the activation type; only these heads' columns are written.
            step: The step buffer.
            shape: Sizes of the pass.
            slots: First slot, and the one behind the last.
            scores: Scale, window and soft cap of the scores.
            tokens: Rows of ``q`` and ``out``; by default those of the shape, its padding included.
            rounded: Target of the int8 codes of all of ``out``, for a layer's last slots; None for no codes.
            style: Kernel style; by default the device's.
        """
        heads, tokens = shape.heads, tokens or shape.tokens
        q.require(tokens * heads.query_columns * 4, "attention query")
        out.require(tokens * heads.query_columns * self._item_bytes, "attention output")
        selection.require(shape)
        _, count = self._slots(shape, slots)
        cap = scores.soft_cap

        def defines(style: KernelStyle) -> Defines:
            gathered: Defines = {"GATHERED": 1, "BLOCK": shape.block, "MEMBERS": heads.group}
            capped: Defines = {"SOFT_CAP": 1} if cap and style != "vector" else {}
            own = AttentionGrid(heads, 2, shape.keys, 1, 1, None).defines(style)
            return own | ({"GROUP": 1} if style != "vector" else {}) | gathered | capped | self._kv_defines

        files, widths = ("attention.h", "attention_{style}.cl"), (heads.head_dim,)
        variants = None if style is None else (Variant(style),)
        kernel, chosen, items = self._kernel(files, "attention", defines, widths=widths, variants=variants)
        arguments = (
            *(q, cache.memory, out, out, step),
            *self._cache_offsets(cache, heads),
            *map(np.int32, (1, scores.window, 0)),
            *map(np.float32, (scores.scale / cap if cap else scores.scale * LOG2_E, cap * LOG2_E)),
            *(table.order, selection.positions, selection.counts),
            *map(np.int32, (slots[0], shape.blocks, shape.keys, heads.heads)),
        )
        keep = sum(table.keep) / len(table.keep)
        work = functools.partial(
            sparse_attention_work,
            heads,
            step.array,
            count,
            keep=keep,
            block=shape.block,
            tokens=shape.tokens,
            window=scores.window,
            position_bytes=self._position_bytes(heads),
            output_bytes=self._item_bytes,
        )
        size = -(-tokens // PREFILL_ROWS[chosen]) * items, count, 1
        label = "sparse attention"
        launch = self._runtime.launch(kernel, arguments, size, (items, 1, 1), label, work=work)
        if rounded is None:
            return (launch,)
        return launch, self._round(out, rounded, tokens, heads.query_columns)

    def _sparse_defines(self, shape: SparseShape) -> Defines:
        return {"HEAD_DIM": shape.heads.head_dim, "GROUP": shape.heads.group, "NPU_CODES": 8}

    @staticmethod
    def _slots(shape: SparseShape, slots: tuple[int, int]) -> tuple[int, int]:
        """Return the numbers of slots and of their query heads."""
        first, stop = slots
        if not 0 <= first < stop <= shape.heads.kv_heads:
            raise KernelError(f"Slots {first} to {stop} are not among those of {shape.heads.kv_heads} heads.")
        return stop - first, (stop - first) * shape.heads.group
