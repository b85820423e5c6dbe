"""A feed-forward network as one operator (ffn): its shards and the GPU's time for one.

Split along the intermediate width, each processor computes its rows of gate and up, their activation, and
the product with the matching columns of down: the NPU in one graph, the GPU in the kernels of the two groups.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from heterollm.kernels.ops import OpSpec
from heterollm.profiler.work import ffn_alignment
from heterollm.solver.costs import Costs, Errors


@lru_cache(maxsize=256)
def ffn_groups(ffn: OpSpec) -> tuple[OpSpec, OpSpec]:
    """Return ``gate_up`` and ``down`` of an ffn, for costs: their buffers have no names."""
    assert ffn.then is not None
    return replace(ffn, group="gate_up", join="concatenate", then=None), ffn.then


def first_group(spec: OpSpec) -> OpSpec:
    """Return the group itself, or ``gate_up`` of an ffn."""
    return spec if spec.then is None else ffn_groups(spec)[0]


@lru_cache(maxsize=256)
def ffn_shard(ffn: OpSpec, width: int) -> OpSpec:
    """Return the shard of an ffn with some of the intermediate width."""
    assert ffn.then is not None
    members = tuple(replace(member, rows=width) for member in ffn.members)
    return replace(ffn, members=members, then=replace(ffn.then, columns=width))


def split_alignment(spec: OpSpec, row_alignment: int) -> int:
    """Return the multiple of rows at which a group can be split, from the NPU's row alignment."""
    return row_alignment if spec.then is None else ffn_alignment(spec.then.weight, row_alignment)


def gpu_shard_us(costs: Costs | Errors, spec: OpSpec, member_rows: tuple[int, ...], tokens: int) -> float:
    """Return the GPU's time or its error: for some rows of a group's members, or some width of an ffn."""
    if spec.then is None:
        return costs.gpu_us(spec, member_rows, tokens)
    gate_up, _ = ffn_groups(spec)
    _, down = ffn_groups(ffn_shard(spec, member_rows[0]))
    return (
        costs.gpu_us(gate_up, member_rows, tokens)
        + costs.between_us(down, tokens)
        + costs.gpu_us(down, down.member_rows, tokens)
    )
