"""Linear layers as nodes of an ONNX graph, alone or within an ffn graph.

Activations are ``[1, m, k]``, or ``[1, k, m]`` between transposes, in one element type: Hexagon takes
MatMulNBits only at rank 3 and without a bias, and rejects most casts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper

from heterollm.base import GraphError
from heterollm.kernels.formats import LinearWeight, QuantizedTensor, take_columns
from heterollm.kernels.npu.protocol import TILE_TOKENS, GraphForm
from heterollm.kernels.npu.shards import LinearShard, StreamNorm
from heterollm.kernels.npu.tensors import INPUT, OUTPUT
from heterollm.kernels.ops import WeightFormat

Tensors: TypeAlias = dict[str, NDArray[Any]]
Bounds: TypeAlias = list[tuple[int, int]]
"""Adjacent ranges ``[start, stop)`` of a linear's inputs: a k-split."""

NORM_WEIGHT = "norm_weight"
INT8_ACCURACY = 4
"""MatMulNBits' ``accuracy_level`` at which inputs are rounded to int8."""
FLOAT_SPLIT_UNIT = 32
"""A k-split of a float weight lies on multiples of Hexagon's tiles."""


@dataclass(slots=True)
class GraphBody:
    """The nodes and tensors of a graph under construction.

    Args:
        dtype: float16 or float32 of activations, scales and float weights.
        length: Tokens of a static graph; None leaves ``m`` symbolic.
        nodes: The nodes in topological order.
        tensors: The initializers by name.
        block_sums: Names of the block sums of an activation, by activation and block size.
    """

    dtype: np.dtype[Any]
    length: int | None
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    tensors: Tensors = field(default_factory=dict)
    block_sums: dict[tuple[str, int], str] = field(default_factory=dict)

    def add(self, operator: str, inputs: Sequence[str], target: str, **attributes: Any) -> None:  # noqa: ANN401
        """Append a node with one output."""
        self.nodes.append(helper.make_node(operator, inputs, [target], **attributes))


def build_linear(shard: LinearShard, form: GraphForm, body: GraphBody, k_split_columns: int) -> None:
    """Append the nodes of a linear shard from :data:`INPUT` to :data:`OUTPUT`.

    Raises:
        GraphError: The form does not suit the shape.
    """
    source = INPUT
    if shard.norm is not None:
        source = "normed"
        add_norm(body, shard.norm, INPUT, source)
    if form in ("k_chunked", "k_chunked_int8"):
        bounds = k_split_bounds(shard.columns, shard.format, k_split_columns, shard.label)
        if shard.format.quantized:
            add_linear(body, shard.weight, source, OUTPUT, bounds, integer_inputs=form == "k_chunked_int8")
        else:
            _weight_first(shard, body, bounds)
    elif form in PLAIN_FORMS:
        add_linear(body, shard.weight, source, OUTPUT, integer_inputs=form == "matmul_nbits_int8")
    else:
        RESHAPED[form](shard, body)


def add_linear(
    body: GraphBody,
    weight: LinearWeight,
    source: str,
    target: str,
    bounds: Bounds | None = None,
    *,
    prefix: str = "",
    integer_inputs: bool = False,
) -> None:
    """Append ``target = source · Wᵀ``, on packed codes or activation first.

    Args:
        body: The graph to append to.
        weight: ``W [n, k]``.
        source: Name of the activation ``[1, m, k]``.
        target: Name of the activation ``[1, m, n]``.
        bounds: Ranges of a k-split, for packed codes only; None for none.
        prefix: Prefix of the names of all other nodes and tensors.
        integer_inputs: Whether inputs are rounded to int8 for each block of the weight.
    """
    if not isinstance(weight, QuantizedTensor):
        name = f"{prefix}weight"
        body.tensors[name] = weight.astype(body.dtype, copy=False).T
        body.add("MatMul", [source, name], target)
        return
    corrected = weight.minimums is not None or (weight.zero_points is not None and body.dtype == np.float16)
    symmetric = f"{prefix}y_symmetric" if corrected else target
    level = INT8_ACCURACY if integer_inputs else 0
    if bounds is None:
        _add_nbits(body, weight, source, symmetric, prefix, "", level, corrected=corrected)
    else:
        _add_split(body, source, 2, bounds, prefix)
        for index, (start, stop) in enumerate(bounds):
            columns = take_columns(weight, start, stop)
            assert isinstance(columns, QuantizedTensor)
            inputs, product = f"{prefix}x_{index}", f"{prefix}y_{index}"
            _add_nbits(body, columns, inputs, product, prefix, f"_{index}", level, corrected=corrected)
        _add_sum(body, len(bounds), symmetric, prefix)
    if corrected:
        _add_correction(body, weight, source, target, prefix, integer_inputs=integer_inputs)


