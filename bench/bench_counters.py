"""How many calls into drivers does a decoded token take, and a prompt of 256 tokens, and what do they move?

Llama-3-8B's shape at level ``tensor``, without weights: the plan comes from a simulated 8 Gen 3, the paper's
without a limit of the NPU's memory, or the own path's with one. The memory of its GPU is then shared by maps,
or as shared virtual memory. The engine runs both passes there as on a real
device, kernels and graphs aside; this script counts the steps of the passes and each access of the host to
shared memory. Counts are exact for this plan. Bytes of graph I/O, which QNN copies, and of the NPU's weights,
which each length holds, are arithmetic; no time is measured or modelled here.

    python bench/bench_counters.py --out bench/results/counters.jsonl
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from conditions import append_rows, conditions, script_parser

from heterollm.engine import Engine, Step
from heterollm.kernels.devices import open_device
from heterollm.kernels.gpu import SharedArray
from heterollm.kernels.ops import GraphMemory
from heterollm.kernels.sim import SIMULATED
from heterollm.model import find_model, op_specs, shape_only_weights
from heterollm.simulate import SimulationRequest, simulate

PROMPT: Final = 256
GROUP_SIZE: Final = 128
SOCS: Final = ("snapdragon-8gen3-paper", "snapdragon-8gen3")
KINDS: Final = ("mapped", "svm")
MAPPED_BYTES: Final = "mapped_bytes"
COUNTED: Final = (
    "maps",
    "unmaps",
    "blocking_calls",
    "polling_waits",
    "enqueues",
    "flushes",
    "graph_runs",
    MAPPED_BYTES,
    "graph_io_bytes",
)
"""Counts of a pass. Blocking calls are maps and waits of the driver; enqueues are kernels, marks, maps and
unmaps."""


class CountedArray(SharedArray):
    """Shared memory whose maps are counted.

    Args:
        memory: The memory.
        counts: The counts.
        coherent: Whether maps are unnecessary.
    """

    __slots__ = ("_counts", "_held")

    def __init__(self, memory: SharedArray, counts: Counter[str], *, coherent: bool) -> None:
        super().__init__(memory.array, memory.buffer, None, coherent)  # type: ignore[arg-type]
        self._counts = counts
        self._held = False

    def acquire(self, size_bytes: int | None = None) -> None:
        """Count a map."""
        if not self.coherent and not self._held:
            self._held = True
            self._counts.update(maps=1, mapped_bytes=self.array.nbytes if size_bytes is None else size_bytes)

    acquire_to_read = acquire

    def release(self) -> None:
        """Count an unmap."""
        if self._held:
            self._held = False
            self._counts["unmaps"] += 1


def counts_of(steps: Sequence[Step]) -> Counter[str]:
    """Return the counts of a pass's steps, without maps."""
    counts: Counter[str] = Counter()
    for step in steps:
        counts["enqueues"] += step.action in ("kernel", "mark")
        counts["flushes"] += step.action in ("flush", "mark", "sent")
        if step.action == "graph":
            ranges = (*step.reads, *step.writes)
            counts.update(graph_runs=1, graph_io_bytes=sum((one.stop or 0) - one.start for one in ranges))
        if step.action == "finish" or (step.wait and step.wait.strategy in ("event", "finish")):
            counts["blocking_calls"] += 1
        elif step.wait:
            counts["polling_waits"] += 1
    return counts


def row_of(counts: Counter[str]) -> dict[str, int]:
    """Return the counts of a pass, maps included where they belong."""
    maps, unmaps = counts["maps"], counts["unmaps"]
    counts.update(blocking_calls=maps, enqueues=maps + unmaps)
    return {name: counts[name] for name in COUNTED}


def rows_of(model: str, soc: str, kind: str) -> list[dict[str, Any]]:
    """Return the counts of both passes with one kind of memory."""
    plan = simulate(
        SimulationRequest(model, soc=soc, level="tensor", prompt=PROMPT, decode=1, head_bits=8)
    ).plan
    config = find_model(model, closest=True).config
    specs = op_specs(config, "w4a16", GROUP_SIZE, True)
    device, counts = open_device(f"{SIMULATED}{soc}"), Counter[str]()
    gpu: Any = device.gpu
    shared = gpu.shared
    gpu.shared = lambda shape, dtype: CountedArray(shared(shape, dtype), counts, coherent=kind == "svm")
    engine = Engine(device, shape_only_weights(config, specs), plan, 2 * PROMPT, lambda *_: None)
    cache, ids = engine.new_cache(), np.zeros(PROMPT, np.int32)
    rows = []
    for phase, tokens in (("prefill", PROMPT), ("decode", 1)):
        for _ in range(2):  # the second pass maps what the first has left behind
            counts.clear()
            if phase == "decode":
                engine.decode(cache, PROMPT, 0)
            else:
                engine.prefill(cache, 0, ids, "prefill", None)
        found = row_of(counts + counts_of(engine.steps(phase, tokens)))  # type: ignore[arg-type]
        sync = plan.sync.of(phase)  # type: ignore[arg-type]
        rows.append({"soc": soc, "memory": kind, "phase": phase, "tokens": tokens, "sync": sync, **found})
    copies = plan.npu_bytes(specs, GraphMemory(True))
    return [row | {"npu_weight_bytes": copies} for row in rows]


def main() -> None:
    """Print the counts, and append them to a file."""
    parser = script_parser(__doc__)
    parser.add_argument("--model", default="llama-3-8b")
    parser.add_argument("--code", default="present", help="name of the counted code in the rows")
    options = parser.parse_args()
    about = {"bench": "counters", "model": options.model, "level": "tensor", "code": options.code}
    machine = conditions()
    for soc, kind in itertools.product(SOCS, KINDS):
        for row in rows_of(options.model, soc, kind):
            line = about | row | {"commit": machine["commit"]}
            print(json.dumps(line))
            append_rows(options.out, line)


if __name__ == "__main__":
    main()
