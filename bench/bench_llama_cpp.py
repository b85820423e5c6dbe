"""How fast is heterollm's `gpu` level on all cores beside llama.cpp, on the same weights?

TinyLlama-1.1B's shape with random weights, written twice: safetensors, and GGUF with the same 4-bit blocks
(Q4_0) and the same 8-bit embedding and head (Q8_0), bit for bit. Each engine runs in a child process of its
own with the same threads; the children take turns, sample by sample, and their logits are compared before
anything is timed. llama.cpp rounds activations to 8 bits in blocks of 32, as `w4a8` does; `w4a16` does not.
KV cache: llama.cpp FP16, heterollm FP32 on `host`.

Both engines lose where other processes use the cores, llama.cpp more, since its threads spin while they wait.
So a sample starts when the machine is idle, is taken again if others came in between, and the table says how
many had to be kept all the same because the patience ran out.

Prefill: 256 tokens behind 0, 512 and 2048 others. Decode: 64 tokens, one at a time, behind so many.

    pip install -e '.[host,bench]'
    python bench/bench_llama_cpp.py /tmp/tinyllama --out bench/results/llama_cpp.jsonl

What both do on an older processor than this one: llama.cpp built for it, and heterollm told its name. The
engines must report the same instructions, or nothing is measured. For AVX2 without VNNI:

    export CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON"
    pip install --no-binary llama-cpp-python --no-cache-dir llama-cpp-python==0.3.36
    export HETEROLLM_POCL_TARGET=haswell OUT=bench/results/llama_cpp_avx2.jsonl
    python bench/bench_llama_cpp.py /tmp/tinyllama --precisions w4a16 w4a8 --depths 0 256 --out $OUT
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
from conditions import busy_s, conditions, undisturbed, wait_until_idle
from numpy.typing import NDArray

Ids: TypeAlias = NDArray[np.int32]
Floats: TypeAlias = NDArray[np.float32]

CONTEXT: Final = 4096
PROMPT: Final = 256
DECODED: Final = 64
PREFILL_DEPTHS: Final = (0, 512, 2048)
DECODE_DEPTHS: Final = (0, 256, 512, 2048)
DEPTHS: Final = tuple(sorted({*PREFILL_DEPTHS, *DECODE_DEPTHS}))
CHECKED_PROMPT: Final = 64
CHECKED_TOKENS: Final = 8
SMALLEST_SQNR_DB: Final = 25.0
DECODED_AT_ONCE: Final = 16
"""Tokens of one sample: a short one more often finds the machine idle."""
FEATURES: Final = {
    "AVX2": "avx2",
    "FMA": "fma",
    "F16C": "f16c",
    "AVX512": "avx512f",
    "AVX_VNNI": "avx_vnni",
    "AVX512_VNNI": "avx512_vnni",
    "AMX_INT8": "amx_int8",
}
"""What llama.cpp says that it is built for, as the processor's flags."""


class Engine(Protocol):
    """What a child process runs."""

    version: str
    compiled_for: str
    """The processor or the instructions."""

    def feed(self, ids: Ids) -> Floats:
        """Append tokens in one pass; return the logits of the last."""
        ...

    def truncate(self, position: int) -> None:
        """Forget what lies behind a position."""
        ...


class HeteroLlm:
    """heterollm's `gpu` level, without an NPU part."""

    def __init__(self, folder: Path, threads: int, precision: str) -> None:
        import heterollm

        self.version = heterollm.__version__
        self._llm = heterollm.LLM.load(
            folder,
            device="host",
            plan="gpu",
            precision=precision,  # type: ignore[arg-type]
            gpu_threads=threads,
            npu_threads=0,
            context=CONTEXT,
        )
        self._session = self._llm.session()
        self.compiled_for = self._llm.device.gpu.target or "what the driver detects"

    def feed(self, ids: Ids) -> Floats:
        """Append tokens in one pass."""
        return self._session.decode(int(ids[0])) if len(ids) == 1 else self._session.prefill(ids)

    def truncate(self, position: int) -> None:
        """Forget what lies behind a position."""
        self._session.truncate(position)


