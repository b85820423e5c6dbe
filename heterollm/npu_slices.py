"""The rows of a model's groups that an NPU computes, as what its backends take."""

from __future__ import annotations

from heterollm.kernels.npu import NpuSlice
from heterollm.kernels.ops import OpSpec
from heterollm.kernels.quantized_tensor import concatenate_rows, take_rows
from heterollm.weights import ModelWeights

__all__ = ["npu_part", "npu_slice"]


def npu_slice(weights: ModelWeights, spec: OpSpec, npu_rows: tuple[int, ...]) -> NpuSlice:
    """Return the leading ``npu_rows`` rows of each member of a group; one of them at least is above 0."""
    members = weights.linear(spec.layer, spec.group)
    ranges = tuple((0, rows) for rows in npu_rows)
    parts = [take_rows(member, [part]) for member, part in zip(members, ranges, strict=True) if part[1]]
    key, rounded = weights.content_key, spec.integer_inputs
    return NpuSlice(concatenate_rows(parts), spec.layer, spec.group, ranges, key, rounded)


def npu_part(weights: ModelWeights, spec: OpSpec, npu_rows: tuple[int, ...]) -> NpuSlice:
    """Return what the NPU computes of a group."""
    return npu_slice(weights, spec, npu_rows)
