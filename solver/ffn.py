"""A feed-forward network as one operator (ffn), with o in front or without: its shards and the GPU's time.

Split along the intermediate width, each processor computes its rows of gate and up, their activation, and
the product with the matching columns of down: the NPU in one graph, the GPU in the kernels of the two groups.
With o in front (o_ffn), both processors compute o, its sum with the residual stream, and the norm.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from heterollm.kernels.ops import STREAM_NORM, OpSpec
from heterollm.profiler.work import ffn_alignment
from heterollm.solver.costs import Costs, Errors


@lru_cache(maxsize=256)
def ffn_groups(ffn: OpSpec) -> tuple[OpSpec, OpSpec]:
    """Return ``gate_up`` and ``down`` of an ffn, for costs: their buffers have no names."""
    assert ffn.then is not None
    before = ffn.before if ffn.first is None else (STREAM_NORM,)
    gate_up = replace(ffn, group="gate_up", join="concatenate", then=None, first=None, before=before)
    return gate_up, ffn.then


def first_group(spec: OpSpec) -> OpSpec:
    """Return the group itself, or ``gate_up`` of an ffn."""
    return spec if spec.then is None else ffn_groups(spec)[0]


def entry_group(spec: OpSpec) -> OpSpec:
    """Return the group whose glue operators come before a group or ffn: ``gate_up`` of a plain ffn."""
    return spec if spec.first is not None else first_group(spec)


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
    own_us, first = 0.0, spec.first
    if first is not None:
        own_us = costs.gpu_us(first, first.member_rows, tokens) + costs.between_us(gate_up, tokens)
    return (
        own_us
        + costs.gpu_us(gate_up, member_rows, tokens)
        + costs.between_us(down, tokens)
        + costs.gpu_us(down, down.member_rows, tokens)
    )
