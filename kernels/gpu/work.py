"""What a GPU launch has to do, in numbers: a simulated GPU takes its time from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from heterollm.kernels.ops import WeightFormat
from heterollm.kernels.sim import GpuWork

__all__ = ["Demand", "GpuWork", "embedding_demand", "linear_demand"]

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
