"""The work of causal attention at the position of a pass."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.gpu import STEP_LENGTH, STEP_POSITION, GpuWork, HeadShape


def attention_work(
    shape: HeadShape,
    step: NDArray[np.int32],
    *,
    tokens: int,
    window: int,
    position_bytes: int,
    output_bytes: int,
    chunked: bool = False,
    row_words: int = 0,
) -> GpuWork:
    """Return the work of attention at the position that the step buffer holds.

    Args:
        shape: OperatorSizes of the heads.
        step: The step buffer.
        tokens: Tokens of the pass.
        window: Positions that a token sees; 0 for all.
        position_bytes: Bytes of the cache for one position of a head.
        output_bytes: Size of an element of the output, or of a partial result.
        chunked: Whether those positions are the token's chunk.
        row_words: Words of the step buffer for each token, if each belongs to another sequence; else 0.
    """
    if row_words:
        own = (step[row * row_words :] for row in range(tokens))
        counts = [visible(words, 1, window, chunked=chunked) for words in own]
        rows, seen, last = (sum(numbers) for numbers in zip(*counts, strict=True))
    else:
        rows, seen, last = visible(step, tokens, window, chunked=chunked)
    outputs = rows * shape.query_columns
    read = 2 * last * shape.kv_heads * position_bytes + 4 * outputs
    return GpuWork("attention", 4 * seen * shape.query_columns, read, outputs * output_bytes, rows)


def visible(
    step: NDArray[np.int32], tokens: int, window: int, *, chunked: bool = False
) -> tuple[int, int, int]:
    """Return the rows of a pass, the pairs of a row and a position that it sees, and the positions in all."""
    position = int(step[STEP_POSITION])
    rows = min(tokens, int(step[STEP_LENGTH]))
    last = position + rows
    if chunked:
        own = np.arange(position, last) % window + 1
        return rows, int(own.sum()), last - position + position % window
    seen = rows * position + rows * (rows + 1) // 2
    if window and last > window:
        # Tokens past the window see a whole window each.
        inside = max(0, window - position)
        seen = inside * position + inside * (inside + 1) // 2 + (rows - inside) * window
        last = min(last, window + rows - 1)
    return rows, seen, last