class LlamaCpp:
    """llama.cpp through llama-cpp-python's bindings of its C functions."""

    def __init__(self, folder: Path, threads: int, _precision: str) -> None:
        import llama_cpp

        self._lib = llama_cpp
        self.version = llama_cpp.__version__
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.compiled_for = llama_cpp.llama_print_system_info().decode()
        model = llama_cpp.llama_model_load_from_file(
            os.fsencode(folder / "model.gguf"), llama_cpp.llama_model_default_params()
        )
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = CONTEXT
        options.n_batch = CONTEXT
        options.n_threads = options.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(model, options)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))

    def feed(self, ids: Ids) -> Floats:
        """Append tokens in one pass."""
        tokens = (ctypes.c_int32 * len(ids))(*ids.tolist())
        if self._lib.llama_decode(self._context, self._lib.llama_batch_get_one(tokens, len(ids))):
            raise SystemExit("llama.cpp refuses the tokens")
        pointer = self._lib.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(pointer, (self._vocabulary,)).copy()

    def truncate(self, position: int) -> None:
        """Forget what lies behind a position."""
        self._lib.llama_memory_seq_rm(self._memory, 0, position, -1)


ENGINES: Final[dict[str, Callable[[Path, int, str], Engine]]] = {
    "w4a16": HeteroLlm,
    "w4a8": HeteroLlm,
    "llama.cpp": LlamaCpp,
}


