"""Sparse attention of a prefill pass as prepared launches (shadowAttn).

Four steps in the order of a pass: :func:`write_score_codes` writes codes of queries and keys; an
NPU's graph or :func:`estimate_scores` makes scores of them; :func:`select_positions`
takes the positions with the largest shares of attention for each block of queries;
:func:`attend_selected` attends to these positions alone. The last three serve a range of slots, so
that a unit's launches may follow its graph.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from heterollm.kernels.formats import BucketCount, ScoreScale, buckets
from heterollm.kernels.gpu import (
    PREFILL_ROWS,
    AttentionGrid,
    Defines,
    DeviceMemory,
    GlueKernels,
    GpuRuntime,
    GpuWork,
    HeadShape,
    HeadTable,
    KernelStyle,
    KvLayer,
    Launch,
    RoundedInputs,
    ScoreMemory,
    Scores,
    Selection,
    SharedArray,
    SparseShape,
    Variant,
)
from heterollm.kernels.operators.attention import LOG2_E
from heterollm.kernels.operators.attention_work import visible
from heterollm.kernels.operators.data import (
    Data,
    GuardedOutput,
    Numbers,
    fill_slot,
    run_launches,
)
from heterollm.kernels.operators.score_codes import (
    estimate_scores,
    exact_codes,
    exact_estimate,
    nearest_bucket,
    slot_counts,
    write_score_codes,
)
from heterollm.kernels.operators.selection import exact_weights, select_positions


def attend_selected(
    on: GlueKernels,
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
        on: The device's kernels.
        q: float32 ``[tokens, heads * head_dim]``, after RoPE.
        cache: Keys and values, those of this pass included.
        table: Constants of the layer.
        selection: The positions of :func:`select_positions`.
        out: ``[tokens, heads * head_dim]`` in the activation type; only these heads' columns are written.
        step: The step buffer.
        shape: OperatorSizes of the pass.
        slots: First slot, and the one behind the last.
        scores: Scale, window and soft cap of the scores.
        tokens: Rows of ``q`` and ``out``; by default those of the shape, its padding included.
        rounded: Target of the int8 codes of all of ``out``, for a layer's last slots; None for no codes.
        style: Kernel style; by default the device's.
    """
    heads, tokens = shape.heads, tokens or shape.tokens
    q.require(tokens * heads.query_columns * 4, "attention query")
    out.require(tokens * heads.query_columns * on.item_bytes, "attention output")
    selection.require(shape)
    _, count = slot_counts(shape, slots)
    cap = scores.soft_cap

    def defines(style: KernelStyle) -> Defines:
        gathered: Defines = {"GATHERED": 1, "BLOCK": shape.block, "MEMBERS": heads.group}
        capped: Defines = {"SOFT_CAP": 1} if cap and style != "vector" else {}
        own = AttentionGrid(heads, 2, 1, 1, None).defines(style)
        return own | ({"GROUP": 1} if style != "vector" else {}) | gathered | capped | on.cache_defines

    files, widths = ("attention.h", "attention_{style}.cl"), (heads.head_dim,)
    variants = None if style is None else (Variant(style),)
    kernel, chosen, items = on.kernel(files, "attention", defines, widths=widths, variants=variants)
    arguments = (
        *(q, cache.memory, out, out, step),
        on.table(cache, heads),
        *map(np.int32, (0, 1, scores.window)),
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
        position_bytes=on.position_bytes(heads),
        output_bytes=on.item_bytes,
    )
    size = -(-tokens // PREFILL_ROWS[chosen]) * items, count, 1
    label = "sparse attention"
    launch = on.runtime.launch(kernel, arguments, size, (items, 1, 1), label, work=work)
    if rounded is None:
        return (launch,)
    return launch, on.round_output(out, rounded, tokens, heads.query_columns)


def sparse_attention_work(
    shape: HeadShape,
    step: NDArray[np.int32],
    heads: int,
    *,
    keep: float,
    block: int,
    tokens: int,
    window: int,
    position_bytes: int,
    output_bytes: int,
) -> GpuWork:
    """Return the work of attention to selected positions; each block of queries reads its own.

    Args:
        shape: OperatorSizes of the heads.
        step: The step buffer.
        heads: Query heads of the launch.
        keep: Mean share of the positions that is kept.
        block: Queries that share a selection.
        tokens: Tokens of the pass.
        window: Positions that a token sees; 0 for all.
        position_bytes: Bytes of the cache for one position of a head.
        output_bytes: Size of an element of the output.
    """
    rows, seen, _ = visible(step, tokens, window)
    outputs = heads * rows * shape.head_dim
    gathered = heads * -(-rows // block) * keep * seen / max(1, rows)
    read = 2 * gathered * position_bytes + 4 * (outputs + gathered)
    return GpuWork("attention", 4 * keep * seen * heads * shape.head_dim, read, outputs * output_bytes, rows)


def exact_selected_attention(
    q: NDArray[Any],
    keys: NDArray[Any],
    values: NDArray[Any],
    kept: NDArray[Any],
    *,
    position: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
) -> NDArray[np.float64]:
    """Return the attention of one head's queries ``[m, d]`` to kept positions of ``[keys, d]``."""
    own = position + np.arange(len(q))[:, None]
    seen = (kept <= own) & ((kept > own - window) if window else True)
    scores = q.astype(np.float64) @ keys[kept].astype(np.float64).T * scale
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    scores = np.where(seen, scores, -np.inf)
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    output: NDArray[np.float64] = shares / shares.sum(axis=1, keepdims=True) @ values[kept].astype(np.float64)
    return output


GARBAGE: Final = 0xA5
"""Code in memory that no kernel has written."""

Selected: TypeAlias = list[list[NDArray[np.int32]]]
"""Positions by query head and block."""


@dataclass(frozen=True, slots=True)
class SparsePass:
    """A pass of sparse attention.

    Args:
        shape: OperatorSizes, those of the cache included.
        position: Position of the first token.
        length: Tokens that exist.
        scores: Scale, window and soft cap.
        order: Key head of each slot.
        keep: Share of the positions that each query head keeps.
        exponent: Of the graph's constant.
        buckets: Number of buckets.
        pages: Those of :meth:`heterollm.kernels.operators.data.Data.cache`.
    """

    shape: SparseShape
    position: int
    length: int
    scores: Scores
    order: tuple[int, ...]
    keep: tuple[float, ...]
    exponent: int = 5
    buckets: BucketCount = 1
    pages: tuple[int, ...] = ()

    @property
    def begin(self) -> int:
        """First position whose key counts."""
        return max(0, self.position - self.scores.window + 1) if self.scores.window else 0


class SparseCase:
    """A pass on random data, step by step.

    Args:
        gpu: The device.
        sparse: Its launches.
        dtype: Type of activations.
        own: The pass.
        generator: Makes the data.
    """

    def __init__(
        self,
        gpu: GpuRuntime,
        sparse: GlueKernels,
        dtype: DTypeLike,
        own: SparsePass,
        generator: np.random.Generator,
    ) -> None:
        self.gpu, self.sparse, self.dtype, self.own, self.generator = gpu, sparse, dtype, own, generator
        shape, heads, rng = own.shape, own.shape.heads, generator
        sizes = np.exp2(rng.uniform(-1.5, 1.5, heads.heads)).astype(np.float32)[:, None]
        self.queries = rng.standard_normal((own.length, heads.heads, heads.head_dim), np.float32) * sizes
        data = Data(sparse, rng)
        self.cache = data.cache(heads, own.position + own.length, pages=own.pages)
        self.keys, self.values = data.values["keys"], data.values["values"]
        self.q = fill_slot(gpu, self.queries.reshape(own.length, -1))
        data.step(own.position, own.length)
        self.step = fill_slot(gpu, data.values["step"])
        self.scales = [
            ScoreScale(tuple(rng.uniform(0.01, 0.04, heads.group).tolist()), step, own.exponent)
            for step in rng.uniform(0.01, 0.04, heads.kv_heads).tolist()
        ]
        pairs = buckets(own.buckets)
        self.table = HeadTable.upload(gpu, heads, self.scales, order=own.order, keep=own.keep, buckets=pairs)
        self.memory, self.selection = ScoreMemory.allocate(gpu, shape), Selection.allocate(gpu, shape)
        for slot in (self.memory.queries, self.memory.keys, self.memory.scores):
            slot.write(GARBAGE)

    def quantise(self) -> tuple[tuple[NDArray[Any], ...], tuple[NDArray[Any], ...]]:
        """Return the codes of queries and keys and the score steps, and those of the oracle."""
        options: dict[str, Any] = {"shape": self.own.shape, "tokens": self.own.length}
        options["window"] = self.own.scores.window
        run_launches(
            self.gpu,
            write_score_codes(self.sparse, self.q, self.cache, self.memory, self.table, self.step, **options),
        )
        steps = np.empty(self.own.shape.heads.heads, np.float32)
        self.gpu.copy(steps, self.memory.steps.buffer)
        return (self.memory.queries.read(), self.memory.keys.read(), steps), self._exact_codes()

    def estimate(self, slots: tuple[int, int]) -> tuple[NDArray[Any], NDArray[np.uint8]]:
        """Return the scores of slots from random codes, and those of the oracle."""
        for slot in (self.memory.queries, self.memory.keys):
            slot.write(self.generator.integers(0, 256, slot.array.shape))
        queries, keys = self.memory.queries.read(), self.memory.keys.read()
        options: dict[str, Any] = {"shape": self.own.shape, "slots": slots, "exponent": self.own.exponent}
        run_launches(self.gpu, [estimate_scores(self.sparse, self.memory, **options)])
        part = slice(*slots)
        exact = np.full((len(queries), queries.shape[1], keys.shape[1]), GARBAGE, np.uint8)
        exact[part] = exact_estimate(queries[part], keys[part], self.own.exponent)
        return self.memory.scores.read(), exact

    def put_scores(self, codes: NDArray[Any], steps: Sequence[float] | NDArray[Any]) -> None:
        """Write codes of scores, and their steps by query head."""
        self.memory.scores.write(codes)
        self.gpu.copy(self.memory.steps.buffer, np.asarray(steps, np.float32))

    def select(self, *ranges: tuple[int, int]) -> Selected:
        """Select the positions of some ranges of slots, default all; return those of all heads."""
        shape = self.own.shape
        inputs = self.memory, self.table, self.selection, self.step
        run_launches(
            self.gpu,
            [
                select_positions(self.sparse, *inputs, shape=shape, slots=slots, scores=self.own.scores)
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
        return exact_weights(
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
        run_launches(self.gpu, attend_selected(self.sparse, *inputs, slots=(0, heads.kv_heads), **options))
        exact = np.zeros(self.queries.shape)
        for head, blocks in enumerate(selected):
            for first, kept in zip(range(0, own.length, block), blocks, strict=False):
                exact[first : first + block, head] = exact_selected_attention(
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
            seen = self.keys[head, own.begin :]
            largest_key = float(np.abs(seen).max()) / scale.key_step
            pairs = buckets(own.buckets)
            factors = nearest_bucket(float(largest), largest_key, pairs)
            known = own.position + own.length
            keys[slot, own.begin : known] = exact_codes(seen, 1 / scale.key_step / factors[1])
            for member, step in enumerate(scale.query_steps):
                codes = exact_codes(members[:, member], 1 / step / factors[0])
                queries[slot, member, : own.length] = codes
            steps[head] = np.array(scale.score_steps) * (factors[0] * factors[1])
        return queries.reshape(heads.kv_heads, -1, heads.head_dim), keys, steps.ravel()
