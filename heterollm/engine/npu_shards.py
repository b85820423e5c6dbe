"""The NPU's shards of a model's operators."""

from __future__ import annotations

import numpy as np

from heterollm.kernels.formats import concatenate_rows, take_columns, take_rows
from heterollm.kernels.npu import FfnShard, LinearShard, NpuShard
from heterollm.kernels.ops import OpSpec
from heterollm.model import ModelWeights

__all__ = ["npu_shard"]


def npu_shard(weights: ModelWeights, spec: OpSpec, npu_rows: tuple[int, ...]) -> NpuShard:
    """Return the NPU's shard of an operator.

    Args:
        weights: The model's weights.
        spec: A group of linears, or an ffn operator.
        npu_rows: Leading rows of each member, not all of them 0; equal ones for the members of an ffn, whose
            intermediate width is split at a multiple of two scale blocks.
    """
    group = spec.group if spec.then is None else "gate_up"
    ranges = tuple((0, rows) for rows in npu_rows)
    members = zip(weights.linear(spec.layer, group), ranges, strict=True)
    stacked = concatenate_rows([take_rows(member, [rows]) for member, rows in members if rows[1]])
    key, rounded = weights.content_key, spec.integer_inputs
    if spec.then is None:
        return LinearShard(stacked, spec.layer, group, ranges, key, rounded)
    (down,) = weights.linear(spec.then.layer, "down")
    width = npu_rows[0]
    biases = weights.bias(spec.layer, group)
    bias = np.concatenate([part[:width] for part in biases]) if biases else None
    columns = take_columns(down, 0, width)
    return FfnShard(stacked, columns, weights.config.activation, bias, spec.layer, key, (0, width), rounded)
