"""Compares the times of saved plans with those of other saved plans, on the clock of a simulated SoC.

A change of the solver is an improvement if its plans are faster where the times are true. Save the plans of
two commits into two folders, one file for each model and level:

    heterollm profile gemma-2b --device sim:snapdragon-8gen3-paper
    heterollm plan gemma-2b --device sim:snapdragon-8gen3-paper --plan tensor -o NEW/gemma-2b.tensor.json

Then this script runs every plan's prompts and decode passes and prints, for each model and level, the mean
changes. All times are simulated.

    python bench/plan_times.py OLD NEW --out bench/results/plan_times.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec.structs import replace

from heterollm.engine import Engine
from heterollm.kernels.open import open_device
from heterollm.model import find_model, op_specs, shape_only_weights
from heterollm.solver import Plan

SHORT: Final = (1, 2, 3, 5, 8, 16, 24, 32, 48, 64, 70, 96)
PROMPTS: Final = (*SHORT, 128, 135, 192, 256, 300, 384, 512, 600, 800, 1024)
DECODE: Final = range(1, 17)
POSITIONS: Final = (0, 256, 1000)
"""Positions of decode passes: a cut that is good behind one context can be bad behind another."""

DEVICE: Final = "sim:snapdragon-8gen3-paper"
RUNS: Final = 3
"""The last run counts: graphs are built and waits learnt before it."""


def times_us(plan: Plan, model: str, group_size: int) -> dict[str, dict[int, float]]:
    """Return the times of passes by phase, with the position of decode, and by tokens."""
    config, device = find_model(model).config, open_device(DEVICE)
    weights = shape_only_weights(config, op_specs(config, "w4a16", group_size, True))
    engine = Engine(device, weights, replace(plan, device=DEVICE), max(PROMPTS) + 64, lambda *_: None)
    cache, logits = engine.new_cache(), np.zeros((max(DECODE), config.vocab_size), np.float32)

    def timed(run: Callable[[], object]) -> float:
        for _ in range(RUNS):
            begin_s = device.now_s()
            run()
        return (device.now_s() - begin_s) * 1e6

    def decode(position: int, tokens: int) -> None:
        if tokens == 1:
            engine.decode(cache, position, 0)
        else:
            engine.prefill(cache, position, np.zeros(tokens, np.int32), "decode", logits[:tokens])

    def prefill(tokens: int) -> None:
        engine.prefill(cache, 0, np.zeros(tokens, np.int32), "prefill", None)

    found = {"prefill": {tokens: timed(lambda: prefill(tokens)) for tokens in PROMPTS}}  # noqa: B023
    for position in POSITIONS:
        found[f"decode at {position}"] = {
            tokens: timed(lambda: decode(position, tokens))  # noqa: B023
            for tokens in DECODE
        }
    engine.close()
    return found


def compared(old: Path, new: Path, group_size: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each phase and position of one model and level: relative changes of times."""
    model, level, _ = new.name.rsplit(".", 2)
    first, second = (
        times_us(Plan.from_json(path.read_text(), source=str(path)), model, group_size) for path in (old, new)
    )
    for phase, old_us in first.items():
        changes = {tokens: second[phase][tokens] / time_us - 1.0 for tokens, time_us in old_us.items()}
        worst = max(changes, key=changes.__getitem__)
        yield {
            "device": f"{DEVICE} (simulated)",
            "model": model,
            "level": level,
            "phase": phase,
            "mean": round(statistics.mean(changes.values()), 5),
            "worst": round(changes[worst], 5),
            "worst_tokens": worst,
            "one_token": round(changes[1], 5),
        }


def main() -> None:
    """Compare all plans that both folders have."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, help="folder of MODEL.LEVEL.json")
    parser.add_argument("new", type=Path, help="folder of MODEL.LEVEL.json")
    parser.add_argument("--group-size", type=int, default=32, help="of the plans' weights")
    parser.add_argument("--out", type=Path, help="file of JSON lines to append to")
    options = parser.parse_args()
    for new in sorted(options.new.glob("*.*.json")):
        old = options.old / new.name
        if not old.exists():
            continue
        rows = list(compared(old, new, options.group_size))
        print(f"{new.stem}:", "; ".join(f"{row['phase']} {row['mean']:+.2%}" for row in rows), flush=True)
        if options.out is not None:
            with options.out.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)


if __name__ == "__main__":
    main()