def add_weight_first(
    body: GraphBody,
    weight: LinearWeight,
    source: str,
    target: str,
    bounds: Bounds | None = None,
    *,
    prefix: str = "",
) -> None:
    """Append ``target = W · source`` on float weights.

    Args:
        body: The graph to append to.
        weight: ``W [n, k]``, not quantised.
        source: Name of the activation ``[1, k, m]``.
        target: Name of the activation ``[1, n, m]``.
        bounds: Ranges of a k-split; None for none.
        prefix: Prefix of the names of all other nodes and tensors.
    """
    assert not isinstance(weight, QuantizedTensor)
    floats = weight.astype(body.dtype, copy=False)
    if bounds is None:
        body.tensors[f"{prefix}weight"] = floats
        body.add("MatMul", [f"{prefix}weight", source], target)
        return
    _add_split(body, source, 1, bounds, prefix)
    for index, (start, stop) in enumerate(bounds):
        name = f"{prefix}weight_{index}"
        body.tensors[name] = floats[:, start:stop]
        body.add("MatMul", [name, f"{prefix}x_{index}"], f"{prefix}y_{index}")
    _add_sum(body, len(bounds), target, prefix)


def add_norm(body: GraphBody, norm: StreamNorm, source: str, target: str) -> None:
    """Append ``target = source / rms(source) * weight``.

    Hexagon has one operator for it, which takes large values, too: a mean of squares in float16 would
    exceed its range.
    """
    body.tensors[NORM_WEIGHT] = norm.weight.astype(body.dtype)
    append_norm(body, norm.epsilon, source, target)


def append_norm(body: GraphBody, epsilon: float, source: str, target: str) -> None:
    """Append the norm of a source by the weights :data:`NORM_WEIGHT`."""
    inputs = [source, NORM_WEIGHT]
    body.add("SimplifiedLayerNormalization", inputs, target, axis=-1, epsilon=epsilon)


def add_transpose(body: GraphBody, source: str, target: str) -> None:
    """Append ``target [1, b, a] = source [1, a, b]`` transposed."""
    body.add("Transpose", [source], target, perm=[0, 2, 1])


