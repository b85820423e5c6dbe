"""What does a KV cache of 16 or 8 bits cost in accuracy, and what does it give in memory and time?

`measured` loads a model thrice on the GPU of `host`, with a cache of 32, of 16 and of 8 bits. It compares the
logits of windows of code and of prose with those of 32 bits, and times tokens and chunks of a prompt behind
contexts, in turns. `simulated` does the same with the times of a large model's tokens on the modelled phone,
where nothing is computed and whose floats have 16 bits.

    python bench/published_model.py /tmp/smollm2
    python bench/kv_bits.py measured /tmp/smollm2 --out bench/results/kv_bits.jsonl
    python bench/kv_bits.py simulated --out bench/results/kv_bits.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
from accuracy import TEXTS
from conditions import append_rows, conditions, script_parser
from rounds import Rounds

from heterollm.base import silent
from heterollm.engine import Engine, Session
from heterollm.kernels.devices import open_device
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.gpu import CACHE_DTYPES
from heterollm.kernels.sim import SIMULATED
from heterollm.llm import LLM
from heterollm.model import find_model, op_specs, shape_only_weights
from heterollm.solver import level_plan
from heterollm.text import divergences, perplexity, surprises, top_1_agreement

GROUP_SIZE: Final = 128
CHUNK: Final = 256
TOKENS: Final = 16
"""Tokens that are decoded in a turn."""

WINDOWS: Final = 4
MOST: Final = 32
"""Bits of the cache that the others are compared with on `host`."""


def accuracy_rows(floats: LLM, coded: LLM, bits: int, window: int) -> Iterator[dict[str, Any]]:
    """Yield the difference that the cache makes for each text."""
    for kind, text in TEXTS.items():
        name, content = text()
        ids = floats.tokenizer.encode(content)
        windows = [ids[first : first + window] for first in range(0, window * WINDOWS, window)]
        surprise: tuple[list[Any], list[Any]] = ([], [])
        agreed, diverged, exact_all, coded_all = [], [], [], []
        for part in windows:
            exact, actual = (llm.session().prefill(part, all_logits=True).copy() for llm in (floats, coded))
            for found, logits in zip(surprise, (exact, actual), strict=True):
                found.append(surprises(logits, np.array(part)))
            agreed.append(top_1_agreement(actual, exact))
            diverged.append(divergences(actual, exact).mean())
            exact_all.append(exact)
            coded_all.append(actual)
        yield {
            "kind": "accuracy",
            "bits": bits,
            "text": kind,
            "text_name": name,
            "windows": len(windows),
            "window_tokens": window,
            "perplexity": perplexity(surprise[0]),
            "coded_perplexity": perplexity(surprise[1]),
            "top_1_agreement": float(np.mean(agreed)),
            "divergence": float(np.mean(diverged)),
            "logits_db": float(sqnr_db(np.concatenate(coded_all), np.concatenate(exact_all))),
        }


def timed_s(session: Session, ids: list[int], position: int, tokens: int) -> float:
    """Return the seconds of tokens, or of a chunk, behind a position; go back to it afterwards."""
    begin = time.perf_counter()
    if tokens == 1:
        for token in ids[:TOKENS]:
            session.decode(token)
    else:
        session.prefill(ids[:tokens])
    seconds = time.perf_counter() - begin
    session.truncate(position)
    return seconds / (TOKENS if tokens == 1 else 1)


def time_rows(loaded: Mapping[int, LLM], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the times of a token and of a chunk behind each context, in turns."""
    generator, longest = np.random.default_rng(0), max(options.contexts)
    ids = generator.integers(3, loaded[MOST].config.vocab_size, longest + CHUNK).tolist()
    for position in options.contexts:
        sessions = {str(bits): llm.session() for bits, llm in loaded.items()}
        for session in sessions.values():
            session.prefill(ids[:position])
        for tokens in (1, CHUNK):

            def timed(name: str, _counted: bool) -> float:
                return timed_s(sessions[name], ids[-CHUNK:], position, tokens)  # noqa: B023

            rounds = Rounds(list(sessions), options.patience)
            rounds.run(options.rounds, timed)
            for bits in (bits for bits in loaded if bits != MOST):
                times = rounds.times(str(MOST), str(bits))
                yield {
                    "kind": "time",
                    "bits": bits,
                    "context": position,
                    "tokens": tokens,
                    "ms": statistics.median(rounds.seconds[str(MOST)]) * 1e3,
                    "coded_ms": statistics.median(rounds.seconds[str(bits)]) * 1e3,
                    "gain": statistics.median(times["over_base"]),
                    "gains": [min(times["over_base"]), max(times["over_base"])],
                    "disturbed": times["disturbed"],
                    "session_bytes": sessions[str(MOST)].memory_bytes,
                    "coded_session_bytes": sessions[str(bits)].memory_bytes,
                }


