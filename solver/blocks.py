"""A feed-forward network as one group: what each part computes of a cut, and what that takes.

Cut along its intermediate width, each part computes its rows of gate and up, the activation of those, and the
product with the columns of the down projection that they meet. The NPU does so in one graph, the GPU in the
same kernels as without the cut, one after the other in a busy queue.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Final

from heterollm.kernels.ops import OpSpec
from heterollm.solver.costs import Costs

__all__ = ["apart", "cut_alignment", "gpu_part_us", "narrowed"]

PACKED_ROWS: Final = 64
"""Rows that the GPU packs together: its part of a cut begins at a multiple of them."""


@lru_cache(maxsize=256)
def apart(block: OpSpec) -> tuple[OpSpec, OpSpec]:
    """Return the two groups that a block stands for, for costs: what they read and write is not named."""
    assert block.then is not None
    return replace(block, group="gate_up", join="concatenate", then=None), block.then


@lru_cache(maxsize=256)
def narrowed(block: OpSpec, width: int) -> OpSpec:
    """Return the block of some of the intermediate width: the slice of a part."""
    assert block.then is not None
    members = tuple(replace(member, rows=width) for member in block.members)
    return replace(block, members=members, then=replace(block.then, columns=width))


def cut_alignment(spec: OpSpec, row_alignment: int) -> int:
    """Return the multiple that cuts of a group lie on.

    A block is also cut where the GPU's packed rows begin, and between pairs of quantisation blocks of the
    down projection: both parts round its inputs block by block, and the 4-bit zero points of a pair share a
    byte.

    Args:
        spec: The group.
        row_alignment: The NPU's own multiple.
    """
    if spec.then is None:
        return row_alignment
    return math.lcm(row_alignment, PACKED_ROWS, 2 * spec.then.weight.block or 1)


def gpu_part_us(costs: Costs, spec: OpSpec, member_rows: tuple[int, ...], tokens: int) -> float:
    """Return the GPU's time for some rows of each member of a group, or for so much of a block's width."""
    if spec.then is None:
        return costs.gpu_us(spec, member_rows, tokens)
    gate_up, _ = apart(spec)
    _, down = apart(narrowed(spec, member_rows[0]))
    return (
        costs.gpu_us(gate_up, member_rows, tokens)
        + costs.between_us(down, tokens)
        + costs.gpu_us(down, down.member_rows, tokens)
    )
