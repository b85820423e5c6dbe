"""A feed-forward network as one group: what each part computes of a cut, and what that takes.

Cut along its intermediate width, each part computes its rows of gate and up, the activation of those, and the
product with the columns of the down projection that they meet. The NPU does so in one graph, the GPU in the
same kernels as without the cut, one after the other in a busy queue.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from heterollm.kernels.ops import OpSpec
from heterollm.profiler.work import block_alignment
from heterollm.solver.costs import Costs

__all__ = ["apart", "cut_alignment", "gpu_part_us", "narrowed"]


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

    Args:
        spec: The group.
        row_alignment: The NPU's own multiple.
    """
    return row_alignment if spec.then is None else block_alignment(spec.then.weight, row_alignment)


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
