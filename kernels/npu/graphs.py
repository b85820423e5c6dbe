"""The ONNX graph of a shard: its identity, and its file.

Only writing imports ``onnx``: a device that runs prepared graphs needs none.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterollm.base import GraphError, scratch_folder
from heterollm.kernels.formats import QuantizedTensor
from heterollm.kernels.npu.protocol import K_SPLIT_COLUMNS, GraphForm
from heterollm.kernels.npu.shards import (
    ExpertsShard,
    FfnShard,
    GraphShard,
    LinearShard,
    SharedShard,
    WeightShard,
)

GRAPH_VERSION = 2
"""Version of the built graphs. A change drops cached binaries and profile samples of older graphs."""

SAMPLED_ROWS = 64


@contextlib.contextmanager
def graph_folder(label: str) -> Iterator[Path]:
    """Yield a temporary folder for the graph of a shard with this label.

    Raises:
        GraphError: The graph cannot be written there.
    """
    try:
        with scratch_folder("heterollm-graph-") as folder:
            yield folder
    except OSError as error:
        raise GraphError(
            f"Cannot write the graph of {label} into {tempfile.gettempdir()}: {error.strerror or error}.",
            fix="Free some space there, or set TMPDIR to another folder.",
        ) from error


def shard_digest(shard: GraphShard) -> str:
    """Return a digest of a shard's identity and of a sample of its numbers.

    ``weights_key`` should identify the numbers; the sample catches callers that reuse a key.
    """
    if isinstance(shard, SharedShard):
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
    if isinstance(shard, SharedShard):
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
        if part.fused is not None:
            identity |= {"added": part.fused.is_added, "epsilon": part.fused.norm.epsilon}
    if isinstance(shard, LinearShard) and shard.norm is not None:
        identity["epsilon"] = shard.norm.epsilon
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
    others: list[NDArray[Any]] = []
    norms = [shard.norm] if isinstance(shard, LinearShard) else []
    for part in _ffns(shard):
        weights += [part.gate_up, part.down]
        others += [] if part.bias is None else [part.bias]
        if part.fused is not None:
            weights.append(part.fused.weight)
            norms.append(part.fused.norm)
    others += [norm.weight for norm in norms if norm is not None]
    arrays: list[NDArray[Any]] = []
    for weight in weights:
        arrays += [weight.codes, weight.scales] if isinstance(weight, QuantizedTensor) else [weight]
        if isinstance(weight, QuantizedTensor) and weight.minimums is not None:
            arrays.append(weight.minimums)
    return arrays + others


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
        GraphError: The form does not suit the format or shape, float32 weights would lose precision, or the
            package onnx cannot be imported.
        OSError: The files cannot be written.
    """
    try:
        from heterollm.kernels.npu.graph_writer import write
    except ImportError as error:
        raise GraphError(
            f"The graph of {shard.label} cannot be written: {error}.",
            fix="Install the package that writes graphs: `pip install onnx`.",
        ) from error
    return write(shard, form, dtype, folder, length, k_split_columns, shard_digest(shard), name)
