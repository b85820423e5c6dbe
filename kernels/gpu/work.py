"""Operations and memory traffic of GPU launches, from which a simulated GPU computes its times.

Only a simulated GPU calls these functions (:meth:`heterollm.kernels.gpu.protocol.GpuRuntime.launch`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from heterollm.base import OptionError
from heterollm.kernels.gpu.heads import HeadShape
from heterollm.kernels.gpu.step import STEP_LENGTH, STEP_POSITION
from heterollm.kernels.ops import Routing, WeightFormat

GpuKind = Literal["linear", "attention", "elementwise", "copy", "embedding"]
KINDS: Final = get_args(GpuKind)

BLOCK_BYTES: Final = 8
"""Size of a scale and a sum of int8 codes, both float32, per scale block."""

SELECTION_FLOPS: Final = 30
"""Operations for each score: two exponentials, sums, and the search for the least weight that is kept."""


@dataclass(frozen=True, slots=True)
class GpuWork:
    """The work of one kernel, or of both kernels of a linear layer that unpacks first.

    Args:
        kind: Type of the operator.
        flops: Operations, two per multiply-add; causal attention counts only those before the diagonal.
        read_bytes: Bytes read, each once.
        written_bytes: Bytes written.
        tokens: Tokens ``m``.
        weights: Weights of a linear layer, else 0.
        bits: Bits of a weight: 4 or 8 for codes, 16 or 32 for floats, 0 without weights.

    Raises:
        OptionError: A number is negative, or the kind is unknown.
    """

    kind: GpuKind
    flops: float
    read_bytes: float
    written_bytes: float
    tokens: int = 1
    weights: int = 0
    bits: int = 0

    def __post_init__(self) -> None:
        numbers = (self.flops, self.read_bytes, self.written_bytes, self.tokens, self.weights, self.bits)
        if self.kind not in KINDS or min(numbers) < 0:
            raise OptionError(f"The modelled GPU has no such work: {self}.")


def linear_work(
    weight: WeightFormat, rows: int, columns: int, tokens: int, input_bytes: int, output_bytes: int
) -> GpuWork:
    """Return the work of a linear layer.

    Args:
        weight: Number format of the weights.
        rows: Output rows ``n``.
        columns: Inputs ``k``.
        tokens: Tokens ``m``.
        input_bytes: Size of an input.
        output_bytes: Size of an output.
    """
    weights = rows * columns
    read = weight.weight_bytes(rows, columns) + tokens * columns * input_bytes
    return GpuWork(
        "linear",
        flops=2 * tokens * weights,
        read_bytes=read,
        written_bytes=tokens * rows * output_bytes,
        tokens=tokens,
        weights=weights,
        bits=weight.bits,
    )


def grouped_work(
    weight: WeightFormat,
    rows: int,
    columns: int,
    routing: Routing,
    tokens: int,
    experts: int,
    input_bytes: int,
    output_bytes: int,
    counted: Callable[[], tuple[int, int]] | None = None,
) -> GpuWork:
    """Return the work of the linear layers of experts.

    Args:
        weight: Number format of the weights.
        rows: Output rows ``n`` of an expert.
        columns: Inputs ``k``.
        routing: The choice of experts.
        tokens: Tokens ``m``.
        experts: Experts whose weights the launch has.
        input_bytes: Size of an input.
        output_bytes: Size of an output.
        counted: Returns the experts that have rows, and the rows; None if tokens choose all experts evenly.
    """
    expected = routing.touched(tokens), tokens * routing.chosen
    touched, pairs = (experts / routing.experts * own for own in (counted() if counted else expected))
    return GpuWork(
        "linear",
        flops=2 * pairs * rows * columns,
        read_bytes=touched * weight.weight_bytes(rows, columns) + pairs * columns * input_bytes,
        written_bytes=pairs * rows * output_bytes,
        tokens=round(pairs),
        weights=round(touched * rows * columns),
        bits=weight.bits,
    )


def embedding_work(weight: WeightFormat, columns: int, tokens: int) -> GpuWork:
    """Return the work of a lookup of table rows, as float32.

    Args:
        weight: Number format of the table.
        columns: Columns of the table.
        tokens: Rows to look up.
    """
    elements = tokens * columns
    return GpuWork("embedding", elements, weight.weight_bytes(tokens, columns), 4 * elements, tokens)


def pointwise_work(
    elements: int, flops: int, read_bytes: float, written_bytes: int, code_block: int = 0
) -> GpuWork:
    """Return the work of an elementwise operator or a norm.

    Args:
        elements: Number of outputs.
        flops: Operations per output.
        read_bytes: Bytes read per output.
        written_bytes: Bytes written per output.
        code_block: Scale block of int8 codes that are written as well; 0 for no codes.
    """
    codes = elements + BLOCK_BYTES * elements // code_block if code_block else 0
    return GpuWork("elementwise", flops * elements, read_bytes * elements, written_bytes * elements + codes)


def rounding_work(elements: int, item_bytes: int, blocks: int) -> GpuWork:
    """Return the work of rounding to int8.

    Args:
        elements: Number of values.
        item_bytes: Size of a value.
        blocks: Number of scale blocks.
    """
    return GpuWork("elementwise", 4 * elements, item_bytes * elements, elements + BLOCK_BYTES * blocks)


def rope_work(shape: HeadShape, tokens: int, read_bytes: float, position_bytes: int) -> GpuWork:
    """Return the work of RoPE and of the KV write.

    Args:
        shape: Sizes of the heads.
        tokens: Tokens of the pass.
        read_bytes: Bytes read for an element of the linear's output.
        position_bytes: Bytes of the cache for one position of a head.
    """
    queries, stored = tokens * shape.query_columns, 2 * tokens * shape.kv_heads
    read = read_bytes * (queries + stored * shape.head_dim)
    return GpuWork("elementwise", 6 * queries, read, 4 * queries + position_bytes * stored)


def attention_work(
    shape: HeadShape,
    step: NDArray[np.int32],
    *,
    tokens: int,
    window: int,
    position_bytes: int,
    output_bytes: int,
) -> GpuWork:
    """Return the work of attention at the position that the step buffer holds.

    Args:
        shape: Sizes of the heads.
        step: The step buffer.
        tokens: Tokens of the pass.
        window: Positions that a token sees; 0 for all.
        position_bytes: Bytes of the cache for one position of a head.
        output_bytes: Size of an element of the output, or of a partial result.
    """
    rows, seen, last = _visible(step, tokens, window)
    outputs = rows * shape.query_columns
    read = 2 * last * shape.kv_heads * position_bytes + 4 * outputs
    return GpuWork("attention", 4 * seen * shape.query_columns, read, outputs * output_bytes, rows)


def score_codes_work(
    shape: HeadShape, step: NDArray[np.int32], tokens: int, position_bytes: int, written_bytes: int
) -> GpuWork:
    """Return the work of writing the codes of queries and keys, or of finding their maxima.

    Args:
        shape: Sizes of the heads.
        step: The step buffer.
        tokens: Tokens of the pass.
        position_bytes: Bytes of the cache for one position of a head.
        written_bytes: Bytes of the codes, padding included.
    """
    rows, _, last = _visible(step, tokens, 0)
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


def selection_work(heads: int, step: NDArray[np.int32], *, block: int, tokens: int, window: int) -> GpuWork:
    """Return the work of selecting positions.

    Args:
        heads: Query heads.
        step: The step buffer.
        block: Queries that share a selection.
        tokens: Tokens of the pass.
        window: Positions that a token sees; 0 for all.
    """
    rows, seen, _ = _visible(step, tokens, window)
    positions = heads * -(-rows // block) * seen / max(1, rows)
    return GpuWork("elementwise", SELECTION_FLOPS * heads * seen, heads * seen, 4 * positions, rows)


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
        shape: Sizes of the heads.
        step: The step buffer.
        heads: Query heads of the launch.
        keep: Mean share of the positions that is kept.
        block: Queries that share a selection.
        tokens: Tokens of the pass.
        window: Positions that a token sees; 0 for all.
        position_bytes: Bytes of the cache for one position of a head.
        output_bytes: Size of an element of the output.
    """
    rows, seen, _ = _visible(step, tokens, window)
    outputs = heads * rows * shape.head_dim
    gathered = heads * -(-rows // block) * keep * seen / max(1, rows)
    read = 2 * gathered * position_bytes + 4 * (outputs + gathered)
    return GpuWork("attention", 4 * keep * seen * heads * shape.head_dim, read, outputs * output_bytes, rows)


def _visible(step: NDArray[np.int32], tokens: int, window: int) -> tuple[int, int, int]:
    """Return the rows of a pass, the pairs of a row and a position that it sees, and the positions in all."""
    position = int(step[STEP_POSITION])
    rows = min(tokens, int(step[STEP_LENGTH]))
    last = position + rows
    seen = rows * position + rows * (rows + 1) // 2
    if window and last > window:
        # Tokens past the window see a whole window each.
        inside = max(0, window - position)
        seen = inside * position + inside * (inside + 1) // 2 + (rows - inside) * window
        last = min(last, window + rows - 1)
    return rows, seen, last
