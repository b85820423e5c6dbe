"""Builds the ONNX model of a shard.

Inputs and outputs have a leading 1 before the shape of their :class:`GraphTensor`. The weights lie in a
separate file, which ONNX Runtime maps instead of copying.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, ValueInfoProto, helper, numpy_helper

from heterollm.base import PAGE_BYTES, GraphError
from heterollm.kernels.formats import QuantizedTensor
from heterollm.kernels.npu.ffn_graphs import build_experts, build_ffn
from heterollm.kernels.npu.integer_graphs import build_integer_ffn, build_integer_linear
from heterollm.kernels.npu.linear_graphs import GraphBody, Tensors, build_linear
from heterollm.kernels.npu.protocol import INTEGER_FORMS, K_SPLIT_COLUMNS, GraphForm, edge_dtype
from heterollm.kernels.npu.scores_graphs import build_scores
from heterollm.kernels.npu.shards import (
    ExpertsShard,
    FfnShard,
    GraphShard,
    LinearShard,
    ScoresShard,
    WeightShard,
)
from heterollm.kernels.npu.tensors import GraphTensor, graph_tensors

GRAPH_VERSION = 2
"""Version of the built graphs. A change drops cached binaries and profile samples of older graphs."""

OPEN_LENGTH = -1
"""Length in shapes of a graph that leaves it symbolic."""
IR_VERSION = 10
OPSET = 21
MICROSOFT_OPSET = 1
SAMPLED_ROWS = 64
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


def shard_digest(shard: GraphShard) -> str:
    """Return a digest of a shard's identity and of a sample of its numbers.

    ``weights_key`` should identify the numbers; the sample catches callers that reuse a key.
    """
    if isinstance(shard, ScoresShard):
        return hashlib.sha256(json.dumps(shard.key).encode()).hexdigest()
    identity: list[Any] = [shard.weights_key, shard.layer, shard.group, shard.row_ranges, str(shard.format)]
    parts = _ffns(shard)
    if parts:
        identity += [parts[0].activation, *([parts[0].slopes] if parts[0].activation == "xielu" else [])]
    if isinstance(shard, ExpertsShard):
        identity.append(shard.experts)
    elif shard.ranges is not None:
        identity.append(asdict(shard.ranges))
    digest = hashlib.sha256(json.dumps(identity).encode())
    for array in _sampled_arrays(shard):
        rows = np.unique(np.linspace(0, len(array) - 1, min(len(array), SAMPLED_ROWS)).astype(np.int64))
        digest.update(array[rows].tobytes())
    return digest.hexdigest()


def graph_identity(shard: GraphShard, form: GraphForm, length: int | None) -> dict[str, Any]:
    """Return all that a graph computes, as JSON can hold it; the length None is a symbolic one."""
    if isinstance(shard, ScoresShard):
        return asdict(shard) | {"form": form, "length": length}
    identity: dict[str, Any] = {
        "weights": shard.weights_key,
        "content": shard_digest(shard),
        "layer": shard.layer,
        "group": shard.group,
        "row_ranges": shard.row_ranges,
        "columns": shard.columns,
        "format": str(shard.format),
        "form": form,
        "length": length,
    }
    for part in _ffns(shard)[:1]:
        identity |= {"activation": part.activation, "outputs": shard.rows, "bias": part.bias is not None}
    if isinstance(shard, ExpertsShard):
        identity["experts"] = shard.experts
    return identity


def _ffns(shard: WeightShard) -> tuple[FfnShard, ...]:
    """Return the ffns in a graph."""
    if isinstance(shard, ExpertsShard):
        return shard.parts
    return (shard,) if isinstance(shard, FfnShard) else ()


def _sampled_arrays(shard: WeightShard) -> list[NDArray[Any]]:
    weights = [shard.weight] if isinstance(shard, LinearShard) else []
    biases: list[NDArray[Any]] = []
    for part in _ffns(shard):
        weights += [part.gate_up, part.down]
        biases += [] if part.bias is None else [part.bias]
    arrays: list[NDArray[Any]] = []
    for weight in weights:
        arrays += [weight.codes, weight.scales] if isinstance(weight, QuantizedTensor) else [weight]
        if isinstance(weight, QuantizedTensor) and weight.minimums is not None:
            arrays.append(weight.minimums)
    return arrays + biases


def write_graph(
    shard: GraphShard,
    form: GraphForm,
    dtype: np.dtype[Any],
    folder: Path,
    length: int | None = None,
    *,
    name: str = "graph",
    k_split_columns: int = K_SPLIT_COLUMNS,
) -> Path:
    """Write a shard's model and weights into ``folder`` and return the model's path.

    Args:
        shard: The shard.
        form: Graph form.
        dtype: float16 or float32 of activations, scales and float weights.
        folder: Existing folder; the model ``<name>.onnx`` and the weights ``<name>.weights`` are overwritten.
        length: Tokens of a static graph; None leaves ``m`` symbolic.
        name: Name of the files.
        k_split_columns: Most inputs of one range of a k-split.

    Raises:
        GraphError: The form does not suit the format or shape, or float32 weights would lose precision.
        OSError: The files cannot be written.
    """
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
        f"{title}_{tokens}_{shard_digest(shard)[:16]}",
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