def k_split_bounds(columns: int, weight: WeightFormat, k_split_columns: int, label: str) -> Bounds:
    """Return the fewest ranges of at most ``k_split_columns`` inputs, of nearly equal size.

    Raises:
        GraphError: Too few inputs to split, or too large scale blocks.
    """
    # The zero points of two 4-bit blocks share a byte.
    unit = 2 * weight.block if weight.quantized else FLOAT_SPLIT_UNIT
    largest = k_split_columns // unit
    if columns <= k_split_columns or largest == 0:
        raise GraphError(
            f"{label} with {columns} inputs cannot be split into ranges of at most {k_split_columns} inputs "
            f"in steps of {unit}."
        )
    units = -(-columns // unit)
    size = -(-units // -(-units // largest)) * unit
    return [(start, min(start + size, columns)) for start in range(0, columns, size)]


def _add_nbits(
    body: GraphBody,
    weight: QuantizedTensor,
    source: str,
    target: str,
    prefix: str,
    suffix: str,
    accuracy_level: int,
    *,
    corrected: bool,
) -> None:
    tensors: Tensors = {"codes": weight.codes, "scales": weight.scales.astype(body.dtype, copy=False)}
    if weight.zero_points is not None and not corrected:
        tensors["zero_points"] = weight.zero_points
    named = {f"{prefix}{name}{suffix}": array for name, array in tensors.items()}
    body.tensors |= named
    body.add(
        "MatMulNBits",
        [source, *named],
        target,
        domain="com.microsoft",
        K=weight.columns,
        N=weight.rows,
        bits=weight.bits,
        block_size=weight.block,
        accuracy_level=accuracy_level,
    )


def _add_correction(
    body: GraphBody, weight: QuantizedTensor, source: str, target: str, prefix: str, *, integer_inputs: bool
) -> None:
    """Add zero points or minimums of a weight to ``y_symmetric``, the product around the middle code.

    The correction is x's block sums times the value of the middle code: ``(middle - zero) * scale``, or
    ``middle * scale + minimum``.
    ONNX Runtime unpacks the weights of each run if their zero points are floats, which minimums could be.
    Hexagon rounds asymmetric blocks to NMSE 8e-7 to 2.6e-6, mostly past the gate; this graph gives 1.4e-7 to
    9e-7 on the same packed weights (normal and Student-t with 3 degrees, blocks of 16 to 128; measured on the
    emulator).
    """
    middle, scales = np.float32(1 << (weight.bits - 1)), weight.scales.astype(np.float32)
    if weight.minimums is not None:
        offsets = middle * scales + weight.minimums
    else:
        offsets = (middle - weight.unpacked_zero_points()) * scales
    sums = _block_sums(body, source, weight, prefix, rounded=integer_inputs)
    body.tensors[f"{prefix}corrections"] = offsets.astype(body.dtype).T
    body.add("MatMul", [sums, f"{prefix}corrections"], f"{prefix}y_correction")
    body.add("Add", [f"{prefix}y_symmetric", f"{prefix}y_correction"], target)


def _block_sums(body: GraphBody, source: str, weight: QuantizedTensor, prefix: str, *, rounded: bool) -> str:
    """Return the name of the block sums of an activation; linears with one input share them.

    Args:
        body: The graph to append to.
        source: Name of the activation.
        weight: Its blocks are those of the sums.
        prefix: Prefix of new names.
        rounded: Whether the activation is rounded to int8 first, like the inputs of MatMulNBits.
    """
    key = source, weight.block
    if key not in body.block_sums:
        names = [f"{prefix}{name}" for name in ("x_blocked", "blocked_shape", "block_axis", "block_sums")]
        blocked, shape, axis, sums = names
        tokens = -1 if body.length is None else body.length
        body.tensors[shape] = np.array([1, tokens, weight.scales.shape[1], weight.block], np.int64)
        body.tensors[axis] = np.array([3], np.int64)
        body.add("Reshape", [source, shape], blocked)
        if rounded:
            _add_rounded_sums(body, blocked, axis, sums, prefix)
        else:
            body.add("ReduceSum", [blocked, axis], sums, keepdims=0)
        body.block_sums[key] = sums
    return body.block_sums[key]


def _add_rounded_sums(body: GraphBody, blocked: str, axis: str, target: str, prefix: str) -> None:
    """Append the sums of blocks after rounding, as :func:`heterollm.kernels.formats.round_inputs` rounds."""
    limit, tiny, magnitudes, largest, divisors, factors, scaled, codes, code_sums, flat, steps = (
        f"{prefix}{name}"
        for name in (
            *("limit", "tiny", "magnitudes", "largest", "divisors", "factors", "scaled", "rounded"),
            *("code_sums", "flat_divisors", "steps"),
        )
    )
    body.tensors[limit] = np.array(127, body.dtype)
    body.tensors[tiny] = np.array(2.0**-100, body.dtype)
    body.add("Abs", [blocked], magnitudes)
    body.add("ReduceMax", [magnitudes, axis], largest, keepdims=1)
    body.add("Max", [largest, tiny], divisors)
    body.add("Div", [limit, divisors], factors)
    body.add("Mul", [blocked, factors], scaled)
    body.add("Round", [scaled], codes)
    body.add("ReduceSum", [codes, axis], code_sums, keepdims=0)
    body.add("Squeeze", [divisors, axis], flat)
    body.add("Div", [flat, limit], steps)
    body.add("Mul", [code_sums, steps], target)


def _add_split(body: GraphBody, source: str, axis: int, bounds: Bounds, prefix: str) -> None:
    sizes = f"{prefix}piece_sizes"
    body.tensors[sizes] = np.array([stop - start for start, stop in bounds], np.int64)
    outputs = [f"{prefix}x_{index}" for index in range(len(bounds))]
    body.nodes.append(helper.make_node("Split", [source, sizes], outputs, axis=axis))


def _add_sum(body: GraphBody, count: int, target: str, prefix: str) -> None:
    """Append ``target = y_0 + y_1 + …``."""
    total = f"{prefix}y_0"
    for index in range(1, count):
        partial = target if index == count - 1 else f"{prefix}y_to_{index}"
        body.add("Add", [total, f"{prefix}y_{index}"], partial)
        total = partial


def _weight_first(shard: LinearShard, body: GraphBody, bounds: Bounds | None = None) -> None:
    add_transpose(body, INPUT, "x_columns")
    add_weight_first(body, shard.weight, "x_columns", "y_columns", bounds)
    add_transpose(body, "y_columns", OUTPUT)


def _conv_1x1(shard: LinearShard, body: GraphBody) -> None:
    # x as one row of m pixels with k channels is in QNN's channels-last order, so these transposes cancel
    # with those that the provider adds around the convolution.
    body.add("Unsqueeze", [INPUT, "height_axis"], "x_image")
    body.add("Transpose", ["x_image"], "x_channels", perm=[0, 3, 1, 2])
    body.add("Conv", ["x_channels", "weight"], "y_channels", kernel_shape=[1, 1])
    body.add("Transpose", ["y_channels"], "y_image", perm=[0, 2, 3, 1])
    body.add("Squeeze", ["y_image", "height_axis"], OUTPUT)
    body.tensors["weight"] = _float_weight(shard, body)[:, :, np.newaxis, np.newaxis]
    body.tensors["height_axis"] = np.array([1], np.int64)


def _token_tiles(shard: LinearShard, body: GraphBody) -> None:
    length = body.length
    if length is not None and length % TILE_TOKENS:
        raise GraphError(f"{shard.label} at {length} tokens has no tiles of {TILE_TOKENS} tokens.")
    # Weight first: with the tiles first, a rank-3 weight or a convolution over image rows takes several times
    # as long to emulate, and a rank-2 weight makes it flatten the tiles again.
    tiles, tokens = (-1, -1) if length is None else (length // TILE_TOKENS, length)
    body.add("Reshape", [INPUT, "tiled_shape"], "x_tiles")
    add_transpose(body, "x_tiles", "x_columns")
    body.add("MatMul", ["weight", "x_columns"], "y_columns")
    add_transpose(body, "y_columns", "y_tiles")
    body.add("Reshape", ["y_tiles", "output_shape"], OUTPUT)
    body.tensors |= {
        "weight": _float_weight(shard, body),
        "tiled_shape": np.array([tiles, TILE_TOKENS, shard.columns], np.int64),
        "output_shape": np.array([1, tokens, shard.rows], np.int64),
    }


def _float_weight(shard: LinearShard, body: GraphBody) -> NDArray[Any]:
    assert not isinstance(shard.weight, QuantizedTensor)
    return shard.weight.astype(body.dtype, copy=False)


PLAIN_FORMS: frozenset[GraphForm] = frozenset({"matmul_nbits", "matmul_nbits_int8", "activation_first"})

RESHAPED: dict[GraphForm, Callable[[LinearShard, GraphBody], None]] = {
    "weight_first": _weight_first,
    "conv_1x1": _conv_1x1,
    "token_tiles": _token_tiles,
}
