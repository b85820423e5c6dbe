"""Measures the CPU time of emulating one fp16 weight at many lengths, in both orders, and draws it.

Points are visited in turns, and the smallest time of each is drawn: other load adds to single times. Before
each visit a graph of whole tiles runs, so that rows beyond a length are no zeros, which the emulator would
skip. Times are kept as JSON lines; a second run adds to them, and `--minutes 0` only draws.

    python bench/emulator_stages.py --minutes 4
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np
from conditions import append_rows, conditions, script_parser

from heterollm.kernels.npu import GraphForm, LinearShard
from heterollm.report.figures import new_figure, save_png, step_curves

SIZE: Final = 256
TOKENS: Final = (1, 4, 8, 12, 16, 20, 24, 28, 31, 32, 33, 36, 48, 63, 64, 65, 80, 96, 97, 112, 128)
LONGEST: Final = max(TOKENS)
NAMES: Final[dict[GraphForm, str]] = {
    "weight_first": "weight first, W·x",
    "activation_first": "activation first, x·W",
}
RUNS: Final = 20
HERE: Final = Path(__file__).resolve().parent

Times: TypeAlias = dict[tuple[str, int], list[float]]
"""CPU time of every run in microseconds by order and tokens."""


def read_times(path: Path) -> Times:
    """Return the times in a results file, none if there is no file."""
    times: Times = defaultdict(list)
    if path.exists():
        for line in path.read_text("utf-8").splitlines():
            row = json.loads(line)
            times[row["form"], row["tokens"]] += row["cpu_us"]
    return times


def collect(path: Path, minutes: float) -> None:
    """Visit all points in turns until the time is over, each at least once."""
    from heterollm.kernels.npu import QnnNpu

    values = np.random.default_rng(0).standard_normal((SIZE, SIZE), np.float32) * 0.05
    part = LinearShard(values.astype(np.float16), 0, "o", ((0, SIZE),), f"random {SIZE} x {SIZE}")
    give_up = time.monotonic() + minutes * 60
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="heterollm-stages-") as cache:
        os.environ["HETEROLLM_CACHE"] = cache
        npu = QnnNpu(emulator=True, compile_in_child=False)
        try:
            x = np.random.default_rng(1).standard_normal((LONGEST, SIZE), np.float32)
            y = np.zeros((LONGEST, SIZE), npu.activation_dtype)
            fillers = [
                npu.prepare(part, LONGEST, form).bind({"x": x.astype(npu.activation_dtype)}, {"y": y})
                for form in NAMES
            ]
            rounds = 0
            while rounds == 0 or time.monotonic() < give_up:
                for tokens in TOKENS:
                    for form in NAMES:
                        for fill in fillers:
                            fill()
                        times_us = npu.cpu_times_us(part, tokens, form, runs=RUNS)
                        row = {
                            "form": form,
                            "tokens": tokens,
                            "size": SIZE,
                            "cpu_us": times_us,
                            **conditions(),
                        }
                        append_rows(path, row)
                rounds += 1
                print(f"{rounds} rounds", flush=True)
        finally:
            npu.close()


def draw(times: Times, target: Path) -> None:
    """Draw the smallest times: both orders, and the one that moves in clean steps alone."""
    smallest: dict[str, dict[int, float]] = defaultdict(dict)
    for (form, tokens), times_us in times.items():
        smallest[form][tokens] = min(times_us) / 1e3
    curves = {name: smallest[form] for form, name in NAMES.items()}
    title = f"Orders and steps of 32 tokens\nemulator, CPU time of emulation\nfp16 weight of {SIZE} x {SIZE}"
    figure, (both, alone) = new_figure(title, panels=2)
    step_curves(both, curves, "CPU time, ms", logarithmic=False)
    name = NAMES["weight_first"]
    step_curves(alone, {name: curves[name]}, "CPU time, ms", logarithmic=False)
    for panel in (both, alone):
        panel.set_ylim(bottom=0)
    save_png(figure, target)


def main() -> None:
    """Measure, then draw."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "emulator_stages.jsonl")
    parser.add_argument("--picture", type=Path, default=HERE.parent / "docs" / "emulator_stages.png")
    options = parser.parse_args()
    if options.minutes > 0:
        collect(options.out, options.minutes)
    times = read_times(options.out)
    if not times:
        raise SystemExit(f"{options.out} has no times; run without --minutes 0.")
    draw(times, options.picture)
    print(f"{options.picture}: the smallest of {sum(map(len, times.values()))} times of {len(times)} points")


if __name__ == "__main__":
    main()
