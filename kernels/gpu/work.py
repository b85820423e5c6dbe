"""What a GPU launch has to do, in numbers: a simulated GPU takes its time from them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from heterollm.base import OptionError
from heterollm.kernels.ops import WeightFormat

__all__ = ["Demand", "GpuKind", "GpuWork", "embedding_demand", "linear_demand"]

GpuKind = Literal["linear", "attention", "elementwise", "copy", "embedding"]
KINDS: Final = get_args(GpuKind)


@dataclass(frozen=True, slots=True)
class GpuWork:
    """One kernel, or the two of a linear layer that unpacks first.

    Args:
        kind: What it computes.
        flops: Operations, a multiply-add as two; of causal attention only those before the diagonal.
        read_bytes: Read, each byte once.
        written_bytes: Written.
        tokens: Tokens ``m``.
        weights: Weights of a linear layer; else 0.
        bits: Of a weight: 4 or 8 for codes, 16 or 32 for floats; 0 where there are none.

    Raises:
        OptionError: A number is negative, or the kind is none.
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


Demand: TypeAlias = GpuWork | Callable[[], GpuWork]
"""The work of a launch, or a call that returns it where it depends on the step: attention reads as many
positions as the session holds."""


def linear_demand(
    weight: WeightFormat, rows: int, columns: int, tokens: int, input_bytes: int, output_bytes: int
) -> GpuWork:
    """Return the work of a linear layer.

    Args:
        weight: Number format of the weights.
        rows: Output rows ``n``.
        columns: Inputs ``k``.
        tokens: Tokens ``m``.
        input_bytes: Of one input.
        output_bytes: Of one output.
    """
    weights = rows * columns
    read = weight.weight_bytes(rows, columns) + tokens * columns * input_bytes
    return GpuWork(
        "linear", 2 * tokens * weights, read, tokens * rows * output_bytes, tokens, weights, weight.bits
    )


def embedding_demand(weight: WeightFormat, columns: int, tokens: int) -> GpuWork:
    """Return the work of looking rows of a table up, as float32.

    Args:
        weight: Number format of the table.
        columns: Width of a row.
        tokens: Rows.
    """
    elements = tokens * columns
    return GpuWork("embedding", elements, weight.weight_bytes(tokens, columns), 4 * elements, tokens)
