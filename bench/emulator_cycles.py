"""Cycle counts of fp16 linears on the emulator, in both orders: what predictors of stages are judged on.

A count is inflated by whatever else the processor does, up to ten times, and never lowered. So only counts
are kept during which other processes were idle (or niced, and so gave way), each point is visited until its
smallest counts agree, and its smallest is taken. Raw counts are kept as JSON lines: a second run goes on, or
has nothing left to do.

The emulator skips zeros, and rows of a tile beyond its tokens are whatever earlier graphs left there: in a
fresh process nothing, so that 8 tokens cost a quarter and 1 token an eighth. So a graph of whole tiles runs
before each visit.

    python bench/emulator_cycles.py --out bench/results/emulator_cycles.jsonl --minutes 10
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import numpy as np

from heterollm.kernels.npu import GraphForm, LinearShard, NpuBackend
from heterollm.profiler.records import LinearPoint

SIZES: Final = (256, 512, 768, 1024)
TOKENS: Final = (1, 8, 16, 31, 32, 33, 64, 65, 96, 128)
FORMS: Final[tuple[GraphForm, ...]] = ("weight_first", "activation_first")
RUNS: Final = 10
VISITS: Final = 2
AGREEING: Final = 4
"""So many of the smallest counts of a settled point lie within a fraction of the smallest."""
AGREEMENT_FRACTION: Final = 0.04
OTHERS_FRACTION: Final = 0.1
"""Of one core, what others may use during a visit whose counts are kept."""
MOMENT_S: Final = 0.05
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
    """Whether there were visits enough and their smallest counts agree."""
    ordered = sorted(counts)
    return len(ordered) >= VISITS * RUNS and ordered[AGREEING - 1] <= ordered[0] * (1 + AGREEMENT_FRACTION)


def collect(path: Path, minutes: float) -> Counts:
    """Count every point that is not settled, in turns, until all are or the time is over."""
    counts = read_counts(path)
    give_up = time.monotonic() + minutes * 60
    todo = [point for point in all_points() if not settled(counts[point])]
    if not todo or minutes <= 0:
        return counts
    from conditions import conditions

    from heterollm.kernels.npu import QnnNpu

    disturbed = 0
    cache = tempfile.TemporaryDirectory(prefix="heterollm-cycles-")
    os.environ["HETEROLLM_CACHE"] = cache.name
    npu = QnnNpu(emulator=True, compile_in_child=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        fill_tiles = _filler(npu)
        while todo and time.monotonic() < give_up:
            for point in sorted(todo, key=lambda point: len(counts[point])):
                _wait_until_idle(give_up)
                if time.monotonic() > give_up:
                    break
                busy, own, begin = _pressing_s(), time.process_time(), time.perf_counter()
                fill_tiles()
                found = npu.count_cycles(
                    _slice(point), point.tokens, cast("GraphForm", point.form), runs=RUNS
                )
                wall = time.perf_counter() - begin
                others_s = _pressing_s() - busy - (time.process_time() - own)
                if others_s > OTHERS_FRACTION * wall:
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
        cache.cleanup()
    return counts


def _filler(npu: NpuBackend) -> Callable[[], None]:
    """Return a call that leaves random numbers in every row of the emulator's tiles."""
    largest = max(all_points(), key=lambda point: point.flops)
    x = np.random.default_rng(1).standard_normal((largest.tokens, largest.columns), np.float32)
    x = x.astype(npu.activation_dtype)
    y = np.zeros((largest.tokens, largest.rows), npu.activation_dtype)
    runs = [npu.prepare(_slice(largest), largest.tokens, form).bind(x, y) for form in FORMS]

    def fill() -> None:
        for run in runs:
            run()

    return fill


def _pressing_s() -> float:
    """Return the seconds that the cores have spent on what is not niced since the machine started."""
    from conditions import TICK_S

    user, _nice, system, _idle, _wait, irq, soft, steal, *_ = Path("/proc/stat").read_text().split()[1:11]
    return sum(map(int, (user, system, irq, soft, steal))) * TICK_S


def _wait_until_idle(give_up: float) -> None:
    """Wait for a moment in which nothing but niced processes computes."""
    from conditions import TICK_S

    while time.monotonic() < give_up:
        busy = _pressing_s()
        time.sleep(MOMENT_S)
        if _pressing_s() - busy <= TICK_S:
            return


def _row(point: LinearPoint) -> dict[str, Any]:
    return {"columns": point.columns, "rows": point.rows, "tokens": point.tokens, "form": point.form}


def _slice(point: LinearPoint) -> LinearShard:
    weight = np.random.default_rng(0).standard_normal((point.rows, point.columns), np.float32)
    name = f"random {point.rows} x {point.columns}"
    return LinearShard((weight * 0.05).astype(np.float16), 0, "o", ((0, point.rows),), name)


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
