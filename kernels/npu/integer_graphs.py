"""Linear layers and ffns with uint16 or uint8 activations, for Hexagon's integer matrix unit.

Every activation lies on a static grid of 16 bits with zero point 32768, whose range a calibration gave. Input
and output of the graph are codes on such grids, which the GPU writes and reads: it divides the input of a
single linear by the largest magnitude of each token, and multiplies the output by it. The weights keep their
4-bit codes and stepped scales, so the graph computes with the very numbers of the GPU's kernels. QNN's
compiler keeps such a linear in integers only in this form: uint16, symmetric weights, scales that are 1 to 16
times one number of their row with 16 used, and an output of 16 bits. The functions of this module therefore
refuse all other weights, except those of 8 bits with one scale for a tensor: their codes go with activations
of 16 bits, or of 8 bits with zero point 128 and an output of 8 bits (one of 16 bits QNN would compute in
floats). Their scale is written for every row, so that stacked tensors keep their own; times a factor of each
member, where members have output grids of their own.
"""

from __future__ import annotations

from typing import Final

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from heterollm.base import GraphError
from heterollm.kernels.formats import (
    LARGEST_MULTIPLE,
    CodeGrid,
    LinearWeight,
    QuantizedTensor,
    concatenate_rows,
    largest_code,
    row_steps,
    take_rows,
    zero_code,
)
from heterollm.kernels.npu.linear_graphs import NORM_WEIGHT, GraphBody, append_norm
from heterollm.kernels.npu.protocol import GraphForm
from heterollm.kernels.npu.ranges import FfnRanges, FusedRanges, LinearRanges, step_of
from heterollm.kernels.npu.shards import FfnShard, FusedOutput, LinearShard, StreamNorm
from heterollm.kernels.npu.tensors import INPUT, OUTPUT, STREAM

ZERO, SHARE_ZERO, NORMED = "zero", "share_zero", "normed"
SHARE_STEP: Final = 2.0**-16
"""Step of a sigmoid, whose values lie between 0 and 1."""
ZERO_CODES: Final = 0x88
"""Two 4-bit codes of the value 0."""


def build_integer_linear(shard: LinearShard, form: GraphForm, body: GraphBody) -> None:
    """Append the nodes of a linear shard from :data:`INPUT` to :data:`OUTPUT`.

    Raises:
        GraphError: The shard has no ranges of the form's bits, or its weight has not the scales that the form
            needs.
    """
    ranges, bits = shard.ranges, 8 if form == "static_int8" else 16
    if not isinstance(ranges, LinearRanges) or ranges.bits != bits:
        raise _uncalibrated(shard, bits)
    if shard.format.scales == "tensor" or bits == 8:
        weight = _with_row_scale(shard.weight, shard.label)
        _start(body, ranges.grid)
        values = (weight.unpacked_codes() ^ np.uint8(128)).view(np.int8)
        body.tensors["weight_codes"] = np.ascontiguousarray(values.T)
        body.tensors["scales"] = weight.scales[:, 0].astype(np.float32) * _member_factors(shard, ranges.grid)
        body.tensors["zeros"] = np.zeros(weight.rows, np.int8)
        body.add("DequantizeLinear", ["weight_codes", "scales", "zeros"], "weight", axis=1)
        body.add("MatMul", ["x_rounded", "weight"], "y_product")
        _end(body, ranges.grid)
        return
    weight = _reaching(_stepped(shard.weight, shard.label), shard.label)
    _start(body, ranges.grid)
    source = "x_rounded"
    if shard.norm is not None:
        if ranges.normed is None:
            raise _uncalibrated(shard)
        _norm(body, shard.norm, source, ranges.normed)
        source = NORMED
    _product(body, weight, source, "y_product", "")
    _end(body, ranges.grid)


