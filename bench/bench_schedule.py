"""How good is the order of chunks in flight, and how long does a decision take (llm.npu, section 3.4)?

Draws decoder layers with random times: three graphs on the NPU, and between them kernels of the GPU, of which
attention needs the keys of all earlier chunks. Small cases are compared with the exact search: the predicted
time of chunk after chunk, and of the order that is taken, over the shortest. For the time of a decision it
orders all stages of a model, and divides by stages and rules.

    python bench/bench_schedule.py --out bench/results/schedule.jsonl
"""

from __future__ import annotations

import time
from statistics import mean, median
from typing import Any, Final

import numpy as np
from conditions import append_rows, conditions, script_parser

from heterollm.profiler.records import Processor
from heterollm.solver.flights.schedule import LAGS, Stage, schedule_chunks

LAYER: Final[tuple[tuple[Processor, bool], ...]] = (
    ("npu", False),
    ("gpu", True),
    ("npu", False),
    ("gpu", False),
    ("npu", False),
    ("gpu", False),
)
"""Processor of each stage, and whether it reads earlier chunks: qkv, attention, o, norm, ffn, norm."""

SMALL: Final = ((2, 6), (3, 6), (4, 6), (2, 12))
"""Chunks and stages of each, few enough for the exact search."""

MODEL: Final = (4, 24)
"""Chunks and layers of Qwen1.5-1.8B with 1024 tokens."""

RULES: Final = 3 + len(LAGS)


def chunks_of(
    generator: np.random.Generator, chunks: int, stages: int, gpu_share: float
) -> list[list[Stage]]:
    """Return chunks of alike stages, whose times are random; later chunks read more keys.

    Args:
        generator: Draws the times.
        chunks: Number of chunks.
        stages: Stages of each.
        gpu_share: Mean time of a stage on the GPU over that on the NPU.
    """
    drawn = generator.lognormal(0.0, 0.6, stages).tolist()
    found = []
    for chunk in range(chunks):
        own = []
        for index in range(stages):
            processor, reads = LAYER[index % len(LAYER)]
            time_us = 100.0 * drawn[index] * (gpu_share if processor == "gpu" else 1.0)
            needs = tuple((one, index - 1) for one in range(0 if reads else chunk, chunk + 1) if index)
            own.append(Stage(processor, time_us * (1.0 + 0.2 * chunk * reads), needs))
        found.append(own)
    return found


def quality(chunks: int, stages: int, cases: int) -> dict[str, Any]:
    """Return how much longer than the shortest schedule the policies are, in percent."""
    generator = np.random.default_rng(chunks * 100 + stages)
    longer: dict[str, list[float]] = {"in_order": [], "out_of_order": []}
    for _ in range(cases):
        drawn = chunks_of(generator, chunks, stages, float(generator.uniform(0.2, 1.5)))
        shortest_us = schedule_chunks(drawn, "exact").elapsed_us
        longer["in_order"].append(100 * (schedule_chunks(drawn, "in_order").elapsed_us / shortest_us - 1))
        longer["out_of_order"].append(100 * (schedule_chunks(drawn).elapsed_us / shortest_us - 1))
    row: dict[str, Any] = {"kind": "quality", "chunks": chunks, "stages": stages, "cases": cases}
    for name, values in longer.items():
        row |= {f"{name}_mean_percent": mean(values), f"{name}_worst_percent": max(values)}
    return row | {"optimal": sum(value < 1e-6 for value in longer["out_of_order"]) / cases}


def decision(rounds: int) -> dict[str, Any]:
    """Return the time of one decision of one rule in the order of a whole model."""
    chunks, layers = MODEL
    drawn = chunks_of(np.random.default_rng(0), chunks, layers * len(LAYER), 0.5)
    stages = sum(map(len, drawn))
    times_us = []
    for _ in range(rounds):
        begin = time.process_time()
        schedule_chunks(drawn)
        times_us.append((time.process_time() - begin) * 1e6 / (stages * RULES))
    return {"kind": "decision", "chunks": chunks, "layers": layers, "decision_us": median(times_us)}


def main() -> None:
    """Print the rows and append them."""
    parser = script_parser(__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    rows = [quality(*size, options.cases) for size in SMALL] + [decision(options.rounds)]
    for row in rows:
        print(row)
    append_rows(options.out, *({"bench": "schedule", **conditions(), **row} for row in rows))


if __name__ == "__main__":
    main()
