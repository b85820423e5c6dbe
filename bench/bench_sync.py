"""What does fast synchronisation gain in decode, against clFinish after every operator?

The bundled model decodes on plan `npu` (every linear on the NPU part) and on a plan that cuts every group of
linears along rows, in the middle. Every way of waiting (`--sync`) is a model of its own in one process; all
take turns, a few tokens at a time, and all decode the same tokens. A row has the medians, the quartiles and
the fastest token, and how many times as fast as `operator` and as `finish` it is, by medians of all tokens
and of those turns during which no other process computed.

    python bench/bench_sync.py --out bench/results/sync.jsonl
"""

# ruff: noqa: SLF001 - the engine is timed on its own thread

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from conditions import conditions

from heterollm.benchmarks.conditions import busy_s, undisturbed, wait_until_idle

PROMPT: Final = 32
TOKENS_AT_ONCE: Final = 20
CONTEXT: Final = 256
BASELINES: Final = ("operator", "finish")


def row_cuts(llm: Any) -> Any:  # noqa: ANN401 - imported late, as the device is chosen at the first import
    """Return a plan that cuts every group along rows, in the middle of each member."""
    from heterollm.solver import Plan, model_shape
    from heterollm.solver.placements import RowsPlacement
    from heterollm.solver.plan_records import PlanEntry

    specs = llm._weights.specs
    alignment = llm.device.npu.row_alignment
    entries = []
    for spec in specs:
        rows = tuple(rows // 2 // alignment * alignment for rows in spec.member_rows)
        for phase, low, high in itertools.chain.from_iterable(
            ((phase, 1, 1), (phase, 2, PROMPT)) for phase in ("prefill", "decode")
        ):
            layers = (spec.layer, spec.layer)
            entries.append(PlanEntry(phase, (low, high), layers, spec.group, RowsPlacement(rows, (high,))))
    plan = llm.plan
    return Plan("rows", plan.device, plan.precision, model_shape(specs), PROMPT, tuple(entries))


def turn(session: Any, tokens: list[int]) -> Callable[[], list[float]]:  # noqa: ANN401
    """Return a call that decodes tokens behind the prompt and returns the microseconds of each."""

    def decode() -> list[float]:
        session.truncate(PROMPT)
        times = []
        for token in tokens:
            begin = time.perf_counter_ns()
            session.decode_in_place(token)
            times.append((time.perf_counter_ns() - begin) / 1e3)
        return times

    return decode


def measure(models: dict[str, Any], turns: int, patience_s: float) -> dict[str, dict[str, list[float]]]:
    """Return the times of all tokens of each model, and of those of undisturbed turns."""
    generator = np.random.default_rng(0)
    ids = generator.integers(
        1, next(iter(models.values())).config.vocab_size, PROMPT + TOKENS_AT_ONCE
    ).tolist()
    calls = {}
    last = {}
    for sync, llm in models.items():
        session = llm.session()
        session.prefill(ids[:PROMPT])
        calls[sync] = turn(session, ids[PROMPT:])
        llm._thread.run(calls[sync])
        last[sync] = llm._engine.last_logits.copy()
    first = next(iter(last))
    assert all(np.array_equal(value, last[first]) for value in last.values()), "the logits differ"
    times: dict[str, dict[str, list[float]]] = {sync: {"all": [], "quiet": []} for sync in models}
    give_up = time.monotonic() + patience_s
    for _ in range(turns):
        for sync, llm in models.items():
            wait_until_idle(min(give_up, time.monotonic() + patience_s / turns))
            busy, own, begin = busy_s(), time.process_time(), time.perf_counter()
            found = llm._thread.run(calls[sync])
            others_s = busy_s() - busy - (time.process_time() - own)
            times[sync]["all"] += found
            if undisturbed(others_s, time.perf_counter() - begin):
                times[sync]["quiet"] += found
    return times


def rows_of(
    plan: str, models: dict[str, Any], times: dict[str, dict[str, list[float]]]
) -> list[dict[str, Any]]:
    """Return a row of results for each way of waiting."""
    medians = {
        kind: {sync: statistics.median(found[kind]) for sync, found in times.items() if found[kind]}
        for kind in ("all", "quiet")
    }
    rows = []
    for sync, found in times.items():
        quartiles = statistics.quantiles(found["all"], n=4)
        row = {
            "plan": plan,
            "sync": sync,
            "decode_strategy": models[sync]._engine.fences.strategies.decode,
            "tokens": len(found["all"]),
            "quiet_tokens": len(found["quiet"]),
            "median_us": quartiles[1],
            "quartiles_us": [quartiles[0], quartiles[2]],
            "fastest_us": min(found["all"]),
            "quiet_median_us": medians["quiet"].get(sync),
        }
        for baseline in BASELINES:
            row[f"times_as_fast_as_{baseline}"] = medians["all"][baseline] / medians["all"][sync]
            quiet = medians["quiet"]
            both = baseline in quiet and sync in quiet
            row[f"quiet_times_as_fast_as_{baseline}"] = quiet[baseline] / quiet[sync] if both else None
        rows.append(row)
    return rows


def main() -> None:
    """Measure and print a JSON line for each plan and way of waiting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="file to which the lines are appended")
    parser.add_argument("--turns", type=int, default=20, help=f"turns of {TOKENS_AT_ONCE} tokens for each")
    parser.add_argument(
        "--patience", type=float, default=60.0, help="seconds to wait for idle moments a plan"
    )
    options = parser.parse_args()

    from heterollm.data import bundled_model
    from heterollm.engine import SYNC_OPTIONS
    from heterollm.llm import LLM

    folder = bundled_model()
    with LLM.load(folder, device="host", plan="npu", context=CONTEXT) as llm:
        plans = {"npu": "npu", "rows": row_cuts(llm)}
        description = llm.device.description()
    for name, plan in plans.items():
        models = {
            sync: LLM.load(folder, device="host", plan=plan, context=CONTEXT, sync=sync)
            for sync in SYNC_OPTIONS
        }
        times = measure(models, options.turns, options.patience)
        for row in rows_of(name, models, times):
            line = json.dumps({**row, "device": description, **conditions()})
            print(line, flush=True)
            if options.out:
                with options.out.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
        for llm in models.values():
            llm.close()


if __name__ == "__main__":
    main()
