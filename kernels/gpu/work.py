"""Operations and memory traffic of GPU launches, from which a simulated GPU computes its times.

Only a simulated GPU calls these functions (:meth:`heterollm.kernels.gpu.protocol.GpuRuntime.launch`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, get_args

from heterollm.base import OptionError
from heterollm.kernels.ops import Routing, WeightFormat

GpuKind = Literal["linear", "attention", "elementwise", "copy", "embedding", "selection", "shadow"]
KINDS: Final = get_args(GpuKind)

BLOCK_BYTES: Final = 8
"""Size of a scale and a sum of int8 codes, both float32, per scale block."""


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
