"""Measures the NPU's graphs of attention on random data, from the call to its return."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Final

from heterollm.base import HeteroLLMError
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import SharedArray
from heterollm.kernels.npu import AttentionShard, NpuBackend, graph_tensors
from heterollm.model import ModelShape
from heterollm.profiler.measure.builds import build_prior_s
from heterollm.profiler.measure.npu_timer import graph_record, npu_run_s
from heterollm.profiler.measure.random_data import fill_shared
from heterollm.profiler.measure.sampling import NOTHING_COMPUTED_S
from heterollm.profiler.measure.sparse_cases import ESSENTIAL_SIZES, sparse_key, sparse_sizes
from heterollm.profiler.measure.task import Task
from heterollm.profiler.records import Record, SparseKey

STAGE: Final = "Attention on the NPU"
USUAL_RUNS: Final = 8
OVERHEAD_S: Final = 0.02


def attention_tasks(device: Device, shapes: Iterable[ModelShape], *, quick: bool = False) -> list[Task]:
    """Return the tasks that measure attention on the NPU of some models, each size once.

    Args:
        device: The opened device; tasks run on the thread that opened it.
        shapes: The models.
        quick: Whether to measure as few sizes as predictions need.
    """
    npu = device.npu
    if npu is None:
        return []
    cases = {}
    for shape in shapes:
        for tokens, keys in sparse_sizes(quick=quick):
            shard = AttentionShard(shape.heads, shape.kv_heads, keys, shape.head_dim)
            if npu.forms(shard.shape, tokens):
                key = sparse_key(shape, "attention_graph", tokens, keys, shape.kv_heads)
                cases[key] = shard
    return [
        Task(
            STAGE,
            (key,),
            partial(_measured, device, npu, key, shard),
            _estimate_s(device, key, shard),
            essential=(key.tokens, key.keys) in ESSENTIAL_SIZES,
            graphs=1,
            build_s=build_prior_s(device, 0),
        )
        for key, shard in cases.items()
    ]


def _estimate_s(device: Device, key: SparseKey, shard: AttentionShard) -> float:
    """Return about how long a graph takes to measure."""
    if not device.gpu.computes:
        return NOTHING_COMPUTED_S
    flops = 4 * shard.heads * key.tokens * shard.keys * shard.head_dim
    return OVERHEAD_S + USUAL_RUNS * npu_run_s(device, flops, 0)


def _measured(device: Device, npu: NpuBackend, key: SparseKey, shard: AttentionShard) -> list[Record]:
    """Measure a graph; a failure is a record too."""
    dtype = device.activation_dtype
    tensors = graph_tensors(shard, key.tokens, dtype)

    def filled(shape: tuple[int, ...]) -> SharedArray:
        shared = device.gpu.shared(shape, dtype)
        fill_shared(device.gpu, shared)
        return shared

    inputs, outputs = (
        {name: (filled(tensor.shape), dtype, tensor.shape) for name, tensor in own.items()}
        for own in (tensors.inputs, tensors.outputs)
    )
    try:
        graph = npu.prepare(shard, key.tokens)
        return [graph_record(key, npu, graph, inputs, outputs, timer=device.gpu.now_ns)]
    except HeteroLLMError as error:
        return [Record(key, error=error.message)]
    finally:
        npu.release(shard)
