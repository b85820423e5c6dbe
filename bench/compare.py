"""What became faster or slower between two runs of `heterollm bench`, and what is noise?

Times are compared by Welch's t interval of their logarithms. A change is one if the 95 % interval of the
ratio leaves 1 out and the ratio is at least 2 % away from it; with fewer than three samples on either side
nothing is said. Disturbed samples are left out where three undisturbed ones remain on both sides. Files are
JSON lines as `--out` writes them; lines of one test and configuration are taken together.

    heterollm bench MODEL -o before.jsonl
    heterollm bench MODEL -o after.jsonl
    python bench/compare.py before.jsonl after.jsonl
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from heterollm.base import HeteroLLMError
from heterollm.benchmarks import read_rows
from heterollm.benchmarks.comparison import Comparison, compare_row_sets


def report(comparison: Comparison) -> list[str]:
    """Return the lines of the report: a table, what only one file has, and a summary."""
    lines = [
        "| test | configuration | before t/s | after t/s | times as fast | verdict |",
        "|---|---|---:|---:|---:|---|",
    ]
    lines += [
        f"| {one.test} | {one.label} | {one.before_ts:.2f} | {one.after_ts:.2f} "
        f"| {one.change} | {one.change.verdict} |"
        for one in comparison.compared
    ]
    lines += [f"Only before: {name}" for name in comparison.only_before]
    lines += [f"Only after: {name}" for name in comparison.only_after]
    lines += [f"Differs: {text}" for text in comparison.differences]
    counts = len(comparison.compared), len(comparison.faster), len(comparison.slower)
    lines.append(
        f"{counts[0]} compared: {counts[1]} faster, {counts[2]} slower, the rest is noise or too few samples."
    )
    return lines


def main() -> int:
    """Compare two files; 1 if something became slower and that was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument(
        "--fail-on-slower", action="store_true", help="exit with 1 if something became slower"
    )
    options = parser.parse_args()
    try:
        comparison = compare_row_sets(read_rows(options.before), read_rows(options.after))
    except HeteroLLMError as error:
        print(error, file=sys.stderr)
        return 2
    print("\n".join(report(comparison)))
    return 1 if options.fail_on_slower and comparison.slower else 0


if __name__ == "__main__":
    sys.exit(main())
