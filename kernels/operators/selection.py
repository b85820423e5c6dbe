"""The positions that sparse attention keeps, from the largest shares of estimated attention."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.gpu import (
    Defines,
    GlueKernels,
    GpuWork,
    HeadTable,
    Launch,
    ScoreMemory,
    Scores,
    Selection,
    SharedArray,
    SparseShape,
)
from heterollm.kernels.operators.attention import LOG2_E
from heterollm.kernels.operators.attention_work import visible
from heterollm.kernels.operators.operator import StepCategory
from heterollm.kernels.operators.score_codes import CODE_FILES, slot_counts, sparse_defines

STEPS: Final[Mapping[str, StepCategory]] = {"selection": "attention"}

SELECTION_FLOPS: Final = 30
"""Operations for each score: two exponentials, sums, and the search for the least weight that is kept."""


def select_positions(
    on: GlueKernels,
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
        on: The device's kernels.
        memory: The estimated scores and their steps.
        table: Constants of the layer.
        selection: Target of the positions.
        step: The step buffer.
        shape: OperatorSizes of the pass.
        slots: First slot, and the one behind the last.
        scores: Scale, window and soft cap of the scores.
    """
    memory.require(shape)
    selection.require(shape)
    _, count = slot_counts(shape, slots)
    cap = scores.soft_cap
    kept: Defines = {"BLOCK": shape.block, "FIRST": shape.first, "LAST": shape.last}
    capped: Defines = {"SOFT_CAP": 1} if cap else {}
    files = (*CODE_FILES, "select.cl")
    kernel, _, items = on.kernel(files, "select_positions", lambda _: sparse_defines(shape) | kept | capped)
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
    return on.runtime.launch(kernel, arguments, size, (items, 1), "selection", work=work)


def selection_work(heads: int, step: NDArray[np.int32], *, block: int, tokens: int, window: int) -> GpuWork:
    """Return the work of selecting positions.

    Args:
        heads: Query heads.
        step: The step buffer.
        block: Queries that share a selection.
        tokens: Tokens of the pass.
        window: Positions that a token sees; 0 for all.
    """
    rows, seen, _ = visible(step, tokens, window)
    positions = heads * -(-rows // block) * seen / max(1, rows)
    return GpuWork("selection", SELECTION_FLOPS * heads * seen, heads * seen, 4 * positions, rows)


def exact_weights(
    scores: NDArray[np.uint8], position: int, factor: float, *, window: int = 0, soft_cap: float = 0.0
) -> NDArray[np.float64]:
    """Return the sum of the shares of attention of a block's queries, ``[keys]``; -1 where none sees a key.

    Args:
        scores: Codes ``[queries, keys]``.
        position: Position of the first query.
        factor: Step of the scores times the factor on them.
        window: Positions visible to a query, its own included; 0 for all.
        soft_cap: Scores become ``soft_cap * tanh(score / soft_cap)``; 0 for none.
    """
    own = position + np.arange(len(scores))[:, None]
    key = np.arange(scores.shape[1])[None, :]
    seen = (key <= own) & ((key > own - window) if window else True)
    values = (scores.astype(np.float64) - 128) * factor
    if soft_cap:
        values = soft_cap * np.tanh(values / soft_cap)
    values = np.where(seen, values, -np.inf)
    shares = np.exp(values - values.max(axis=1, keepdims=True))
    total: NDArray[np.float64] = (shares / shares.sum(axis=1, keepdims=True)).sum(axis=0)
    return np.where(seen.any(axis=0), total, -1)


def kept_positions(
    block_weights: NDArray[np.float64], keep: float, *, first: int = 4, last: int = 64
) -> NDArray[np.int64]:
    """Return the positions that a block keeps, ascending, from the weights of :func:`weights`."""
    seen = np.flatnonzero(block_weights >= 0)
    always = seen[(seen < first) | (seen > seen[-1] - last)]
    count = max(len(always), int(np.ceil(np.float32(keep) * np.float32(len(seen)))))
    ranked = block_weights.copy()
    ranked[always] = np.inf
    order = np.lexsort((np.arange(len(ranked)), -ranked))
    return np.sort(order[: min(count, len(seen))])
