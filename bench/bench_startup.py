"""How long from starting a process to the first token of a model that is cached?

Every sample is a new process: `import heterollm`, then a model of TinyLlama-1.1B's shape (random weights; its
quantised weights and OpenCL programs are in the cache) loaded on `host` and one token generated after a short
prompt. The whole is timed from outside, so the interpreter's start counts.

    python bench/bench_startup.py /tmp/tinyllama --out bench/results/startup.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from conditions import conditions

from heterollm.benchmarks.conditions import wait_until_idle

PROGRAM: Final = """
import sys, time
begin = time.perf_counter()
import heterollm
imported = time.perf_counter()
llm = heterollm.LLM.load(sys.argv[1], device="host", plan=sys.argv[2])
loaded = time.perf_counter()
llm.generate(list(range(1, 33)), max_new_tokens=1, ignore_eos=True)
print(imported - begin, loaded - imported, time.perf_counter() - loaded, flush=True)
import os
os._exit(0)
"""
LEVELS: Final = ("gpu", "layer")
STAGES: Final = ("import", "load", "first_token")
PATIENCE_S: Final = 30.0


def sample(folder: Path, level: str) -> dict[str, float]:
    """Start a process and return the seconds of its stages and of all."""
    wait_until_idle(time.monotonic() + PATIENCE_S)
    begin = time.perf_counter()
    command = [sys.executable, "-c", PROGRAM, str(folder), level]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd="/")  # noqa: S603
    total = time.perf_counter() - begin
    return {**dict(zip(STAGES, map(float, found.stdout.split()), strict=True)), "total": total}


def main() -> None:
    """Measure every level, print a table and append JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the checkpoint is, or is written")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    options = parser.parse_args()
    from random_model import write_checkpoint

    write_checkpoint(options.folder)
    rows: list[dict[str, Any]] = []
    print("| level | import s | load s | first token s | process to first token s | worst |")
    print("|---|---:|---:|---:|---:|---:|")
    for level in LEVELS:
        sample(options.folder, level)
        taken = [sample(options.folder, level) for _ in range(options.rounds)]
        medians = {name: statistics.median(one[name] for one in taken) for name in taken[0]}
        worst = max(one["total"] for one in taken)
        cells = " | ".join(f"{value:.2f}" for value in (*medians.values(), worst))
        print(f"| {level} | {cells} |", flush=True)
        rows.append({**conditions(), "level": level, "median_s": medians, "samples_s": taken})
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
