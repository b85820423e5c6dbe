"""The NPU's shards of a model's operators."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from heterollm.kernels.formats import concatenate_rows, take_columns, take_rows
from heterollm.kernels.npu import FfnRanges, FfnShard, LinearRanges, LinearShard, NpuShard, StaticRanges
from heterollm.kernels.ops import Group, OpSpec
from heterollm.model import ModelWeights

__all__ = ["npu_shard", "shard_ranges"]


def shard_ranges(
    ranges: Mapping[tuple[int, Group], StaticRanges], spec: OpSpec, npu_rows: tuple[int, ...]
) -> StaticRanges | None:
    """Return the calibrated ranges of an operator's shard; None without suitable ones.

    Args:
        ranges: Ranges by layer and group.
        spec: A group of linears, or an ffn operator.
        npu_rows: Leading rows of each member.
    """
    found = ranges.get((spec.layer, spec.group))
    return found.of_shard(whole=npu_rows == spec.member_rows) if isinstance(found, FfnRanges) else found


def npu_shard(
    weights: ModelWeights, spec: OpSpec, npu_rows: tuple[int, ...], ranges: StaticRanges | None = None
) -> NpuShard:
    """Return the NPU's shard of an operator.

    Args:
        weights: The model's weights.
        spec: A group of linears, or an ffn operator.
        npu_rows: Leading rows of each member, not all of them 0; equal ones for the members of an ffn, whose
            intermediate width is split at a multiple of two scale blocks.
        ranges: Calibrated ranges of the shard, which integer forms need: those of :func:`shard_ranges`.
    """
    group = spec.group if spec.then is None else "gate_up"
    row_ranges = tuple((0, rows) for rows in npu_rows)
    members = zip(weights.linear(spec.layer, group), row_ranges, strict=True)
    stacked = concatenate_rows([take_rows(member, [rows]) for member, rows in members if rows[1]])
    key, rounded = weights.content_key, spec.integer_inputs
    if spec.then is None:
        linear = ranges if isinstance(ranges, LinearRanges) else None
        return LinearShard(stacked, spec.layer, group, row_ranges, key, rounded, linear)
    (down,) = weights.linear(spec.then.layer, "down")
    width = npu_rows[0]
    biases = weights.bias(spec.layer, group)
    bias = np.concatenate([part[:width] for part in biases]) if biases else None
    columns = take_columns(down, 0, width)
    own = ranges if isinstance(ranges, FfnRanges) else None
    activation = weights.config.activation
    return FfnShard(stacked, columns, activation, bias, spec.layer, key, (0, width), rounded, own)
