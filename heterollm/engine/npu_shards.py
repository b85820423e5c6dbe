"""The NPU's shards of a model's operators."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.formats import concatenate_rows, take_columns, take_rows
from heterollm.kernels.npu import NpuBlock, NpuPart, NpuSlice
from heterollm.kernels.ops import Activation, OpSpec
from heterollm.model import ModelWeights

__all__ = ["ffn_shard", "linear_shard", "npu_shard"]


def linear_shard(weights: ModelWeights, spec: OpSpec, npu_rows: tuple[int, ...]) -> NpuSlice:
    """Return the leading ``npu_rows`` rows of each member of a group, not all of them 0."""
    members = weights.linear(spec.layer, spec.group)
    ranges = tuple((0, rows) for rows in npu_rows)
    parts = [take_rows(member, [part]) for member, part in zip(members, ranges, strict=True) if part[1]]
    key, rounded = weights.content_key, spec.integer_inputs
    return NpuSlice(concatenate_rows(parts), spec.layer, spec.group, ranges, key, rounded)


def ffn_shard(
    weights: ModelWeights,
    gate_up: OpSpec,
    down: OpSpec,
    width: int,
    activation: Activation,
    bias: NDArray[np.float32] | None = None,
) -> NpuBlock:
    """Return the leading ``width`` of the intermediate width of an ffn operator.

    Args:
        weights: The model's weights.
        gate_up: The group of gate and up, or the ffn operator, which has the same layer and members.
        down: The group of the down projection.
        width: A multiple of two scale blocks, or the whole width.
        activation: Activation of the gate.
        bias: float32 ``[2 * width]``, the bias of gate and then of up; None without one.
    """
    rows = [take_rows(member, [(0, width)]) for member in weights.linear(gate_up.layer, "gate_up")]
    (whole,) = weights.linear(down.layer, "down")
    identity = gate_up.layer, weights.content_key, (0, width), gate_up.integer_inputs
    return NpuBlock(concatenate_rows(rows), take_columns(whole, 0, width), activation, bias, *identity)


def npu_shard(weights: ModelWeights, spec: OpSpec, npu_rows: tuple[int, ...]) -> NpuPart:
    """Return the NPU's shard of an operator: rows of each member, or the leading width of an ffn."""
    if spec.then is None:
        return linear_shard(weights, spec, npu_rows)
    width = npu_rows[0]
    parts = weights.bias(spec.layer, "gate_up")
    bias = None
    if any(part is not None for part in parts):
        filled = (np.zeros(width, np.float32) if part is None else part[:width] for part in parts)
        bias = np.concatenate(list(filled))
    return ffn_shard(weights, spec, spec.then, width, weights.config.activation, bias)
