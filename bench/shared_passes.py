"""Measures the tokens a second of 1 to 16 requests together, whose answers share decode passes.

    python bench/random_model.py /tmp/tinyllama
    python bench/shared_passes.py served /tmp/tinyllama --plan gpu --out ROWS
    python bench/shared_passes.py served /tmp/tinyllama --plan gpu --threads 2 --rival LLAMA-SERVER
    python bench/shared_passes.py served tiny-python-lm --repeated 6 --speculative lookup
    python bench/shared_passes.py simulated llama-3-8b --out ROWS

`served` starts a server in a child, and as many clients at once ask for an answer to a short prompt each; the
numbers of clients take turns. The rate has the time of prompts and of the server in it. With `--speculative`
passes check guesses; `--repeated` repeats the first tokens of each prompt, and the likeliest tokens follow,
so that guesses are right. A row has the tokens of a pass, without each answer's first one. `--rival` names
llama.cpp's `llama-server`, which gets the same 4-bit weights as GGUF, as many slots as there are clients, and
all cores; the servers take turns, and one rests while the other answers. `simulated` is the time of
decode passes alone, behind a context, on a simulated SoC under each plan level; nothing is computed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from conditions import append_rows, conditions, origin, script_parser
from soak import Served
from speculation_simulated import RUNS, Simulated

from heterollm.benchmarks.plugins import load_plugin
from heterollm.engine.state import BatchRun

REQUESTS: Final = (1, 2, 4, 8, 16)
LEVELS: Final = ("gpu", "tensor", "auto")
PROMPT_TOKENS: Final = 32
CONTEXT: Final = 1024
START_S: Final = 120


class LlamaServer(Served):
    """llama.cpp's server in a child process, with the weights that heterollm computes with."""

    def __init__(self, command: str, model: str) -> None:
        load_plugin("llama.cpp")  # puts a checkout's engines on the path

        from heterollm_engines.gguf_file import write_gguf

        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        slots, threads = max(REQUESTS), len(os.sched_getaffinity(0))
        sizes = ["-c", str(CONTEXT * slots), "-np", str(slots), "-t", str(threads), "-tb", str(threads)]
        words = [command, "-m", str(write_gguf(Path(model))), *sizes, "--port", str(self.port), "--no-webui"]
        self.process = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)  # noqa: S603
        ends_s = time.monotonic() + START_S
        while not self._answers():
            if (code := self.process.poll()) is not None or time.monotonic() > ends_s:
                raise SystemExit(f"{' '.join(words)} does not answer; exit status {code}.")
            time.sleep(0.2)

    def _answers(self) -> bool:
        try:
            return self.get("/health").get("status") == "ok"
        except OSError:
            return False


def passes_of(server: Served) -> int:
    """Return the decode passes of heterollm's server so far."""
    return int(server.metric("heterollm_decode_passes"))


def served(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each server and number of requests at once."""
    model, tokens, threads, rival = options.model, options.tokens, options.threads, options.rival
    # New prompts each time, as both servers know the beginnings of earlier ones.
    ids = np.random.default_rng(0)
    words = ["--device", "host", "--plan", options.plan, "--precision", options.precision]
    words += ["--context", str(CONTEXT), "--exact" if options.exact else "--no-exact"]
    words += ["--gpu-threads", str(threads)] if threads else []
    words += ["--speculative", options.speculative] if options.speculative else []
    period, chosen = options.repeated or PROMPT_TOKENS, {"temperature": 0} if options.repeated else {}
    servers: dict[str, Served] = {}

    def answer(server: Served, prompt: list[int]) -> None:
        body = {"model": "soak", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, **chosen}
        status, text = server.post("/v1/completions", json.dumps(body).encode())
        assert status == 200, text

    rates = defaultdict[tuple[str, int], list[float]](list)
    passes = defaultdict[int, int](int)
    try:
        if rival:
            servers["llama.cpp"] = LlamaServer(rival, model)
        servers["heterollm"] = own = Served(model, words)
        with ThreadPoolExecutor(max(REQUESTS)) as clients:
            for turn in range(options.rounds + 1):  # the first one compiles
                for count, (name, server) in itertools.product(REQUESTS, servers.items()):
                    repeats = -(-PROMPT_TOKENS // period)
                    prompts = np.tile(ids.integers(3, 2000, (count, period)), repeats)[:, :PROMPT_TOKENS]
                    before, begin_s = passes_of(own), time.perf_counter()
                    list(clients.map(partial(answer, server), prompts.tolist()))
                    took_s = time.perf_counter() - begin_s
                    if turn:
                        rates[name, count].append(count * tokens / took_s)
                        passes[count] += passes_of(own) - before
    finally:
        for server in servers.values():
            server.process.terminate()
            server.process.wait(60)
    for (name, count), found in sorted(rates.items()):
        fixed = {"model": Path(model).name, "plan": Path(options.plan).name, "tokens": tokens}
        fixed |= {"rounds": options.rounds, "precision": options.precision, "threads": threads}
        fixed |= {"engine": name, "repeated": options.repeated, "requests": count}
        rate = round(statistics.median(found), 2)
        row = {"bench": "shared_passes", **conditions(), **fixed, "tokens_per_s": rate}
        if servers[name] is own:
            each = round(options.rounds * count * (tokens - 1) / passes[count], 2)
            row |= {"speculative": options.speculative, "passes": passes[count], "tokens_per_pass": each}
        yield row


def simulated(model: str, soc: str, position: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each plan level and number of sessions."""
    for level in LEVELS:
        made = Simulated(model, soc, level, position)
        engine, now_s = made.engine, made.device.now_s
        token = np.zeros(1, np.int32)
        rows = [BatchRun(engine.new_cache(), position, token) for _ in range(max(REQUESTS))]
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
    parser.add_argument("--precision", default="w4a16", help="of the server")
    parser.add_argument("--threads", type=int, default=0, help="of the server's GPU")
    parser.add_argument("--rival", help="llama.cpp's program llama-server, to measure beside")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer of the server")
    parser.add_argument("--speculative", help="how the server guesses: lookup, or a draft model")
    parser.add_argument("--repeated", type=int, default=0, help="tokens of a prompt that it repeats")
    parser.add_argument("--exact", action="store_true", help="share passes only where that changes no answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--soc", default="snapdragon-8gen3")
    parser.add_argument("--position", type=int, default=1000, help="context of a simulated pass")
    options = parser.parse_args()
    if options.where == "served":
        rows = served(options)
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
