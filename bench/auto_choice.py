"""Compares level ``auto`` with every other level, and with the GPU on all cores.

    python bench/auto_choice.py MODEL... [--prompts 256,1024] [--decode 64] [-r 7] [-o ROWS]

Profiles what is missing first, takes samples in turns, and prints for each test the fastest other
configuration and how ``auto`` compares: it passes if it is faster, or slower within the noise. On a machine
with other work the intervals are wide and say little.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from conditions import script_parser

from heterollm.benchmarks import (
    BenchOptions,
    BenchRow,
    Configuration,
    RowFile,
    best_of,
    cases_of,
    expand,
    groups_of,
    profile_splits,
    run_bench,
    with_baseline,
)
from heterollm.benchmarks.verdict import compare_rows

LEVELS = ("auto", "gpu", "npu", "layer", "tensor", "block")


def judged(rows: Sequence[BenchRow]) -> Iterator[tuple[bool, str]]:
    """Yield whether ``auto`` passes each test, and a line that says so."""
    for (test, precision), group in groups_of(rows).items():
        usable = [row for row in group if row.usable]
        auto = next((row for row in usable if row.asked.asked_level == "auto"), None)
        best = best_of([row for row in usable if row is not auto])
        if auto is None or best is None:
            yield False, f"{test} {precision}: no result of auto or of the others"
            continue
        change = compare_rows(best, auto)
        passed = change.verdict in ("faster", "noise")
        yield (
            passed,
            f"{test} {precision}: auto took {auto.plan_level} and is {change} as fast as {best.label}, the "
            f"fastest other: {'passed' if passed else change.verdict}",
        )


def main() -> int:
    """Run the benches and return the exit code: 1 if ``auto`` fails a test."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--prompts", default="256,1024")
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("-r", "--repetitions", type=int, default=7)
    parser.add_argument("--device", default="host")
    parser.add_argument("-o", "--output", metavar="ROWS", type=Path)
    asked = parser.parse_args()
    cases = cases_of([int(text) for text in asked.prompts.split(",")], [asked.decode])
    failed = False
    for model in asked.models:
        configurations = with_baseline(expand(Configuration(device=asked.device), plan_level=LEVELS))
        for text in profile_splits(model, configurations):
            sys.stderr.write(f"{text}\n")
        options = BenchOptions(model, configurations, cases, asked.repetitions, trace=False)
        keep = None if asked.output is None else RowFile(asked.output).add
        rows = run_bench(options, on_row=keep).rows
        for passed, line in judged(rows):
            failed |= not passed
            sys.stdout.write(f"{model}: {line}\n")
        for note in dict.fromkeys(note for row in rows for note in row.notes if note.startswith("auto: ")):
            sys.stdout.write(f"{model}: {note}\n")
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
