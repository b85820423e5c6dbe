"""Recorded costs of fp16 linears on the emulator, in both orders: what predictors of stages are judged on.

The rows hold the "cycles" of QNN's own profile, which are host time times a constant of 130 to 160 a
microsecond. Other load inflated single counts up to ten times and lowered none. So they were taken while
other processes were idle, each point was visited until its smallest counts agreed, and its smallest is
taken: a host time in an odd unit, good enough for the places and heights of steps, and no property of any
hardware. They are not taken any more; new measurements of the emulator are CPU times
(emulator_stages.py).
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Final, TypeAlias

from heterollm.kernels.npu import GraphForm
from heterollm.profiler.records import LinearPoint

SIZES: Final = (256, 512, 768, 1024)
TOKENS: Final = (1, 8, 16, 31, 32, 33, 64, 65, 96, 128)
FORMS: Final[tuple[GraphForm, ...]] = ("weight_first", "activation_first")
RUNS: Final = 10
VISITS: Final = 2
AGREEING: Final = 4
"""So many of the smallest counts of a settled point lie within a fraction of the smallest."""
AGREEMENT_FRACTION: Final = 0.04
RESULTS: Final = Path(__file__).parent / "results" / "emulator_cycles.jsonl"

Counts: TypeAlias = dict[LinearPoint, list[int]]


def all_points() -> list[LinearPoint]:
    """Return what was counted, the cheapest first."""
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
