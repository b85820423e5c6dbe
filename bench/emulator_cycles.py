"""Cycle counts of fp16 linears on the emulator, in both orders: what predictors of stages are judged on.

A count is inflated by whatever else the processor does, up to ten times, and never lowered. So only counts
during which other processes were idle are kept, each point is visited until its smallest counts agree, and
its smallest is taken. Raw counts are kept as JSON lines: a second run goes on, or has nothing left to do.

    python bench/emulator_cycles.py --out bench/results/emulator_cycles.jsonl --minutes 10
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import numpy as np

from heterollm.kernels.npu import Form, NpuSlice
from heterollm.profiler.records import LinearPoint

SIZES: Final = (256, 512, 768, 1024)
TOKENS: Final = (1, 8, 16, 31, 32, 33, 64, 65, 96, 128)
FORMS: Final = ("weight_first", "activation_first")
RUNS: Final = 10
AGREEING: Final = 4
"""So many of the smallest counts of a settled point lie within a fraction of the smallest."""
AGREEMENT_FRACTION: Final = 0.04
RESULTS: Final = Path(__file__).parent / "results" / "emulator_cycles.jsonl"

Counts: TypeAlias = dict[LinearPoint, list[int]]


def all_points() -> list[LinearPoint]:
    """Return what is counted, the cheapest first."""
    shapes = itertools.product(SIZES, SIZES, TOKENS, FORMS)
    points = [
        LinearPoint("o", (rows,), columns, tokens, 16, 0, form=form) for columns, rows, tokens, form in shapes
    ]
    return sorted(points, key=lambda point: (point.flops, point))


def read_counts(path: Path) -> Counts:
    """Return the counts in a results file, none if there is no file."""
    counts: Counts = defaultdict(list)
    if path.exists():
        for line in path.read_text("utf-8").splitlines():
            row = json.loads(line)
            key = (row["columns"], row["tokens"])
            point = LinearPoint("o", (row["rows"],), *key, 16, 0, form=row["form"])
            counts[point] += row["cycles"]
    return counts


def settled(counts: list[int]) -> bool:
    """Whether the smallest counts agree."""
    ordered = sorted(counts)
    return len(ordered) >= RUNS and ordered[AGREEING - 1] <= ordered[0] * (1 + AGREEMENT_FRACTION)


def collect(path: Path, minutes: float) -> Counts:
    """Count every point that is not settled, in turns, until all are or the time is over."""
    counts = read_counts(path)
    give_up = time.monotonic() + minutes * 60
    todo = [point for point in all_points() if not settled(counts[point])]
    if not todo or minutes <= 0:
        return counts
    from conditions import busy_s, conditions, undisturbed, wait_until_idle

    from heterollm.kernels.npu_qnn import QnnNpu

    disturbed = 0
    npu = QnnNpu(emulator=True, compile_in_child=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        while todo and time.monotonic() < give_up:
            for point in todo:
                wait_until_idle(give_up)
                if time.monotonic() > give_up:
                    break
                busy, own, begin = busy_s(), time.process_time(), time.perf_counter()
                found = npu.count_cycles(_slice(point), point.tokens, cast("Form", point.form), runs=RUNS)
                wall = time.perf_counter() - begin
                if not undisturbed(busy_s() - busy - (time.process_time() - own), wall):
                    disturbed += 1
                    continue
                assert found is not None
                counts[point] += found
                with path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**_row(point), "cycles": found, **conditions()}) + "\n")
            todo = [point for point in todo if not settled(counts[point])]
            left = f"{len(todo)} of {len(all_points())} points have not settled"
            print(f"{left}; {disturbed} visits were disturbed", flush=True)
    finally:
        npu.close()
    return counts


def _row(point: LinearPoint) -> dict[str, Any]:
    return {"columns": point.columns, "rows": point.rows, "tokens": point.tokens, "form": point.form}


def _slice(point: LinearPoint) -> NpuSlice:
    weight = np.random.default_rng(0).standard_normal((point.rows, point.columns), np.float32)
    name = f"random {point.rows} x {point.columns}"
    return NpuSlice((weight * 0.05).astype(np.float16), 0, "o", ((0, point.rows),), name)


def main() -> None:
    """Collect counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args()
    counts = collect(options.out, options.minutes)
    print(f"{sum(map(len, counts.values()))} counts of {len(counts)} points in {options.out}")


if __name__ == "__main__":
    main()
