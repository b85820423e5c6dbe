"""What do 16-bit activations cost: in accuracy of linears, in emulated work, and in perplexity of a model?

    python bench/integer_forms.py linears --out bench/results/integer_forms.jsonl
    python bench/integer_forms.py perplexity MODEL --windows 40 --out bench/results/integer_forms.jsonl

The first runs one weight in each form on Qualcomm's emulator: NMSE against float64 of the same weights, and
the CPU time of the process for a run, the smallest and the largest of several. CPU time is the cost of
emulating; it ranks no forms on silicon. The second runs the model's integer graphs on ONNX Runtime's CPU
provider (`host`), on ranges calibrated with other windows, beside its float graphs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs

import heterollm
from heterollm.calibration import calibrate
from heterollm.kernels.formats import linear_errors, quantize
from heterollm.kernels.npu import GraphForm, LinearRanges, LinearShard, QnnNpu
from heterollm.llm import LLM
from heterollm.solver import Plan

WINDOW = 512
RUNS = 6
FORMS: tuple[GraphForm, ...] = ("matmul_nbits", "integer")


def linears(size: int, tails: bool) -> Iterator[dict[str, Any]]:
    """Yield accuracy and CPU time of each form of a square weight at each length."""
    generator = np.random.default_rng(0)
    values = generator.standard_t(3, (size, size)) if tails else generator.standard_normal((size, size))
    weight = quantize((values / np.sqrt(size)).astype(np.float32), bits=4, block=32, stepped=True)
    exact = weight.dequantize().astype(np.float64).T
    npu = QnnNpu(emulator=True)
    for length in (32, 128, 256):
        x = generator.standard_normal((length, size)).astype(np.float16)
        expected = x.astype(np.float64) @ exact
        ranges = LinearRanges(float(np.abs(x).max()), float(np.abs(expected).max()))
        key = f"bench {size} {tails} {length}"
        shard = LinearShard(weight, 0, "o", ((0, size),), key, ranges=ranges)
        for form in FORMS:
            y = np.zeros((length, size), np.float16)
            call = npu.prepare(shard, length, form).bind(x, y)
            used = []
            for _ in range(RUNS + 1):
                begin = time.process_time()
                call()
                used.append(1e3 * (time.process_time() - begin))
            errors = linear_errors(y, expected)
            yield {
                "kind": "emulated linear",
                "size": size,
                "weights": "student t3" if tails else "normal",
                "tokens": length,
                "form": form,
                "nmse": errors.nmse,
                "worst_row": errors.worst_row,
                "worst_token": errors.worst_token,
                "cpu_ms": min(used[1:]),
                "cpu_ms_most": max(used[1:]),
            }
        npu.release(shard)


def integer_plan(plan: Plan) -> Plan:
    """Return a plan of level ``npu`` with integer graphs in the layers."""
    entries = []
    for entry in plan.entries:
        placed = entry.placement
        if entry.group != "head" and placed.npu_lengths:
            lengths = tuple(max(32, length) for length in placed.npu_lengths)
            placed = structs.replace(placed, npu_lengths=lengths, form="integer")
        entries.append(structs.replace(entry, placement=placed))
    return structs.replace(plan, entries=tuple(entries), slices=())


def perplexity(llm: LLM, windows: Sequence[Sequence[int]]) -> float:
    """Return the perplexity of windows of token ids, each from an empty session."""
    session, total = llm.session(), 0.0
    for ids in windows:
        session.reset()
        scores = session.prefill(ids, all_logits=True)[:-1].astype(np.float64)
        scores -= scores.max(axis=1, keepdims=True)
        sums = np.log(np.exp(scores).sum(axis=1))
        total += float((sums - scores[np.arange(len(scores)), np.asarray(ids)[1:]]).sum())
    return float(np.exp(total / sum(len(ids) - 1 for ids in windows)))


def models(model: Path, text: Path, count: int) -> Iterator[dict[str, Any]]:
    """Yield the perplexity of a model in each form; the last tenth of the text calibrates."""
    words = text.read_text("utf-8")
    common: dict[str, Any] = {"device": "host", "context": WINDOW}
    begin = len(words) * 9 // 10
    with tempfile.TemporaryDirectory() as folder:
        last = Path(folder) / "last.txt"
        last.write_text(words[begin:], "utf-8")
        file = Path(folder) / "calibration.json"
        found = calibrate(model, [last], output=file, gpu_threads=1)
        plan: Plan | None = None
        cases: list[tuple[str, dict[str, Any]]] = [
            ("float weights", {"plan": "gpu", "precision": "fp16"}),
            ("free scales", {"plan": "gpu"}),
            ("stepped scales", {"plan": "npu", "scales": "stepped"}),
            ("stepped scales, 16-bit activations", {"scales": "stepped", "calibration": file}),
        ]
        for name, options in cases:
            with LLM.load(model, **common, **{"plan": plan, **options}) as llm:
                ids = llm.tokenizer.encode(words[:begin], add_bos=False)
                windows = [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW, WINDOW)][:count]
                if name == "stepped scales":
                    plan = integer_plan(llm.plan)
                value = perplexity(llm, windows)
                notes = [note for note in llm.notes if "ranges" in note]
                yield {
                    "kind": "perplexity",
                    "model": model.name,
                    "text": text.name,
                    "windows": len(windows),
                    "weights": name,
                    "perplexity": value,
                    "failed": list(found.failed) if "16-bit" in name else [],
                    "notes": notes,
                }


def main() -> None:
    """Print a table and append its rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("linears")
    first.add_argument("--size", type=int, default=512)
    second = commands.add_parser("perplexity")
    second.add_argument("model", type=Path)
    second.add_argument("--text", type=Path, required=True)
    second.add_argument("--windows", type=int, default=40)
    for one in (first, second):
        one.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.command == "linears":
        rows = (row for tails in (False, True) for row in linears(asked.size, tails))
    else:
        rows = models(asked.model, asked.text, asked.windows)
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)  # noqa: S603
    for row in rows:
        shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()}
        print(" | ".join(f"{name} {value}" for name, value in shown.items()), flush=True)
        if asked.out is not None:
            stated = {
                "bench": "integer_forms",
                "version": heterollm.__version__,
                "commit": found.stdout.strip(),
            }
            with asked.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**stated, **row}) + "\n")


if __name__ == "__main__":
    main()
