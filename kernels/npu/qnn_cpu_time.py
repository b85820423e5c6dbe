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

from heterollm.kernels.npu.qnn_runtime import QnnTarget, open_session
from heterollm.kernels.npu.session import HeldSession, SessionGraph
from heterollm.kernels.npu.shards import NpuShard

__all__ = ["emulated_cpu_us"]


def emulated_cpu_us(
    model: Path, target: QnnTarget, shard: NpuShard, length: int, dtype: np.dtype[Any], runs: int
) -> tuple[float, ...]:
    """Run a compiled graph on random data and return the CPU time in us of each run after the first.

    The emulator skips zeros, so the data must be random. The first run is up to twice as dear.

    Args:
        model: The wrapper of the shard's context binary, or its model.
        target: Where to run.
        shard: The shard to run.
        length: Tokens of one run.
        dtype: Element type of the graph's input and output.
        runs: Runs to measure, after one that is not.

    Raises:
        GraphError: The graph does not load or run.
    """
    session = open_session(model, target, shard.label)
    values = np.random.default_rng(0).standard_normal((length, shard.columns), np.float32)
    x = values.astype(dtype)
    if shard.ranges is not None and dtype.kind == "u":
        x, _ = shard.ranges.grid.codes(values)
    y = np.empty((length, shard.rows), dtype)
    call = SessionGraph(HeldSession(session), shard, length, dtype).bind(x, y)
    call()
    found = []
    for _ in range(runs):
        begin_ns = time.process_time_ns()
        call()
        found.append((time.process_time_ns() - begin_ns) / 1e3)
    return tuple(found)
