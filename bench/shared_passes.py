"""Measures the tokens a second of 1 to 16 requests together, whose answers share decode passes.

    python bench/random_model.py /tmp/tinyllama
    python bench/shared_passes.py served /tmp/tinyllama --plan gpu --out ROWS
    python bench/shared_passes.py simulated llama-3-8b --out ROWS

`served` starts a server in a child, and as many clients at once ask for an answer to a short prompt each; the
numbers of clients take turns. The rate has the time of prompts and of the server in it. `simulated` is the
time of decode passes alone, behind a context, on a simulated SoC under each plan level; nothing is computed.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import numpy as np
from conditions import append_rows, conditions, origin, script_parser
from soak import Served
from speculation_simulated import RUNS, Simulated

from heterollm.engine.state import BatchRow

REQUESTS: Final = (1, 2, 4, 8, 16)
LEVELS: Final = ("gpu", "tensor", "auto")
PROMPT_TOKENS: Final = 32


def served(model: str, plan: str, tokens: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of requests at once."""
    ids = np.random.default_rng(0).integers(3, 2000, (max(REQUESTS), PROMPT_TOKENS)).tolist()
    server = Served(model, ["--device", "host", "--plan", plan, "--context", "1024", "--no-exact"])

    def answer(number: int) -> None:
        body = {"model": "soak", "prompt": ids[number], "max_tokens": tokens, "ignore_eos": True}
        status, text = server.complete(body)
        assert status == 200, text

    rates = defaultdict[int, list[float]](list)
    try:
        with ThreadPoolExecutor(max(REQUESTS)) as clients:
            for turn in range(rounds + 1):  # the first one compiles
                for count in REQUESTS:
                    begin_s = time.perf_counter()
                    list(clients.map(answer, range(count)))
                    took_s = time.perf_counter() - begin_s
                    if turn:
                        rates[count].append(count * tokens / took_s)
    finally:
        server.process.terminate()
        server.process.wait(60)
    for count, own in rates.items():
        fixed = {"model": Path(model).name, "plan": Path(plan).name, "tokens": tokens, "rounds": rounds}
        rate = round(statistics.median(own), 2)
        yield {"bench": "shared_passes", **conditions(), **fixed, "requests": count, "tokens_per_s": rate}


def simulated(model: str, soc: str, position: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each plan level and number of sessions."""
    for level in LEVELS:
        made = Simulated(model, soc, level, position)
        engine, now_s = made.engine, made.device.now_s
        rows = [BatchRow(engine.new_cache(), position, 0) for _ in range(max(REQUESTS))]
        for count in REQUESTS:
            for _ in range(RUNS):  # the last one counts
                begin_s = now_s()
                engine.decode_batch(rows[:count])
            rate = round(count / (now_s() - begin_s), 2)
            fixed = {"model": model, "soc": soc, "plan": level, "position": position}
            yield {**origin("shared_passes"), **fixed, "requests": count, "tokens_per_s": rate}


def main() -> int:
    """Run the bench."""
    parser = script_parser(__doc__)
    parser.add_argument("where", choices=["served", "simulated"])
    parser.add_argument("model")
    parser.add_argument("--plan", default="gpu", help="of the server")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer of the server")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--soc", default="snapdragon-8gen3")
    parser.add_argument("--position", type=int, default=1000, help="context of a simulated pass")
    options = parser.parse_args()
    if options.where == "served":
        rows = served(options.model, options.plan, options.tokens, options.rounds)
    else:
        rows = simulated(options.model, options.soc, options.position)
    first = 0.0
    for row in rows:
        first = row["tokens_per_s"] if row["requests"] == 1 else first
        print(json.dumps(row), f"{row['tokens_per_s'] / first:.2f} times one", flush=True)
        append_rows(options.out, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
