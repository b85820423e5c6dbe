"""What became faster or slower between two runs of `heterollm bench`, and what is noise?

Times are compared by Welch's t interval of their logarithms. A change is one if the 95 % interval of the
ratio leaves 1 out and the ratio is at least 2 % away from it; with fewer than three samples on either side
nothing is said. Disturbed samples are left out where three undisturbed ones remain on both sides. Files are
JSON lines as `-o` writes them; lines of one test and configuration are taken together, and rows that failed
or have wrong logits are left out.

    heterollm bench MODEL -o before.jsonl
    heterollm bench MODEL -o after.jsonl
    python bench/compare.py before.jsonl after.jsonl
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeAlias

from conditions import script_parser

from heterollm.base import HeteroLLMError, InputError
from heterollm.benchmarks import BenchRow, read_rows
from heterollm.benchmarks.significance import FEWEST_SAMPLES, Change, compare_times

Rows: TypeAlias = Sequence[BenchRow]
Grouped: TypeAlias = dict[tuple[object, ...], list[BenchRow]]

CONDITIONS: Final = ("cpu_info", "heterollm_version", "fingerprint")


@dataclass(frozen=True, slots=True)
class Compared:
    """One test with one configuration, in both sets; rates are medians of the compared samples."""

    label: str
    test: str
    before_ts: float
    after_ts: float
    change: Change


def compare_row_sets(before: Rows, after: Rows) -> Iterator[Compared]:
    """Yield the tests that two sets of rows have in common, in the order of the first set.

    Raises:
        InputError: The sets have times of different kinds, such as measured and simulated ones.
    """
    kinds = sorted({row.time_kind for row in (*before, *after) if row.usable and row.time_kind})
    if len(kinds) > 1:
        raise InputError(
            f"The rows have times of different kinds ({', '.join(kinds)}), which are not compared.",
            fix="Compare files with times of one kind.",
        )
    first, second = grouped(before), grouped(after)
    for key in first:
        if key in second:
            times = _times(first[key], second[key])
            row = first[key][0]
            rates = (row.tokens / statistics.median(side) * 1e6 for side in times)
            yield Compared(row.label, row.test, *rates, compare_times(*times))


def grouped(rows: Rows) -> Grouped:
    """Return the usable rows by what must be equal to compare two."""
    found: Grouped = {}
    for row in rows:
        if row.usable:
            asked, setup = row.asked, row.setup
            key = (row.label, row.test, row.engine, asked.asked_level, asked.group_size, setup.model_type)
            found.setdefault((*key, row.time_kind), []).append(row)
    return found


def _times(before: Rows, after: Rows) -> tuple[list[float], list[float]]:
    def taken(rows: Rows, *, calm: bool) -> list[float]:
        return [
            time_us
            for row in rows
            for time_us, disturbed in zip(row.times_us, row.times.samples_disturbed, strict=True)
            if not (calm and disturbed)
        ]

    calm = taken(before, calm=True), taken(after, calm=True)
    if min(map(len, calm)) >= FEWEST_SAMPLES:
        return calm
    return taken(before, calm=False), taken(after, calm=False)


def missing(rows: Rows, others: Rows) -> list[str]:
    """Return test and configuration of rows that others lack."""
    lacking = grouped(rows).keys() - grouped(others).keys()
    return [f"{own[0].test}, {own[0].label}" for key, own in grouped(rows).items() if key in lacking]


def differences(before: Rows, after: Rows) -> list[str]:
    """Return the conditions in which two runs differ: machine, versions, seed."""
    sides = [_conditions(before), _conditions(after)]
    names = dict.fromkeys(name for side in sides for name in side)
    words = {name: [", ".join(sorted(side.get(name, {"none"}))) for side in sides] for name in names}
    return [f"{name}: {one} before, {other} after" for name, (one, other) in words.items() if one != other]


def _conditions(rows: Rows) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {
        name: {str(getattr(row.setup, name)) for row in rows} for name in CONDITIONS
    }
    found["seed"] = {str(row.asked.seed) for row in rows}
    for row in rows:
        for name, version in row.setup.versions.items():
            found.setdefault(name, set()).add(version)
    return found


def report(before: Rows, after: Rows, compared: Sequence[Compared]) -> Iterator[str]:
    """Yield the lines of the report: a table, what only one file has, and a summary."""
    yield "| test | configuration | before t/s | after t/s | times as fast | verdict |"
    yield "|---|---|---:|---:|---:|---|"
    for one in compared:
        cells = (f"{one.before_ts:.2f}", f"{one.after_ts:.2f}", str(one.change), one.change.verdict)
        yield f"| {one.test} | {one.label} | {' | '.join(cells)} |"
    yield from (f"Only before: {name}" for name in missing(before, after))
    yield from (f"Only after: {name}" for name in missing(after, before))
    yield from (f"Differs: {text}" for text in differences(before, after))
    faster, slower = (sum(one.change.verdict == word for one in compared) for word in ("faster", "slower"))
    yield f"{len(compared)} compared: {faster} faster, {slower} slower, the rest is noise or too few samples."


def main() -> int:
    """Compare two files; 1 if something became slower and that was asked for."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument(
        "--fail-on-slower", action="store_true", help="exit with 1 if something became slower"
    )
    options = parser.parse_args()
    try:
        before, after = read_rows(options.before), read_rows(options.after)
        compared = list(compare_row_sets(before, after))
    except HeteroLLMError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(report(before, after, compared)))
    return int(options.fail_on_slower and any(one.change.verdict == "slower" for one in compared))


if __name__ == "__main__":
    sys.exit(main())