def measured_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows of a model on `host`."""
    common: dict[str, Any] = {
        "device": "host",
        "plan": "gpu",
        "gpu_threads": options.threads,
        "npu_threads": 0,
    }
    common["context"] = max(*options.contexts, options.window) + CHUNK
    facts = {"time": "measured", "model": Path(options.model).name, "threads": options.threads}
    with ExitStack() as stack:
        loaded = {
            bits: stack.enter_context(LLM.load(options.model, kv_bits=bits, **common))
            for bits in (MOST, 16, 8)
        }
        for bits in (16, 8):
            for row in accuracy_rows(loaded[MOST], loaded[bits], bits, options.window):
                yield facts | row
        for row in time_rows(loaded, options):
            yield facts | row


def simulated_rows(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the times of a large model's tokens on the modelled phone's GPU."""
    found = find_model(options.model)
    specs = op_specs(found.config, "w4a16", GROUP_SIZE, True)
    times: dict[int, list[float]] = {}
    sizes = {}
    for bits in (16, 8):
        device = open_device(f"{SIMULATED}{options.soc}")
        device.cache_dtype = CACHE_DTYPES[bits]
        plan = level_plan(
            "gpu",
            specs,
            device=device.name,
            precision="w4a16",
            standard_lengths=device.standard_lengths,
            chunk_length=512,
        )
        weights = shape_only_weights(found.config, specs)
        engine = Engine(device, weights, plan, max(options.contexts) + 1, silent)
        cache = engine.new_cache()
        sizes[bits] = engine.state_bytes
        times[bits] = []
        for position in options.contexts:
            engine.decode(cache, position, 0)
            begin = device.now_s()
            engine.decode(cache, position, 0)
            times[bits].append(device.now_s() - begin)
    for position, exact, coded_s in zip(options.contexts, times[16], times[8], strict=True):
        yield {
            "kind": "time",
            "time": "simulated",
            "bits": 8,
            "model": options.model,
            "soc": options.soc,
            "context": position,
            "tokens": 1,
            "ms": exact * 1e3,
            "coded_ms": coded_s * 1e3,
            "gain": exact / coded_s,
            "session_bytes": sizes[16],
            "coded_session_bytes": sizes[8],
        }


def main() -> None:
    """Print and keep the rows."""
    parser = script_parser(__doc__, out=False)
    commands = parser.add_subparsers(required=True)
    measured = commands.add_parser("measured")
    measured.add_argument("model")
    measured.add_argument("--threads", type=int, default=2)
    measured.add_argument("--rounds", type=int, default=7)
    measured.add_argument("--window", type=int, default=1024)
    measured.add_argument(
        "--patience", type=float, default=0.0, help="seconds that a round waits for idleness"
    )
    measured.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 4096])
    measured.set_defaults(rows=measured_rows)
    simulated = commands.add_parser("simulated")
    simulated.add_argument("--model", default="llama-3-8b")
    simulated.add_argument("--soc", default="snapdragon-8gen3")
    simulated.add_argument("--contexts", type=int, nargs="+", default=[512, 2048, 4096, 8000])
    simulated.set_defaults(rows=simulated_rows)
    for command in (measured, simulated):
        command.add_argument("--out", type=Path, help="file of JSON lines to append to")
    options = parser.parse_args()
    for row in options.rows(options):
        print(json.dumps(row))
        append_rows(options.out, conditions() | row)


if __name__ == "__main__":
    main()
