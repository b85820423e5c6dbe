"""Writes the ONNX model of a shard.

Inputs and outputs have a leading 1 before the shape of their :class:`GraphTensor`. The weights lie in a
separate file, which ONNX Runtime maps instead of copying.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, ValueInfoProto, helper, numpy_helper

from heterollm.base import PAGE_BYTES, GraphError
from heterollm.kernels.npu.ffn_graphs import build_experts, build_ffn
from heterollm.kernels.npu.integer_graphs import build_integer_ffn, build_integer_linear
from heterollm.kernels.npu.linear_graphs import GraphBody, Tensors, build_linear
from heterollm.kernels.npu.protocol import INTEGER_FORMS, GraphForm, edge_dtype
from heterollm.kernels.npu.scores_graphs import build_scores
from heterollm.kernels.npu.shards import ExpertsShard, FfnShard, GraphShard, LinearShard, ScoresShard
from heterollm.kernels.npu.tensors import GraphTensor, graph_tensors

OPEN_LENGTH = -1
"""Length in shapes of a graph that leaves it symbolic."""
IR_VERSION = 10
OPSET = 21
MICROSOFT_OPSET = 1
FLOAT_FORMS: frozenset[GraphForm] = frozenset(
    {"activation_first", "weight_first", "conv_1x1", "token_tiles", "k_chunked"}
)
QUANTIZED_FORMS: frozenset[GraphForm] = frozenset(
    {"matmul_nbits", "matmul_nbits_int8", "k_chunked", "k_chunked_int8", "integer", "static_int8"}
)
FLOAT_FFN_FORMS: frozenset[GraphForm] = frozenset({"ffn", "ffn_weight_first", "ffn_k_chunked"})
QUANTIZED_FFN_FORMS: frozenset[GraphForm] = frozenset(
    {"ffn", "ffn_int8", "ffn_k_chunked", "ffn_k_chunked_int8", "ffn_integer"}
)

ONNX_TYPES: dict[np.dtype[Any], int] = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(np.int8): TensorProto.INT8,
    np.dtype(np.uint8): TensorProto.UINT8,
    np.dtype(np.uint16): TensorProto.UINT16,
    np.dtype(ml_dtypes.int4): TensorProto.INT4,
}


def write(
    shard: GraphShard,
    form: GraphForm,
    dtype: np.dtype[Any],
    folder: Path,
    length: int | None,
    k_split_columns: int,
    digest: str,
    name: str,
) -> Path:
    """Write a shard's graph, titled with its digest; see :func:`heterollm.kernels.npu.graphs.write_graph`."""
    if not isinstance(shard, ScoresShard) and shard.format.bits == 32 and dtype != np.float32:
        raise GraphError(f"{shard.label} has float32 weights, which a {dtype} graph would round.")
    if form not in _forms(shard):
        raise GraphError(f"{shard.label} with {shard.shape} cannot be written as {form}.")
    body = GraphBody(dtype, length)
    if isinstance(shard, ScoresShard):
        build_scores(shard, body)
    elif isinstance(shard, FfnShard) and form == "ffn_integer":
        build_integer_ffn(shard, body)
    elif isinstance(shard, LinearShard) and form in ("integer", "static_int8"):
        build_integer_linear(shard, form, body)
    elif isinstance(shard, FfnShard):
        build_ffn(shard, form, body, k_split_columns)
    elif isinstance(shard, ExpertsShard):
        build_experts(shard, form, body, k_split_columns)
    else:
        build_linear(shard, form, body, k_split_columns)
    weights = folder / f"{name}.weights"
    tokens: int | str = "m" if length is None else length
    tensors = graph_tensors(shard, OPEN_LENGTH if length is None else length, edge_dtype(form, dtype))
    if isinstance(shard, ScoresShard):
        title = f"scores_{shard.heads}x{shard.keys}"
    else:
        title = f"{shard.group}_{shard.layer}_{shard.rows}x{shard.columns}"
    graph = helper.make_graph(
        body.nodes,
        f"{title}_{tokens}_{digest[:16]}",
        [_value_info(*named) for named in tensors.inputs.items()],
        [_value_info(*named) for named in tensors.outputs.items()],
        _write_tensors(body.tensors, weights),
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid("com.microsoft", MICROSOFT_OPSET)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)
    path = folder / f"{name}.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def _value_info(name: str, tensor: GraphTensor) -> ValueInfoProto:
    shape = ["m" if size == OPEN_LENGTH else size for size in tensor.shape]
    return helper.make_tensor_value_info(name, ONNX_TYPES[tensor.dtype], [1, *shape])


def _forms(shard: GraphShard) -> frozenset[GraphForm]:
    if isinstance(shard, ScoresShard):
        return frozenset({"scores"})
    if isinstance(shard, ExpertsShard):
        return _forms(shard.parts[0]) - INTEGER_FORMS
    if isinstance(shard, FfnShard):
        return QUANTIZED_FFN_FORMS if shard.format.quantized else FLOAT_FFN_FORMS
    return QUANTIZED_FORMS if shard.format.quantized else FLOAT_FORMS


def _write_tensors(tensors: Tensors, path: Path) -> list[TensorProto]:
    """Write arrays page-aligned into one file and return the initializers that point into it."""
    initializers = []
    with path.open("wb") as file:
        for name, array in tensors.items():
            # ONNX Runtime and QNN need shapes and steps while they load the model.
            if array.dtype == np.int64 or array.ndim == 0:
                initializers.append(numpy_helper.from_array(array, name))
                continue
            file.write(b"\0" * (-file.tell() % PAGE_BYTES))
            proto = TensorProto(
                name=name,
                data_type=ONNX_TYPES[array.dtype],
                dims=array.shape,
                data_location=TensorProto.EXTERNAL,
            )
            stored = _packed(array) if array.dtype == ml_dtypes.int4 else array
            entries = {"location": path.name, "offset": file.tell(), "length": stored.nbytes}
            for key, value in entries.items():
                proto.external_data.add(key=key, value=str(value))
            np.ascontiguousarray(stored).tofile(file)
            initializers.append(proto)
    return initializers


def _packed(array: NDArray[Any]) -> NDArray[np.uint8]:
    """Pack 4-bit integers as ONNX does: two to a byte, the first one low."""
    nibbles = array.reshape(-1).astype(np.int8).view(np.uint8) & 15
    if nibbles.size % 2:
        nibbles = np.append(nibbles, np.uint8(0))
    return (nibbles[0::2] | nibbles[1::2] << 4).astype(np.uint8)
