"""Which of two installations, or of two environments, is faster? `heterollm bench` of both in turns.

Both commands get the same model and options; a pair is one run of each, and the order changes from pair to
pair, so that a machine whose speed drifts slows both. The ratio of a test is the second command's tokens a
second over the first one's, pair by pair: the table has the median, the least and the largest.

    python bench/pairs.py "env HETEROLLM_TUNING=off heterollm" heterollm --out bench/results/pairs.jsonl \
        -- MODEL -p 256 -n 0 --precision w4a16,w4a8 --plan gpu --threads 2+0
"""

from __future__ import annotations

import json
import shlex
import statistics
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any, TypeAlias

from conditions import append_rows, conditions, script_parser

Test: TypeAlias = tuple[str, str, str]
"""Label of a configuration, name of a test, and model."""


def rates(command: str, options: list[str]) -> dict[Test, float]:
    """Run a bench and return the median tokens a second of each test."""
    words = [*shlex.split(command), "bench", *options, "--no-trace", "--json"]
    found = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
    rows: list[dict[str, Any]] = json.loads(found.stdout)
    found_rates = {}
    for row in rows:
        setup, times = row.get("setup", row), row.get("times", row)  # older installations write flat rows
        found_rates[row["label"], row["test"], setup["model_filename"]] = statistics.median(
            times["samples_ts"]
        )
    return found_rates


def main() -> None:
    """Measure pairs, print a table and append JSON lines."""
    parser = script_parser(__doc__)
    parser.add_argument("first", help="a command that runs heterollm, such as that of another environment")
    parser.add_argument("second", help="the other command")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("options", nargs="+", help="model and options of `heterollm bench`, behind --")
    asked = parser.parse_args()
    commands = (asked.first, asked.second)
    named = [Path(option).name if Path(option).is_dir() else option for option in asked.options]
    for command in commands:  # compiles and quantises
        rates(command, asked.options)
    found: dict[Test, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for pair in range(asked.pairs):
        for which in (0, 1) if pair % 2 else (1, 0):
            for test, rate in rates(commands[which], asked.options).items():
                found[test][which].append(rate)
    print("| what | test | first, median tokens/s | second | second / first: median | least | largest |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for (label, test, model), (first, second) in found.items():
        ratios = [after / before for before, after in zip(first, second, strict=True)]
        row = {
            **conditions(), "commands": commands, "options": named, "model": model, "label": label,
            "test": test, "first_tokens_per_s": first, "second_tokens_per_s": second,
            "ratio": statistics.median(ratios), "ratio_least": min(ratios), "ratio_largest": max(ratios),
        }  # fmt: skip
        medians = [f"{statistics.median(values):.1f}" for values in (first, second)]
        cells = [f"{row[name]:.2f}" for name in ("ratio", "ratio_least", "ratio_largest")]
        print(f"| {label} | {test} | {' | '.join([*medians, *cells])} |", flush=True)
        append_rows(asked.out, row)


if __name__ == "__main__":
    main()
