"""Inputs and outputs of NPU graphs by name, and checks of the arrays that are bound to them.

The graph of a linear or an ffn reads ``x [m, k]`` and writes ``y [m, r]``, that of experts the rows of
one after another. With o in front of an ffn, ``x`` is the output of attention and ``stream [m, h]`` the
residual stream. The graph of scores reads
``queries [heads, m, d]`` and ``keys [heads, S, d]`` and writes ``scores [heads, m, S]``. That of attention
reads ``queries [heads, m, d]``, ``keys [kv_heads, d, S]``, ``values [kv_heads, S, d]`` and
``limits [ranges, m, 1]`` and writes ``y [m, heads * d]``. A limit is the place in a range of keys of the last
one that a token sees: -1 for none of them, and no more than the keys of a range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from heterollm.base import GraphError
from heterollm.kernels.npu.shards import AttentionShard, ExpertsShard, FfnShard, GraphShard, ScoresShard

INPUT: Final = "x"
STREAM: Final = "stream"
OUTPUT: Final = "y"
QUERIES: Final = "queries"
KEYS: Final = "keys"
SCORES: Final = "scores"
VALUES: Final = "values"
LIMITS: Final = "limits"

NamedArrays: TypeAlias = Mapping[str, NDArray[Any]]
"""Arrays by the names of a graph's inputs or outputs."""


@dataclass(frozen=True, slots=True)
class GraphTensor:
    """An input or output of a graph.

    Args:
        shape: Shape of the array to bind; ONNX has a leading 1 before it.
        dtype: Element type.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size_bytes(self) -> int:
        """Size of the array."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class GraphTensors:
    """The inputs and outputs of a graph by name."""

    inputs: Mapping[str, GraphTensor]
    outputs: Mapping[str, GraphTensor]

    @property
    def size_bytes(self) -> int:
        """Size of all inputs and outputs together."""
        return sum(tensor.size_bytes for tensor in (*self.inputs.values(), *self.outputs.values()))


def graph_tensors(shard: GraphShard, length: int, dtype: np.dtype[Any]) -> GraphTensors:
    """Return the inputs and outputs of a shard's graph.

    Args:
        shard: The shard.
        length: Tokens of one run; of each expert.
        dtype: Element type at the graph's edges: :func:`heterollm.kernels.npu.edge_dtype`.
    """
    if isinstance(shard, ScoresShard):
        queries, keys, scores = (
            GraphTensor((shard.heads, *size), dtype)
            for size in ((length, shard.head_dim), (shard.keys, shard.head_dim), (length, shard.keys))
        )
        return GraphTensors({QUERIES: queries, KEYS: keys}, {SCORES: scores})
    if isinstance(shard, AttentionShard):
        heads, columns = shard.kv_heads, shard.head_dim
        inputs = {
            QUERIES: (shard.heads, length, columns),
            KEYS: (heads, columns, shard.keys),
            VALUES: (heads, shard.keys, columns),
            LIMITS: (len(shard.ranges), length, 1),
        }
        output = GraphTensor((length, shard.heads * columns), dtype)
        return GraphTensors({name: GraphTensor(own, dtype) for name, own in inputs.items()}, {OUTPUT: output})
    tokens = length * len(shard.experts) if isinstance(shard, ExpertsShard) else length
    x, y = GraphTensor((tokens, shard.columns), dtype), GraphTensor((tokens, shard.rows), dtype)
    fused = shard.fused if isinstance(shard, FfnShard) else None
    if fused is not None:
        attention = GraphTensor((tokens, fused.columns), dtype)
        return GraphTensors({INPUT: attention, STREAM: x}, {OUTPUT: y})
    return GraphTensors({INPUT: x}, {OUTPUT: y})


def check_arrays(inputs: NamedArrays, outputs: NamedArrays, tensors: GraphTensors, label: str) -> None:
    """Refuse arrays that are not those of a graph, or that ONNX Runtime would copy.

    Raises:
        GraphError: A name, shape, type or layout is wrong, an array is read-only, or an output overlaps
            another array.
    """
    for kind, arrays, stated in (("input", inputs, tensors.inputs), ("output", outputs, tensors.outputs)):
        if arrays.keys() != stated.keys():
            raise GraphError(
                f"The graph of {label} has the {kind}s {', '.join(stated)}, not "
                f"{', '.join(arrays) or 'none'}."
            )
        for name, tensor in stated.items():
            _check_array(arrays[name], f"{kind} {name} of {label}", tensor)
    checked = list(inputs.items())
    for name, output in outputs.items():
        for other, array in checked:
            if np.may_share_memory(output, array):
                raise GraphError(f"{other} and {name} of {label} overlap.")
        checked.append((name, output))


def _check_array(array: NDArray[Any], what: str, tensor: GraphTensor) -> None:
    shape, dtype = tensor.shape, tensor.dtype
    if array.shape != shape or array.dtype != dtype:
        raise GraphError(f"{what} must be {dtype} {list(shape)}, not {array.dtype} {list(array.shape)}.")
    if not array.flags.c_contiguous:
        raise GraphError(f"{what} is not contiguous (strides {array.strides}) and would be copied.")
    if not array.flags.writeable or not array.flags.aligned:
        raise GraphError(f"{what} is read-only or misaligned and cannot be computed on in place.")
