"""Legal splits of a model's groups, and the most tokens of the head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from heterollm.kernels.ops import WeightFormat

HEAD_TOKENS: Final = 32
"""Most positions that the head computes at a time; more than one only where all logits are asked for."""

GPU_ROW_ALIGNMENT: Final = 64
"""Multiple at which the GPU's rows may begin: ``ROW_ALIGNMENT`` of ``heterollm.kernels.gpu.tiled_weights``,
which cannot be imported without OpenCL."""


def split_rows(member_rows: Sequence[int], fraction: float, alignment: int) -> tuple[int, ...]:
    """Return the leading rows of each member that the NPU takes at a fraction.

    Members are split at the same fraction, rounded to the nearest multiple of the alignment. A member shorter
    than the alignment is not split: it stays on the GPU unless the NPU takes all.

    Args:
        member_rows: Output rows of each member.
        fraction: Share of the NPU, 0 to 1.
        alignment: Alignment of a split, in rows.
    """
    if fraction >= 1.0:
        return tuple(member_rows)
    return tuple(
        min(int(fraction * rows / alignment + 0.5), rows // alignment) * alignment for rows in member_rows
    )


def rest_rows(member_rows: Sequence[int], npu_rows: Sequence[int]) -> tuple[int, ...]:
    """Return the rows of each member that the GPU computes beside the NPU's."""
    return tuple(rows - taken for rows, taken in zip(member_rows, npu_rows, strict=True))


def ffn_alignment(weight: WeightFormat, row_alignment: int) -> int:
    """Return the multiple for the NPU's width of an ffn, unless that is the whole width.

    Rows of gate and up are split on the alignments of both processors, and columns of down between pairs of
    blocks: the 4-bit zero points of a pair share a byte.

    Args:
        weight: Number format of all three linears.
        row_alignment: The NPU's.
    """
    return math.lcm(row_alignment, GPU_ROW_ALIGNMENT, 2 * weight.block if weight.quantized else 1)
