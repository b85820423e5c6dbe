"""The parts of a model's groups that an NPU computes, as what its backends take."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.formats import concatenate_rows, take_columns, take_rows
from heterollm.kernels.npu import FfnShard, LinearShard, NpuShard
from heterollm.kernels.ops import Activation, OpSpec
from heterollm.model import ModelWeights

__all__ = ["npu_block", "npu_part", "npu_slice"]


def npu_slice(weights: ModelWeights, spec: OpSpec, npu_rows: tuple[int, ...]) -> LinearShard:
    """Return the leading ``npu_rows`` rows of each member of a group; one of them at least is above 0."""
    members = weights.linear(spec.layer, spec.group)
    ranges = tuple((0, rows) for rows in npu_rows)
    parts = [take_rows(member, [part]) for member, part in zip(members, ranges, strict=True) if part[1]]
    key, rounded = weights.content_key, spec.integer_inputs
    return LinearShard(concatenate_rows(parts), spec.layer, spec.group, ranges, key, rounded)


def npu_block(
    weights: ModelWeights,
    gate_up: OpSpec,
    down: OpSpec,
    width: int,
    activation: Activation,
    bias: NDArray[np.float32] | None = None,
) -> FfnShard:
    """Return the leading ``width`` of a feed-forward block's intermediate width.

    Args:
        weights: Of the model.
        gate_up: The group of gate and up, or the block, which has its layer and members.
        down: The group that reads what they make.
        width: A multiple of two blocks of the weights, or all.
        activation: Of the gate.
        bias: float32 ``[2 * width]`` of those rows of gate and then of up, or None.
    """
    rows = [take_rows(member, [(0, width)]) for member in weights.linear(gate_up.layer, "gate_up")]
    (whole,) = weights.linear(down.layer, "down")
    identity = gate_up.layer, weights.content_key, (0, width), gate_up.integer_inputs
    return FfnShard(concatenate_rows(rows), take_columns(whole, 0, width), activation, bias, *identity)


def npu_part(weights: ModelWeights, spec: OpSpec, npu_rows: tuple[int, ...]) -> NpuShard:
    """Return what the NPU computes of a group: rows of each member, or so much of a block's width."""
    if spec.then is None:
        return npu_slice(weights, spec, npu_rows)
    width = npu_rows[0]
    parts = weights.bias(spec.layer, "gate_up")
    bias = None
    if any(part is not None for part in parts):
        filled = (np.zeros(width, np.float32) if part is None else part[:width] for part in parts)
        bias = np.concatenate(list(filled))
    return npu_block(weights, spec, spec.then, width, weights.config.activation, bias)
