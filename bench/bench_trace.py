"""What does recording a trace cost, and how much of it is the queue that stamps its kernels?

The bundled model, or a folder's, decodes and prefills on three models in one process that take turns: `off`
(as anyone loads it), `stamps` (its queue stamps every kernel, and nothing is recorded) and `on` (with
`trace=True`, reading the times included). Plans: `gpu`, `npu`, and `rows`, which cuts every group in the
middle. A row has the medians and the fastest, and what each costs over `off` by either. Only the fastest is
worth something while others use the machine: a load average above a fraction of the cores says they do.

    python bench/bench_trace.py --out bench/results/trace.jsonl
"""

# ruff: noqa: SLF001 - the engine is timed on its own thread

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from bench_sync import PROMPT, TOKENS_AT_ONCE, row_cuts
from conditions import append_rows, conditions, script_parser, with_fixed

MODES: Final = ("off", "stamps", "on")
PLANS: Final = ("gpu", "npu", "rows")
CONTEXT: Final = 256


def load(folder: Path, plan: Any, mode: str) -> Any:  # noqa: ANN401 - imported late, as in bench_sync
    """Return a loaded model of one mode."""
    import heterollm.llm
    import heterollm.loading
    from heterollm.kernels.devices import open_device

    stamps = with_fixed(open_device, profiling=True)
    heterollm.loading.open_device = open_device if mode == "off" else stamps
    try:
        return heterollm.llm.LLM.load(folder, device="host", plan=plan, context=CONTEXT, trace=mode == "on")
    finally:
        heterollm.loading.open_device = open_device


def calls_of(llm: Any, ids: list[int]) -> dict[str, Callable[[], list[float]]]:  # noqa: ANN401
    """Return calls that decode and prefill, and return the microseconds of each step."""
    session = llm.session()
    prompt = np.array(ids[:PROMPT], np.int32)

    def prefill() -> list[float]:
        session.truncate(0)
        begin = time.perf_counter_ns()
        session.prefill_in_place(prompt)
        return [(time.perf_counter_ns() - begin) / 1e3]

    def decode() -> list[float]:
        session.truncate(PROMPT)
        times = []
        for token in ids[PROMPT:]:
            begin = time.perf_counter_ns()
            session.decode_in_place(token)
            times.append((time.perf_counter_ns() - begin) / 1e3)
        return times

    return {"prefill": prefill, "decode": decode}


def measure(models: dict[str, Any], turns: int) -> dict[str, dict[str, list[float]]]:
    """Return the times of every step by phase and mode."""
    ids = np.random.default_rng(0).integers(1, models["off"].config.vocab_size, PROMPT + TOKENS_AT_ONCE)
    calls = {mode: calls_of(llm, ids.tolist()) for mode, llm in models.items()}
    times: dict[str, dict[str, list[float]]] = {
        phase: {mode: [] for mode in models} for phase in calls["off"]
    }
    for turn in range(turns + 1):
        for mode, llm in models.items():
            for phase, call in calls[mode].items():
                found = llm._thread.run(call)
                if turn:  # the first compiles
                    times[phase][mode] += found
    return times


def main() -> None:
    """Measure and print a JSON line for each plan and phase."""
    parser = script_parser(__doc__)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; the bundled one by default")
    parser.add_argument("--turns", type=int, default=20, help=f"turns of {TOKENS_AT_ONCE} tokens for each")
    options = parser.parse_args()

    from heterollm.data import bundled_model

    folder = options.model or bundled_model()
    for plan in PLANS:
        chosen: Any = plan
        if plan == "rows":
            with load(folder, "gpu", "off") as llm:
                chosen = row_cuts(llm)
        models = {mode: load(folder, chosen, mode) for mode in MODES}
        times = measure(models, options.turns)
        for llm in models.values():
            llm.close()
        for phase, found in times.items():
            row: dict[str, Any] = {**conditions(), "model": folder.name, "plan": plan, "phase": phase}
            for mode, own in found.items():
                row[f"{mode}_median_us"] = statistics.median(own)
                row[f"{mode}_fastest_us"] = min(own)
            for mode in MODES[1:]:
                for kind in ("median", "fastest"):
                    row[f"{mode}_{kind}_cost_fraction"] = row[f"{mode}_{kind}_us"] / row[f"off_{kind}_us"] - 1
            print(json.dumps(row), flush=True)
            append_rows(options.out, row)


if __name__ == "__main__":
    main()
