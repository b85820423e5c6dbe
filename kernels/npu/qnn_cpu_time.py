"""CPU time that the emulator takes for one graph.

The cycles in QNN's own profile of the emulator are host time times a constant of 130 to 160 a
microsecond: the same graph gave 0.64 and 1.85 million. So they are not read. The CPU time of the process
around a run repeats within about 5 percent under other load. It is the cost of emulating: stages of tiles
show in it, but it ranks neither number formats nor forms on silicon.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.npu.qnn_runtime import QnnTarget, open_session
from heterollm.kernels.npu.session import HeldSession, SessionGraph
from heterollm.kernels.npu.shards import GraphShard
from heterollm.kernels.npu.tensors import GraphTensor


def emulated_cpu_us(
    model: Path, target: QnnTarget, shard: GraphShard, length: int, dtype: np.dtype[Any], runs: int
) -> tuple[float, ...]:
    """Run a compiled graph on random data and return the CPU time in us of each run after the first.

    The emulator skips zeros, so the data must be random. The first run is up to twice as dear.

    Args:
        model: The wrapper of the shard's context binary, or its model.
        target: Where to run.
        shard: The shard to run.
        length: Tokens of one run.
        dtype: Element type of the graph's inputs and outputs.
        runs: Runs to measure, after one that is not.

    Raises:
        GraphError: The graph does not load or run.
    """
    session = open_session(model, target, shard.label)
    graph, generator = SessionGraph(HeldSession(session), shard, length, dtype), np.random.default_rng(0)
    inputs = {name: _random(generator, tensor) for name, tensor in graph.tensors.inputs.items()}
    outputs = {name: np.empty(own.shape, own.dtype) for name, own in graph.tensors.outputs.items()}
    call = graph.bind(inputs, outputs)
    call()
    found = []
    for _ in range(runs):
        begin_ns = time.process_time_ns()
        call()
        found.append((time.process_time_ns() - begin_ns) / 1e3)
    return tuple(found)


def _random(generator: np.random.Generator, tensor: GraphTensor) -> NDArray[Any]:
    if tensor.dtype.kind == "u":
        return generator.integers(0, np.iinfo(tensor.dtype).max, tensor.shape, tensor.dtype, endpoint=True)
    return generator.standard_normal(tensor.shape, np.float32).astype(tensor.dtype)