def serve(name: str, folder: Path, threads: int, seed: int) -> None:
    """Answer requests on the standard streams, one JSON line each, until they end."""
    engine = ENGINES[name](folder, threads, name)
    ids = np.random.default_rng(seed).integers(0, 32_000, CONTEXT).astype(np.int32)
    print(json.dumps({"version": engine.version, "compiled_for": engine.compiled_for}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        depth, tokens = request["depth"], request["tokens"]
        answer: dict[str, Any] = {}
        own_s = time.process_time()
        match request["do"]:
            case "fill":
                engine.truncate(0)
                for start in range(0, depth, 512):
                    engine.feed(ids[start : min(depth, start + 512)])
            case "prefill":
                begin = time.perf_counter()
                engine.feed(ids[depth : depth + tokens])
                answer["samples_us"] = [(time.perf_counter() - begin) * 1e6]
                engine.truncate(depth)
            case "decode":
                moments = [time.perf_counter()]
                for token in ids[depth : depth + tokens]:
                    engine.feed(np.array([token]))
                    moments.append(time.perf_counter())
                answer["samples_us"] = (np.diff(moments) * 1e6).tolist()
                engine.truncate(depth)
            case "check":
                engine.truncate(0)
                rows = [engine.feed(ids[:depth])]
                rows += [engine.feed(ids[depth + i : depth + i + 1]) for i in range(tokens)]
                answer["logits"] = np.array(rows).tolist()
        answer["own_s"] = time.process_time() - own_s
        print(json.dumps(answer), flush=True)


class Child:
    """An engine in a process of its own."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name = name
        arguments = ["--serve", name, "--threads", str(options.threads), "--seed", str(options.seed)]
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, __file__, str(options.folder), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        ready = self._read()
        self.version: str = ready["version"]
        self.compiled_for: str = ready["compiled_for"]

    def ask(self, do: str, depth: int, tokens: int = 0) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, "depth": depth, "tokens": tokens}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def ask_undisturbed(
        self, do: str, depth: int, tokens: int, patience_s: float
    ) -> tuple[list[float], bool]:
        """Return the samples of a request, and whether other processes were idle meanwhile."""
        give_up = time.monotonic() + patience_s
        while True:
            wait_until_idle(give_up)
            begin, busy = time.perf_counter(), busy_s()
            answer = self.ask(do, depth, tokens)
            others_s = busy_s() - busy - answer["own_s"]
            quiet = undisturbed(others_s, time.perf_counter() - begin)
            if quiet or time.monotonic() > give_up:
                return answer["samples_us"], quiet

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"The process of {self.name} ended with {self._process.wait()}.")
        answer: dict[str, Any] = json.loads(line)
        return answer


def compare_logits(children: list[Child]) -> dict[str, float]:
    """Return the SQNR in dB of each engine's logits against the first's, over a prompt and some tokens."""
    logits = {
        child.name: np.array(child.ask("check", CHECKED_PROMPT, CHECKED_TOKENS)["logits"])
        for child in children
    }
    reference = logits[children[0].name]
    found = {
        name: float(10 * np.log10(np.sum(reference**2) / np.sum((values - reference) ** 2)))
        for name, values in logits.items()
        if values is not reference
    }
    for name, decibels in found.items():
        if not decibels >= SMALLEST_SQNR_DB:
            raise SystemExit(f"{name} computes other logits than {children[0].name}: {decibels:.1f} dB")
    return found


def check_instructions(children: list[Child]) -> None:
    """Refuse to compare engines of which one alone is limited to an older processor."""
    from heterollm.kernels.gpu.pocl_target import TARGETS, chosen_target

    chosen = chosen_target()
    if chosen is None:
        return
    may = dict(TARGETS)[chosen] & set(FEATURES.values())
    said = next(child.compiled_for for child in children if child.name == "llama.cpp")
    uses = {flag for name, flag in FEATURES.items() if re.search(rf"\b{name} = 1\b", said)}
    if uses != may:
        built, limits = (", ".join(sorted(flags)) or "none" for flags in (uses, may))
        raise SystemExit(
            f"llama.cpp is built for {built}, and heterollm is limited to {chosen}, which has {limits}."
        )


def measure(children: list[Child], rounds: int, patience_s: float, depths: set[int]) -> list[dict[str, Any]]:
    """Time all cases; in every round each engine takes its turn, the order reversed each time."""
    rows = []
    for depth in sorted(depths):
        cases = [("prefill", PROMPT, rounds)] * (depth in PREFILL_DEPTHS)
        cases += [("decode", DECODED_AT_ONCE, rounds * DECODED // DECODED_AT_ONCE)] * (depth in DECODE_DEPTHS)
        for child in children:
            child.ask("fill", depth)
        for do, tokens, turns in cases:
            samples: dict[str, list[float]] = {child.name: [] for child in children}
            disturbed = 0
            for child in children:
                child.ask(do, depth, tokens)
            for turn in range(turns):
                for child in children[:: 1 if turn % 2 else -1]:
                    taken, quiet = child.ask_undisturbed(do, depth, tokens, patience_s)
                    samples[child.name] += taken
                    disturbed += not quiet
            fraction = disturbed / turns / len(children)
            rows.append({"phase": do, "depth": depth, "samples": samples, "disturbed_fraction": fraction})
            print(f"{do} at {depth} measured", file=sys.stderr, flush=True)
    return rows


def report(rows: list[dict[str, Any]], names: list[str], common: dict[str, Any], out: Path | None) -> None:
    """Print a table and append JSON lines."""
    print(
        f"| phase | depth | {' | '.join(f'{name} tok/s' for name in names)} | "
        f"{' | '.join(f'{name} / llama.cpp' for name in names[:-1])} | disturbed |"
    )
    print("|---|---:|" + "---:|" * 2 * len(names))
    for row in rows:
        tokens, count = (PROMPT, PROMPT) if row["phase"] == "prefill" else (DECODED, 1)
        rates: dict[str, float] = {}
        line = {
            **common,
            "tokens": tokens,
            **{key: row[key] for key in ("phase", "depth", "disturbed_fraction")},
        }
        for name in names:
            low, middle, high = np.percentile(row["samples"][name], [25, 50, 75])
            rates[name] = count / middle * 1e6
            line[name] = {
                "tokens_per_s": rates[name],
                "spread_fraction": (high - low) / middle,
                "samples_us": [round(sample, 1) for sample in row["samples"][name]],
            }
        ratios = {name: rates[name] / rates["llama.cpp"] for name in names[:-1]}
        line["ratios"] = ratios
        cells = [f"{rates[name]:.1f} (±{line[name]['spread_fraction'] * 50:.0f} %)" for name in names]
        cells += [f"{ratio:.2f}" for ratio in ratios.values()]
        cells.append(f"{row['disturbed_fraction']:.0%}")
        print(f"| {row['phase']} {tokens} | {row['depth']} | {' | '.join(cells)} |", flush=True)
        if out:
            out.parent.mkdir(parents=True, exist_ok=True)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def main() -> None:
    """Write the checkpoints, start the engines, compare them, time them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the two checkpoints are, or are written")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each engine")
    parser.add_argument("--precisions", nargs="+", default=["w4a16"], choices=["w4a16", "w4a8"])
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS, choices=DEPTHS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait for an idle machine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--serve", choices=ENGINES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.folder, options.threads, options.seed)
        return
    from random_model import write_checkpoint

    from heterollm.benchmarks.gguf_twin import write_gguf

    write_gguf(write_checkpoint(options.folder, options.seed))
    children = [Child(name, options) for name in (*options.precisions, "llama.cpp")]
    names = [child.name for child in children]
    check_instructions(children)
    sqnr = compare_logits(children)
    print(", ".join(f"{name} agrees with {names[0]} to {value:.1f} dB" for name, value in sqnr.items()))
    rows = measure(children, options.rounds, options.patience, set(options.depths))
    common = {
        "versions": {child.name: child.version for child in children},
        "compiled_for": {child.name: child.compiled_for for child in children},
        "threads": options.threads,
        "seed": options.seed,
        "sqnr_db": sqnr,
        **conditions(),
    }
    for child in children:
        child.close()
    report(rows, names, common, options.out)


if __name__ == "__main__":
    main()
