"""How much of a decoded token is spent outside of kernels and graph runs, and what do the kernels do?

Overhead is 1 - (kernel events + session time) / wall: the times of a traced run, whose OpenCL queue stamps
every kernel, against the wall of the same run and of an untraced one. Levels `gpu` (all cores on the OpenCL
part, no NPU) and `npu` (half the cores each), every run in a process of its own. A second table breaks the
kernels of prefill and decode down by class behind 0, 512 and 2048 tokens, with decode's launches one by one
instead of merged (kernels/gpu/pocl/merged.py), since a merged launch has one event.

TinyLlama-1.1B's shape with random weights. Only tokens during which other processes were idle count.

    python bench/bench_overhead.py /tmp/tinyllama --out bench/results/overhead.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from conditions import conditions, with_fixed

from heterollm.benchmarks.conditions import CORES, busy_s, undisturbed, wait_until_idle

if TYPE_CHECKING:
    from heterollm.engine import Step
    from heterollm.kernels.gpu import HostClock

LEVELS: Final = ("gpu", "npu")
DEPTHS: Final = (0, 512, 2048)
PROMPT: Final = 256
TOKENS_AT_ONCE: Final = 8
CONTEXT: Final = 4096
PATIENCE_S: Final = 20.0


class Trace:
    """Observes an engine: what the kernels of a pass took, by operator; graph runs under ``graph``."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self.graphs_s = 0.0

    def call_of(self, step: Step) -> Callable[[], Any]:
        """Return a call that does what a step does and is recorded, if it is a kernel or a graph."""
        call = step.run
        if step.action == "kernel":
            names = (step.merged[0], step.merged[-1]) if step.merged else (step,)
            label = " to ".join(part.operator for part in names)
            return lambda: self.events.append((label, call()))
        if step.action != "graph":
            return call

        def run() -> None:
            begin = time.perf_counter()
            call()
            self.graphs_s += time.perf_counter() - begin

        return run

    def during_pass(self, *_which: object) -> contextlib.AbstractContextManager[None]:
        """Record nothing of passes themselves."""
        return contextlib.nullcontext()

    def during(self, _section: str) -> contextlib.AbstractContextManager[None]:
        """Record nothing beside steps."""
        return contextlib.nullcontext()

    def watch(self, clock: HostClock) -> HostClock:
        """Return the clock as it is."""
        return clock

    def take_us(self) -> dict[str, float]:
        """Return the microseconds of each class since the last time."""
        times: dict[str, float] = defaultdict(float)
        for label, event in self.events:
            times[label] += (event.profile.end - event.profile.start) / 1e3
        if self.graphs_s:
            times["graph"] = self.graphs_s * 1e6
        self.events.clear()
        self.graphs_s = 0.0
        return dict(times)


def load(folder: Path, level: str, *, traced: bool, merged: bool) -> tuple[Any, Trace]:
    """Return a loaded model whose passes are recorded from now on."""
    import heterollm.engine.merging
    import heterollm.llm
    import heterollm.loading

    trace = Trace()
    if not merged:
        heterollm.engine.merging.merge_launches = lambda _runtime, calls: list(calls)
    if traced:
        heterollm.loading.open_device = with_fixed(heterollm.loading.open_device, profiling=True)
        heterollm.loading.start_engine = with_fixed(heterollm.loading.start_engine, observer=trace)
    threads = {"gpu_threads": CORES, "npu_threads": 0} if level == "gpu" else {}
    llm = heterollm.llm.LLM.load(folder, device="host", plan=level, context=CONTEXT, **threads)
    return llm, trace


def samples(
    run: Callable[[], None], trace: Trace, count: int, divide: int
) -> tuple[list[float], list[dict[str, float]], int]:
    """Return walls and kernel times in us of undisturbed runs, and how many disturbed ones were kept."""
    walls: list[float] = []
    kernels: list[dict[str, float]] = []
    disturbed = 0
    for _ in range(count):
        give_up = time.monotonic() + PATIENCE_S
        while True:
            wait_until_idle(give_up)
            trace.take_us()
            busy, own, begin = busy_s(), time.process_time(), time.perf_counter()
            run()
            wall = time.perf_counter() - begin
            times = trace.take_us()
            quiet = undisturbed(busy_s() - busy - (time.process_time() - own), wall)
            if quiet or time.monotonic() > give_up:
                break
        disturbed += not quiet
        walls.append(wall * 1e6 / divide)
        kernels.append({name: value / divide for name, value in times.items()})
    return walls, kernels, disturbed


