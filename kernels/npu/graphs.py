"""The one builder of NPU graphs: a part of a model as an ONNX model, its weights in a file beside it.

Activations are ``[1, m, k]`` in and ``[1, m, r]`` out. Weights lie in a file of their own so that ONNX
Runtime maps them instead of copying them into a parsed model.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from heterollm.base import PAGE_BYTES, GraphError
from heterollm.kernels.formats import QuantizedTensor
from heterollm.kernels.npu.block_graphs import build_block
from heterollm.kernels.npu.linear_graphs import INPUT, OUTPUT, GraphBody, Tensors, build_slice
from heterollm.kernels.npu.parts import NpuBlock, NpuPart
from heterollm.kernels.npu.protocol import CHUNK_COLUMNS, Form

__all__ = ["GRAPH_VERSION", "INPUT", "OUTPUT", "slice_digest", "write_graph"]

GRAPH_VERSION = 1
"""Raise when a built graph changes: cached binaries and profile samples of the old one are then dropped."""

IR_VERSION = 10
OPSET = 21
MICROSOFT_OPSET = 1
SAMPLED_ROWS = 64
FLOAT_FORMS: frozenset[Form] = frozenset(
    {"activation_first", "weight_first", "conv_1x1", "token_tiles", "k_chunked"}
)
QUANTIZED_FORMS: frozenset[Form] = frozenset(
    {"matmul_nbits", "matmul_nbits_int8", "k_chunked", "k_chunked_int8"}
)
FLOAT_BLOCK_FORMS: frozenset[Form] = frozenset({"ffn", "ffn_weight_first", "ffn_k_chunked"})
QUANTIZED_BLOCK_FORMS: frozenset[Form] = frozenset({"ffn", "ffn_int8", "ffn_k_chunked", "ffn_k_chunked_int8"})

ONNX_TYPES: dict[np.dtype[Any], int] = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(np.uint8): TensorProto.UINT8,
}


def slice_digest(part: NpuPart) -> str:
    """Return a digest of what a part is and, from a sample of its rows, of the numbers in it.

    ``weights_key`` alone should tell contents apart; the sample catches a caller that breaks this at no cost.
    """
    identity: list[Any] = [part.weights_key, part.layer, part.group, part.row_ranges, str(part.format)]
    if isinstance(part, NpuBlock):
        identity.append(part.activation)
    digest = hashlib.sha256(json.dumps(identity).encode())
    for array in _sampled_arrays(part):
        rows = np.unique(np.linspace(0, len(array) - 1, min(len(array), SAMPLED_ROWS)).astype(np.int64))
        digest.update(array[rows].tobytes())
    return digest.hexdigest()


def _sampled_arrays(part: NpuPart) -> list[NDArray[Any]]:
    weights = (part.gate_up, part.down) if isinstance(part, NpuBlock) else (part.weight,)
    arrays: list[NDArray[Any]] = []
    for weight in weights:
        arrays += [weight.codes, weight.scales] if isinstance(weight, QuantizedTensor) else [weight]
    if isinstance(part, NpuBlock) and part.bias is not None:
        arrays.append(part.bias)
    return arrays


def write_graph(
    part: NpuPart,
    form: Form,
    dtype: np.dtype[Any],
    folder: Path,
    length: int | None = None,
    *,
    chunk_columns: int = CHUNK_COLUMNS,
) -> Path:
    """Write a part's model and weights into ``folder`` and return the model's path.

    Args:
        part: What it computes.
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
    if form not in _forms(part):
        raise GraphError(f"{part.label} with {part.format} weights cannot be written as {form}.")
    body = GraphBody(dtype, length)
    if isinstance(part, NpuBlock):
        build_block(part, form, body, chunk_columns)
    else:
        build_slice(part, form, body, chunk_columns)
    weights = folder / "graph.weights"
    tokens: int | str = "m" if length is None else length
    element = ONNX_TYPES[dtype]
    graph = helper.make_graph(
        body.nodes,
        f"{part.group}_{part.layer}_{part.rows}x{part.columns}_{tokens}_{slice_digest(part)[:16]}",
        [helper.make_tensor_value_info(INPUT, element, [1, tokens, part.columns])],
        [helper.make_tensor_value_info(OUTPUT, element, [1, tokens, part.rows])],
        _write_tensors(body.tensors, weights),
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", MICROSOFT_OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    path = folder / "graph.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def _forms(part: NpuPart) -> frozenset[Form]:
    if isinstance(part, NpuBlock):
        return QUANTIZED_BLOCK_FORMS if part.format.quantized else FLOAT_BLOCK_FORMS
    return QUANTIZED_FORMS if part.format.quantized else FLOAT_FORMS


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
