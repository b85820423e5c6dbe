"""The one builder of NPU graphs: a slice of linear layers as an ONNX model, its weights in a file beside it.

Activations are ``[1, m, k]`` in and ``[1, m, r]`` out, in one element type throughout, because Hexagon takes
MatMulNBits only at rank 3, without a bias, and rejects most casts. Weights lie in a file of their own so that
ONNX Runtime maps them instead of copying them into a parsed model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from heterollm.errors import GraphError
from heterollm.kernels.npu import CHUNK_COLUMNS, TILE_TOKENS, Form, NpuSlice
from heterollm.kernels.quantized_tensor import QuantizedTensor
from heterollm.units import PAGE_BYTES

__all__ = ["GRAPH_VERSION", "INPUT", "OUTPUT", "slice_digest", "write_graph"]

GRAPH_VERSION = 1
"""Raise when a built graph changes: cached binaries and profile samples of the old one are then dropped."""

INPUT, OUTPUT = "x", "y"
"""Names of the activations."""

IR_VERSION = 10
OPSET = 21
MICROSOFT_OPSET = 1
SAMPLED_ROWS = 64
INT8_ACCURACY = 4
"""MatMulNBits' ``accuracy_level`` at which inputs are rounded to int8."""
CHUNKED_FORMS: frozenset[Form] = frozenset({"k_chunked", "k_chunked_int8"})
QUANTIZED_FORMS: frozenset[Form] = frozenset(
    {"matmul_nbits", "matmul_nbits_int8", "k_chunked", "k_chunked_int8"}
)
FLOAT_FORMS: frozenset[Form] = frozenset(
    {"activation_first", "weight_first", "conv_1x1", "token_tiles", "k_chunked"}
)
FLOAT_CHUNK_UNIT = 32
"""Pieces of a float weight are cut at multiples of Hexagon's tiles."""

ONNX_TYPES: dict[np.dtype[Any], int] = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(np.uint8): TensorProto.UINT8,
}

Tensors: TypeAlias = dict[str, NDArray[Any]]
Built: TypeAlias = tuple[list[onnx.NodeProto], Tensors]


def slice_digest(part: NpuSlice) -> str:
    """Return a digest of what a slice is and, from a sample of its rows, of the numbers in it.

    ``weights_key`` alone should tell contents apart; the sample catches a caller that breaks this at no cost.
    """
    identity = [part.weights_key, part.layer, part.group, part.row_ranges, str(part.format)]
    digest = hashlib.sha256(json.dumps(identity).encode())
    rows = np.unique(np.linspace(0, part.rows - 1, min(part.rows, SAMPLED_ROWS)).astype(np.int64))
    weight = part.weight
    arrays: list[NDArray[Any]]
    arrays = [weight.codes, weight.scales] if isinstance(weight, QuantizedTensor) else [weight]
    for array in arrays:
        digest.update(array[rows].tobytes())
    return digest.hexdigest()