def child(folder: Path, level: str, mode: str, rounds: int) -> list[dict[str, Any]]:
    """Measure in this process: ``untraced`` and ``traced`` decode behind 256 tokens, or all ``classes``."""
    llm, trace = load(folder, level, traced=mode != "untraced", merged=mode != "classes")
    ids = np.random.default_rng(0).integers(0, llm.config.vocab_size, CONTEXT).astype(np.int32)
    session = llm.session()
    on_engine = llm._thread.run  # noqa: SLF001 - decode without the hop between threads, as in generate

    def decode() -> None:
        for token in ids[:TOKENS_AT_ONCE].tolist():
            session.decode_in_place(token)

    rows = []
    for depth in DEPTHS if mode == "classes" else (PROMPT,):
        session.reset()
        if depth:
            session.prefill(ids[:depth])
        cases = {"decode": (decode, TOKENS_AT_ONCE)}
        if mode == "classes":
            cases["prefill"] = (lambda: session.prefill_in_place(ids[:PROMPT]), 1)
        for phase, (run, divide) in cases.items():

            def once(run: Callable[[], None] = run, depth: int = depth) -> None:
                on_engine(run)
                session.truncate(depth)

            once()
            if mode != "untraced" and not trace.take_us():
                raise SystemExit(f"{phase} at {level} ran without an event: the engine has another observer.")
            walls, kernels, disturbed = samples(once, trace, rounds, divide)
            names = {name: None for times in kernels for name in times}
            medians = {name: statistics.median(times.get(name, 0.0) for times in kernels) for name in names}
            rows.append(
                {"level": level, "mode": mode, "phase": phase, "depth": depth, "walls_us": walls,
                 "wall_us": statistics.median(walls), "classes_us": medians, "disturbed": disturbed}
            )  # fmt: skip
    return rows


def in_child(options: argparse.Namespace, level: str, mode: str) -> list[dict[str, Any]]:
    """Return what a process of its own measures."""
    command = [sys.executable, __file__, str(options.folder), "--rounds", str(options.rounds)]
    command += ["--child", level, mode]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
    rows: list[dict[str, Any]] = json.loads(found.stdout)
    return rows


def main() -> None:
    """Measure every level and mode, print two tables and append JSON lines."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the checkpoint is, or is written")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.folder, *options.child, options.rounds)))
        return
    from random_model import write_checkpoint

    write_checkpoint(options.folder)
    rows = []
    print("| level | untraced ms | traced ms | kernels ms | graphs ms | overhead | of the untraced wall |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for level in LEVELS:
        (untraced,), (traced,) = (in_child(options, level, mode) for mode in ("untraced", "traced"))
        graphs = traced["graphs_us"] = traced["classes_us"].pop("graph", 0.0)
        kernels = sum(traced["classes_us"].values())
        traced["overhead_fraction"] = 1 - (kernels + graphs) / traced["wall_us"]
        traced["overhead_of_untraced_fraction"] = 1 - (kernels + graphs) / untraced["wall_us"]
        rows += [untraced, traced]
        cells = [f"{value / 1e3:.2f}" for value in (untraced["wall_us"], traced["wall_us"], kernels, graphs)]
        cells += [f"{traced[name]:.1%}" for name in ("overhead_fraction", "overhead_of_untraced_fraction")]
        print(f"| {level} | {' | '.join(cells)} |", flush=True)
    print("\n| phase | depth | wall ms | attention | classes, share of the kernels' time |")
    print("|---|---:|---:|---:|---|")
    for row in in_child(options, "gpu", "classes"):
        total = sum(row["classes_us"].values())
        parts = sorted(row["classes_us"].items(), key=lambda item: -item[1])
        shares = ", ".join(f"{name} {value / total:.1%}" for name, value in parts if value > 0.003 * total)
        row["attention_fraction"] = row["classes_us"]["attention"] / total
        cells = [row["phase"], str(row["depth"]), f"{row['wall_us'] / 1e3:.1f}"]
        cells.append(f"{row['attention_fraction']:.1%}")
        print(f"| {' | '.join(cells)} | {shares} |", flush=True)
        rows.append(row)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        with options.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({**conditions(), **row}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