def build_integer_ffn(shard: FfnShard, body: GraphBody) -> None:
    """Append the nodes of an ffn shard with SiLU from :data:`INPUT` to :data:`OUTPUT`.

    Raises:
        GraphError: The shard has no ranges, another activation or a bias, or a weight without the scales that
            the form needs.
    """
    ranges = shard.ranges
    if not isinstance(ranges, FfnRanges):
        raise _uncalibrated(shard)
    if shard.activation != "silu" or shard.bias is not None or not shard.gated:
        raise GraphError(
            f"{shard.label} has a bias, {shard.activation} or no gate; the integer graph has SiLU of a gate."
        )
    gate, up, down = _whole_steps(shard)
    _start(body, ranges.grid)
    source = "x_rounded"
    if shard.fused is not None:
        if ranges.fused is None:
            raise _uncalibrated(shard)
        _sum_and_norm(body, shard.fused, ranges.fused, ranges.inputs, shard.label)
        source = NORMED
    _product(body, gate, source, "gate_product", "gate_")
    _round(body, "gate_product", "gate", ranges.gate)
    _product(body, up, source, "up_product", "up_")
    _round(body, "up_product", "up", ranges.up)
    body.add("Sigmoid", ["gate"], "share_exact")
    body.tensors["share_step"] = np.array(SHARE_STEP, np.float32)
    body.tensors[SHARE_ZERO] = np.array(0, np.uint16)
    body.add("QuantizeLinear", ["share_exact", "share_step", SHARE_ZERO], "share_codes")
    body.add("DequantizeLinear", ["share_codes", "share_step", SHARE_ZERO], "share")
    body.add("Mul", ["gate", "share"], "activated_exact")
    _round(body, "activated_exact", "activated", ranges.activated)
    body.add("Mul", ["activated", "up"], "product_exact")
    _round(body, "product_exact", "product", ranges.product)
    if ranges.fused is None or ranges.fused.network is None:
        _product(body, down, "product", "y_product", "down_")
    else:
        _product(body, down, "product", "network_product", "down_")
        _round(body, "network_product", "network", ranges.fused.network)
        body.add("Add", ["network", "o"], "y_product")
    _end(body, ranges.grid)


def _sum_and_norm(
    body: GraphBody, fused: FusedOutput, ranges: FusedRanges, normed: float, label: str
) -> None:
    """Append o, its sum with the residual stream, and the norm of that."""
    weight = _reaching(_stepped(fused.weight, label), label)
    _product(body, weight, "x_rounded", "o_product", "o_")
    _round(body, "o_product", "o", ranges.outputs)
    body.tensors["stream_step"] = np.array(step_of(ranges.stream), np.float32)
    body.add("DequantizeLinear", [STREAM, "stream_step", ZERO], "stream_rounded")
    body.add("Add", ["o", "stream_rounded"], "sum_exact")
    _round(body, "sum_exact", "sum", ranges.sums)
    _norm(body, fused.norm, "sum", normed)


def _norm(body: GraphBody, norm: StreamNorm, source: str, magnitude: float) -> None:
    """Append the norm of a source, with weights of 16 bits, on the grid of a range."""
    step = float(np.abs(norm.weight).max()) / largest_code(16) or 1.0
    codes = np.rint(norm.weight / step) + zero_code(16)
    body.tensors["norm_codes"] = codes.astype(np.uint16)
    body.tensors["norm_step"] = np.array(step, np.float32)
    body.add("DequantizeLinear", ["norm_codes", "norm_step", ZERO], NORM_WEIGHT)
    append_norm(body, norm.epsilon, source, "normed_exact")
    _round(body, "normed_exact", NORMED, magnitude)


def _start(body: GraphBody, grid: CodeGrid) -> None:
    """Append the values of the input's codes."""
    body.tensors[ZERO] = np.array(zero_code(grid.bits), grid.dtype)
    body.tensors["x_step"] = np.array(grid.input_step, np.float32)
    body.add("DequantizeLinear", [INPUT, "x_step", ZERO], "x_rounded")


def _end(body: GraphBody, grid: CodeGrid) -> None:
    """Append the codes of the output."""
    body.tensors["y_step"] = np.array(grid.output_step, np.float32)
    body.add("QuantizeLinear", ["y_product", "y_step", ZERO], OUTPUT)


def _round(body: GraphBody, source: str, target: str, magnitude: float) -> None:
    """Append ``target = source`` on its 16-bit grid."""
    step = f"{target}_step"
    body.tensors[step] = np.array(step_of(magnitude), np.float32)
    body.add("QuantizeLinear", [source, step, ZERO], f"{target}_codes")
    body.add("DequantizeLinear", [f"{target}_codes", step, ZERO], target)


def _product(body: GraphBody, weight: QuantizedTensor, source: str, target: str, prefix: str) -> None:
    """Append ``target = source · Wᵀ``."""
    codes, scales = f"{prefix}weight_codes", f"{prefix}scales"
    values = weight.unpacked_codes().view(np.int8) - np.int8(8)
    body.tensors[codes] = np.ascontiguousarray(values.T).astype(ml_dtypes.int4)
    body.tensors[scales] = weight.scales.astype(np.float32).T
    body.add("DequantizeLinear", [codes, scales], f"{prefix}weight", axis=0, block_size=weight.block)
    body.add("MatMul", [source, f"{prefix}weight"], target)