def write_graph(
    part: NpuSlice,
    form: Form,
    dtype: np.dtype[Any],
    folder: Path,
    length: int | None = None,
    *,
    chunk_columns: int = CHUNK_COLUMNS,
) -> Path:
    """Write a slice's model and weights into ``folder`` and return the model's path.

    Args:
        part: The slice.
        form: How to write it.
        dtype: float16 or float32 of activations, scales and float weights.
        folder: Existing folder; ``graph.onnx`` and ``graph.weights`` in it are overwritten.
        length: Tokens of a static graph; None leaves ``m`` symbolic.
        chunk_columns: Most inputs of a piece of a chunked form.

    Raises:
        GraphError: The form does not suit the format or shape, or float32 weights would lose precision.
        OSError: The files cannot be written.
    """
    if part.format.bits == 32 and dtype != np.float32:
        raise GraphError(f"{part.label} has float32 weights, which a {dtype} graph would round.")
    if form not in (QUANTIZED_FORMS if part.format.quantized else FLOAT_FORMS):
        raise GraphError(f"{part.label} with {part.format} weights cannot be written as {form}.")
    if form in CHUNKED_FORMS:
        nodes, tensors = _chunked(part, form, dtype, length, chunk_columns)
    else:
        nodes, tensors = BUILDERS[form](part, dtype, length)
    weights = folder / "graph.weights"
    tokens: int | str = "m" if length is None else length
    element = ONNX_TYPES[dtype]
    graph = helper.make_graph(
        nodes,
        f"{part.group}_{part.layer}_{part.rows}x{part.columns}_{tokens}_{slice_digest(part)[:16]}",
        [helper.make_tensor_value_info(INPUT, element, [1, tokens, part.columns])],
        [helper.make_tensor_value_info(OUTPUT, element, [1, tokens, part.rows])],
        _write_tensors(tensors, weights),
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", MICROSOFT_OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    path = folder / "graph.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def _write_tensors(tensors: Tensors, path: Path) -> list[TensorProto]:
    """Write arrays page-aligned into one file and return the initializers that point into it."""
    initializers = []
    with path.open("wb") as file:
        for name, array in tensors.items():
            if array.dtype == np.int64:  # shapes, which ONNX Runtime needs while it loads the model
                initializers.append(numpy_helper.from_array(array, name))
                continue
            file.write(b"\0" * (-file.tell() % PAGE_BYTES))
            proto = TensorProto(
                name=name,
                data_type=ONNX_TYPES[array.dtype],
                dims=array.shape,
                data_location=TensorProto.EXTERNAL,
            )
            entries = {"location": path.name, "offset": file.tell(), "length": array.nbytes}
            for key, value in entries.items():
                proto.external_data.add(key=key, value=str(value))
            np.ascontiguousarray(array).tofile(file)
            initializers.append(proto)
    return initializers


def _matmul_nbits(part: NpuSlice, dtype: np.dtype[Any], length: int | None) -> Built:
    weight = part.weight
    assert isinstance(weight, QuantizedTensor)
    if weight.zero_points is not None and dtype == np.float16:
        tensors: Tensors = {"codes": weight.codes, "scales": weight.scales}
        node = _nbits_node(weight, list(tensors), "y_symmetric")
        return _corrected([node], tensors, weight, length)
    tensors = _nbits_tensors(weight, dtype)
    return [_nbits_node(weight, list(tensors), OUTPUT)], tensors


def _matmul_nbits_int8(part: NpuSlice, dtype: np.dtype[Any], _length: int | None) -> Built:
    assert isinstance(part.weight, QuantizedTensor)
    tensors = _nbits_tensors(part.weight, dtype)
    return [_nbits_node(part.weight, list(tensors), OUTPUT, INT8_ACCURACY)], tensors


def _nbits_tensors(weight: QuantizedTensor, dtype: np.dtype[Any]) -> Tensors:
    tensors: Tensors = {"codes": weight.codes, "scales": weight.scales.astype(dtype, copy=False)}
    if weight.zero_points is not None:
        tensors["zero_points"] = weight.zero_points
    return tensors


def _corrected(
    nodes: list[onnx.NodeProto], tensors: Tensors, weight: QuantizedTensor, length: int | None
) -> Built:
    """Write an asymmetric weight as the symmetric one plus x's block sums times ``(middle - zero) * scale``.

    ``nodes`` compute ``y_symmetric``, what the codes give around their middle.

    Hexagon rounds asymmetric blocks to NMSE 8e-7 to 2.6e-6, mostly past the gate; this form gives 1.4e-7 to
    9e-7 on the same weights (normal and Student-t with 3 degrees, blocks of 16 to 128; measured on the
    emulator), with the weight still in its packed bits.
    """
    assert weight.zero_points is not None
    blocks = weight.scales.shape[1]
    offsets = (1 << (weight.bits - 1)) - weight.unpacked_zero_points().astype(np.float32)
    corrections = (offsets * weight.scales).astype(np.float16).T
    tokens = -1 if length is None else length
    tensors |= {
        "blocked_shape": np.array([1, tokens, blocks, weight.block], np.int64),
        "block_axis": np.array([3], np.int64),
        "corrections": corrections,
    }
    nodes += [
        helper.make_node("Reshape", [INPUT, "blocked_shape"], ["x_blocked"]),
        helper.make_node("ReduceSum", ["x_blocked", "block_axis"], ["block_sums"], keepdims=0),
        helper.make_node("MatMul", ["block_sums", "corrections"], ["y_correction"]),
        helper.make_node("Add", ["y_symmetric", "y_correction"], [OUTPUT]),
    ]
    return nodes, tensors


def _nbits_node(
    weight: QuantizedTensor, tensors: list[str], output: str, accuracy_level: int = 0, source: str = INPUT
) -> onnx.NodeProto:
    return helper.make_node(
        "MatMulNBits",
        [source, *tensors],
        [output],
        domain="com.microsoft",
        K=weight.columns,
        N=weight.rows,
        bits=weight.bits,
        block_size=weight.block,
        accuracy_level=accuracy_level,
    )


def _activation_first(part: NpuSlice, dtype: np.dtype[Any], _length: int | None) -> Built:
    node = helper.make_node("MatMul", [INPUT, "weight"], [OUTPUT])
    return [node], {"weight": _float_weight(part, dtype).T}


def _weight_first(part: NpuSlice, dtype: np.dtype[Any], _length: int | None) -> Built:
    nodes = [
        helper.make_node("Transpose", [INPUT], ["x_columns"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["weight", "x_columns"], ["y_columns"]),
        helper.make_node("Transpose", ["y_columns"], [OUTPUT], perm=[0, 2, 1]),
    ]
    return nodes, {"weight": _float_weight(part, dtype)}


def _conv_1x1(part: NpuSlice, dtype: np.dtype[Any], _length: int | None) -> Built:
    # Seen as one row of m pixels of k channels, x is in the channels-last order that QNN computes in: these
    # transposes and those that the provider adds around the convolution cancel.
    nodes = [
        helper.make_node("Unsqueeze", [INPUT, "height_axis"], ["x_image"]),
        helper.make_node("Transpose", ["x_image"], ["x_channels"], perm=[0, 3, 1, 2]),
        helper.make_node("Conv", ["x_channels", "weight"], ["y_channels"], kernel_shape=[1, 1]),
        helper.make_node("Transpose", ["y_channels"], ["y_image"], perm=[0, 2, 3, 1]),
        helper.make_node("Squeeze", ["y_image", "height_axis"], [OUTPUT]),
    ]
    weight = _float_weight(part, dtype)[:, :, np.newaxis, np.newaxis]
    return nodes, {"weight": weight, "height_axis": np.array([1], np.int64)}


def _token_tiles(part: NpuSlice, dtype: np.dtype[Any], length: int | None) -> Built:
    if length is not None and length % TILE_TOKENS:
        raise GraphError(f"{part.label} at {length} tokens has no tiles of {TILE_TOKENS} tokens.")
    # Weights first: the emulator takes tiles in front of a rank-3 weight, or as the rows of an image under a
    # convolution, too, at several times the cycles; in front of a rank-2 weight it flattens them again.
    tiles, tokens = (-1, -1) if length is None else (length // TILE_TOKENS, length)
    nodes = [
        helper.make_node("Reshape", [INPUT, "tiled_shape"], ["x_tiles"]),
        helper.make_node("Transpose", ["x_tiles"], ["x_columns"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["weight", "x_columns"], ["y_columns"]),
        helper.make_node("Transpose", ["y_columns"], ["y_tiles"], perm=[0, 2, 1]),
        helper.make_node("Reshape", ["y_tiles", "output_shape"], [OUTPUT]),
    ]
    tensors: Tensors = {
        "weight": _float_weight(part, dtype),
        "tiled_shape": np.array([tiles, TILE_TOKENS, part.columns], np.int64),
        "output_shape": np.array([1, tokens, part.rows], np.int64),
    }
    return nodes, tensors


def _chunked(
    part: NpuSlice, form: Form, dtype: np.dtype[Any], length: int | None, chunk_columns: int
) -> Built:
    """Write a slice as the sum of pieces over inputs next to each other."""
    bounds = _chunk_bounds(part, chunk_columns)
    if isinstance(part.weight, QuantizedTensor):
        accuracy_level = INT8_ACCURACY if form == "k_chunked_int8" else 0
        return _chunked_nbits(part.weight, bounds, dtype, length, accuracy_level)
    weight = _float_weight(part, dtype)
    nodes = [helper.make_node("Transpose", [INPUT], ["x_columns"], perm=[0, 2, 1])]
    tensors: Tensors = {}
    nodes.append(_split("x_columns", 1, bounds, tensors))
    for index, (start, stop) in enumerate(bounds):
        tensors[f"weight_{index}"] = weight[:, start:stop]
        nodes.append(helper.make_node("MatMul", [f"weight_{index}", f"x_{index}"], [f"y_{index}"]))
    nodes += _sum(len(bounds), "y_columns")
    nodes.append(helper.make_node("Transpose", ["y_columns"], [OUTPUT], perm=[0, 2, 1]))
    return nodes, tensors


def _chunked_nbits(
    weight: QuantizedTensor,
    bounds: list[tuple[int, int]],
    dtype: np.dtype[Any],
    length: int | None,
    accuracy_level: int,
) -> Built:
    corrected = weight.zero_points is not None and dtype == np.float16
    tensors: Tensors = {}
    nodes = [_split(INPUT, 2, bounds, tensors)]
    for index, (start, stop) in enumerate(bounds):
        piece = _take_blocks(weight, start // weight.block, stop // weight.block)
        own = _nbits_tensors(replace(piece, zero_points=None) if corrected else piece, dtype)
        named = {f"{name}_{index}": array for name, array in own.items()}
        tensors |= named
        nodes.append(_nbits_node(piece, list(named), f"y_{index}", accuracy_level, source=f"x_{index}"))
    nodes += _sum(len(bounds), "y_symmetric" if corrected else OUTPUT)
    return _corrected(nodes, tensors, weight, length) if corrected else (nodes, tensors)


def _chunk_bounds(part: NpuSlice, chunk_columns: int) -> list[tuple[int, int]]:
    """Cut a slice's inputs into the fewest pieces of at most ``chunk_columns``, as equal as can be."""
    # The zero points of two 4-bit blocks share a byte.
    unit = 2 * part.format.block if part.format.quantized else FLOAT_CHUNK_UNIT
    largest = chunk_columns // unit
    if part.columns <= chunk_columns or largest == 0:
        raise GraphError(
            f"{part.label} with {part.columns} inputs has no pieces of at most {chunk_columns} inputs "
            f"in steps of {unit}."
        )
    units = -(-part.columns // unit)
    size = -(-units // -(-units // largest)) * unit
    return [(start, min(start + size, part.columns)) for start in range(0, part.columns, size)]


def _take_blocks(weight: QuantizedTensor, start: int, stop: int) -> QuantizedTensor:
    """Return the inputs of the blocks ``[start, stop)``; ``start`` is even."""
    zeros = weight.zero_points
    if zeros is not None:
        zeros = zeros[:, start * weight.bits // 8 : -(-stop * weight.bits // 8)]
    return QuantizedTensor(
        weight.codes[:, start:stop], weight.scales[:, start:stop], zeros, weight.bits, weight.block
    )


def _split(source: str, axis: int, bounds: list[tuple[int, int]], tensors: Tensors) -> onnx.NodeProto:
    tensors["piece_sizes"] = np.array([stop - start for start, stop in bounds], np.int64)
    outputs = [f"x_{index}" for index in range(len(bounds))]
    return helper.make_node("Split", [source, "piece_sizes"], outputs, axis=axis)


def _sum(pieces: int, output: str) -> list[onnx.NodeProto]:
    """Add ``y_0``, ``y_1`` … up."""
    nodes, total = [], "y_0"
    for index in range(1, pieces):
        target = output if index == pieces - 1 else f"y_to_{index}"
        nodes.append(helper.make_node("Add", [total, f"y_{index}"], [target]))
        total = target
    return nodes


def _float_weight(part: NpuSlice, dtype: np.dtype[Any]) -> NDArray[Any]:
    assert not isinstance(part.weight, QuantizedTensor)
    return part.weight.astype(dtype, copy=False)


BUILDERS: dict[Form, Callable[[NpuSlice, np.dtype[Any], int | None], Built]] = {
    "matmul_nbits": _matmul_nbits,
    "matmul_nbits_int8": _matmul_nbits_int8,
    "activation_first": _activation_first,
    "weight_first": _weight_first,
    "conv_1x1": _conv_1x1,
    "token_tiles": _token_tiles,
}