def _whole_steps(shard: FfnShard) -> tuple[QuantizedTensor, QuantizedTensor, QuantizedTensor]:
    """Return gate, up and down such that the largest scale of each row is 16 times its step.

    The columns of down may lack the blocks with the largest scales. Then down gets one more block, of zeros
    with that scale, and gate and up get rows of zeros that feed it.
    """
    gate_up, down = _stepped(shard.gate_up, shard.label), _stepped(shard.down, shard.label)
    width = shard.width
    parts = [take_rows(gate_up, [rows]) for rows in ((0, width), (width, 2 * width))]
    gate, up = (_stepped(part, shard.label) for part in parts)
    found = row_steps(down.scales)
    if not found.reaches_largest.all():
        largest: NDArray[np.float64] = LARGEST_MULTIPLE * found.step[:, None]
        scales = np.concatenate([down.scales, largest.astype(np.float16)], axis=1)
        if not np.isfinite(scales).all():
            raise GraphError(f"{shard.label} has scales beyond the range of FP16.")
        zeros = np.full((down.rows, 1, down.codes.shape[2]), ZERO_CODES, np.uint8)
        codes = np.concatenate([down.codes, zeros], axis=1)
        down = QuantizedTensor(codes, scales, None, 4, down.block, scale_kind="stepped")
        gate, up = (_with_zero_rows(part, down.block) for part in (gate, up))
    return _reaching(gate, shard.label), _reaching(up, shard.label), _reaching(down, shard.label)


def _reaching(weight: QuantizedTensor, label: str) -> QuantizedTensor:
    """Return a weight the largest scale of each of whose rows is 16 times its step.

    Raises:
        GraphError: It is not.
    """
    if row_steps(weight.scales).reaches_largest.all():
        return weight
    raise GraphError(
        f"{label} has rows whose scales do not reach {LARGEST_MULTIPLE} times their step, and would lose "
        "digits in integers."
    )


def _with_zero_rows(weight: QuantizedTensor, rows: int) -> QuantizedTensor:
    codes = np.full((rows, *weight.codes.shape[1:]), ZERO_CODES, np.uint8)
    scales = np.ones((rows, weight.scales.shape[1]), np.float16)
    added = QuantizedTensor(codes, scales, None, 4, weight.block, scale_kind="stepped")
    return _stepped(concatenate_rows([weight, added]), "the rows of zeros")


def _stepped(weight: LinearWeight, label: str) -> QuantizedTensor:
    """Return a weight that integers can compute with.

    Raises:
        GraphError: It has floats, other bits, zero points or free scales. With zero points QNN computes with
            the wrong sign; free scales it rounds.
    """
    if isinstance(weight, QuantizedTensor) and weight.bits == 4 and weight.zero_points is None:
        positive = (weight.scales > 0).all()
        if weight.scale_kind == "stepped" and positive and row_steps(weight.scales).stepped.all():
            return weight
    raise GraphError(
        f"{label} needs symmetric 4-bit weights with stepped scales to be computed in integers.",
        fix="Load the model with scales stepped, or choose another form.",
    )


def _with_row_scale(weight: LinearWeight, label: str) -> QuantizedTensor:
    """Return a weight of 8 bits with one positive scale for each row.

    Raises:
        GraphError: It has another format.
    """
    if isinstance(weight, QuantizedTensor) and weight.scale_kind == "tensor" and weight.zero_points is None:
        scales = weight.scales
        if weight.bits == 8 and (scales > 0).all() and (scales == scales[:, :1]).all():
            return weight
    raise GraphError(
        f"{label} needs symmetric 8-bit weights with one scale for a tensor.",
        fix="Load the model at precision w8a8, or choose another form.",
    )


def _member_factors(shard: LinearShard, grid: CodeGrid) -> NDArray[np.float32]:
    """Return the factor of each row that brings its member's output to the one step that the graph has."""
    if not grid.member_steps:
        return np.ones(1, np.float32)
    rows = [stop - start for start, stop in shard.row_ranges]
    return np.repeat(np.float32(grid.output_step) / np.array(grid.member_steps, np.float32), rows)


def _uncalibrated(shard: LinearShard | FfnShard, bits: int = 16) -> GraphError:
    precision = " --precision w8a8" if shard.format.scales == "tensor" else ""
    return GraphError(
        f"{shard.label} has no calibrated ranges of {bits} bits, without which integers cannot hold its "
        "activations.",
        fix=f"Run `heterollm calibrate MODEL{precision} -o FILE` and load the model with --calibration FILE.",
    )
