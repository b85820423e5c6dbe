"""What share of a prompt's time does attention take on `host`, dense and sparse?

Loads the first layers of a model with dense attention, and with sparse attention whose scores the NPU or the
GPU estimates, each head with the same share of keys. It runs prompts of each length in turns. Linear layers
run on the GPU, so that plans differ in attention alone; all layers are alike, and a few show the share.
Attention lasts from the begin of a layer's first kernel (codes of queries and keys, or dense attention) to
the end of its last one, waits between them included; RoPE does not count. `overlap` is the time in which the
NPU estimates while a kernel of the GPU runs.

    python bench/published_model.py /tmp/smollm2
    python bench/sparse_prefill.py /tmp/smollm2 --layers 4 --out bench/results/sparse_prefill.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, Final

from conditions import append_rows, conditions, script_parser
from msgspec import structs
from safetensors.numpy import load_file, save_file

from heterollm.calibration import calibrate, load_calibration
from heterollm.llm import LLM
from heterollm.planning import calibrated_scales
from heterollm.solver import Plan, SparseAttention
from heterollm.solver.sparse.attention import AttentionEntry, Estimator
from heterollm.solver.sparse.head_pipeline import fused_heads
from heterollm.trace import Span, Trace

ATTENTION: Final = frozenset({"attention", "attention join", "score codes", "scores", "selection"})
MOST: Final = 1 << 20
"""More than any context."""

ESTIMATORS: Final[tuple[Estimator, ...]] = ("npu", "gpu")


def first_layers(model: Path, layers: int, folder: Path) -> Path:
    """Write a checkpoint of a model's first layers, and return its folder."""
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    fields = json.loads((model / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(fields | {"num_hidden_layers": layers}), "utf-8")
    tensors = load_file(model / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if layer_of(name) < layers}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def layer_of(tensor: str) -> int:
    """Return the layer of a tensor; -1 outside of layers."""
    found = re.match(r"model\.layers\.(\d+)\.", tensor)
    return int(found[1]) if found else -1


def sparse_plan(base: Plan, calibration: Path, estimator: Estimator, keep: float, heads: int) -> Plan:
    """Return a plan with sparse attention in all layers and passes."""
    entries = []
    for layer, scales in calibrated_scales(calibration, 1).items():
        exponents = tuple(scale.exponent for scale in scales)
        units = fused_heads(exponents)
        of_units = tuple(exponents[unit[0]] for unit in units)
        placement = SparseAttention((keep,) * heads, units, of_units, estimator)
        entries.append(AttentionEntry((1, MOST), (1, MOST), (layer, layer), placement))
    key = load_calibration(calibration).key
    return structs.replace(base, attention=tuple(entries), calibration=key)


def measured(trace: Trace) -> dict[str, float]:
    """Return the times of a prompt, in milliseconds."""
    layers: dict[tuple[int, int | None], list[Span]] = defaultdict(list)
    for span in trace.spans:
        if span.track != "engine" and span.operator in ATTENTION:
            layers[span.number, span.layer].append(span)
    attention_ns = overlap_ns = 0
    for spans in layers.values():
        attention_ns += max(span.end_ns for span in spans) - min(span.begin_ns for span in spans)
        graphs = [span for span in spans if span.track == "npu"]
        kernels = [span for span in spans if span.track == "gpu"]
        overlap_ns += sum(
            max(0, min(graph.end_ns, kernel.end_ns) - max(graph.begin_ns, kernel.begin_ns))
            for graph in graphs
            for kernel in kernels
        )
    whole_ns = sum(one.end_ns - one.begin_ns for one in trace.passes)
    return {"prefill_ms": whole_ns / 1e6, "attention_ms": attention_ns / 1e6, "overlap_ms": overlap_ns / 1e6}


def bench(options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Yield a row for each length and variant."""
    longest = max(options.tokens)
    common: dict[str, Any] = {"device": "host", "scales": "stepped", "context": longest, "trace": True}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model, file = first_layers(options.model, options.layers, folder / "model"), folder / "heads.json"
        calibrate(model, options.text, output=file, windows=2, gpu_threads=1)
        dense = stack.enter_context(LLM.load(model, plan="gpu", **common))
        models, base = (
            {"dense": dense},
            structs.replace(dense.plan, chunk_length=min(options.chunk, dense.plan.chunk_length)),
        )
        for name in ESTIMATORS:
            plan = sparse_plan(base, file, name, options.keep, dense.config.attention.heads)
            models[name] = stack.enter_context(LLM.load(model, plan=plan, calibration=file, **common))
        text = "\n".join(path.read_text("utf-8") for path in options.text)
        ids = dense.tokenizer.encode(text)
        if len(ids) < longest:
            raise SystemExit(f"The text has {len(ids)} tokens; give longer ones with --text.")
        sessions = {name: llm.session() for name, llm in models.items()}
        for tokens in options.tokens:
            found: dict[str, list[dict[str, float]]] = defaultdict(list)
            for number in range(options.rounds + 1):
                for name, session in sessions.items():
                    session.reset()
                    models[name].take_trace()
                    session.prefill(ids[:tokens])
                    if number:  # the first round compiles
                        found[name].append(measured(models[name].take_trace()))
            yield from (row(options, tokens, name, runs) for name, runs in found.items())


def row(options: argparse.Namespace, tokens: int, name: str, runs: list[dict[str, float]]) -> dict[str, Any]:
    """Return the record of a variant: its fastest run, and the median of all."""
    best: Mapping[str, float] = min(runs, key=lambda one: one["prefill_ms"])
    return {
        "model": options.model.name,
        "layers": options.layers,
        "tokens": tokens,
        "chunk": options.chunk,
        "attention": "dense" if name == "dense" else f"sparse, estimated by the {name.upper()}",
        "keep": 1.0 if name == "dense" else options.keep,
        **best,
        "share": best["attention_ms"] / best["prefill_ms"],
        "median_prefill_ms": median(one["prefill_ms"] for one in runs),
        "median_share": median(one["attention_ms"] / one["prefill_ms"] for one in runs),
        "rounds": len(runs),
    }


def main() -> None:
    """Print a table and append its rows."""
    parser = script_parser(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--chunk", type=int, default=512)
    parser.add_argument("--keep", type=float, default=0.2)
    parser.add_argument("--rounds", type=int, default=3)
    docs = Path(__file__).parent.parent / "docs"
    parser.add_argument("--text", type=Path, nargs="+", default=sorted(docs.glob("*.md")))
    options = parser.parse_args()
    print("| tokens | attention | prefill ms | attention ms | share | overlap ms |")
    print("|---:|---|---:|---:|---:|---:|")
    for one in bench(options):
        times = f"{one['prefill_ms']:.0f} | {one['attention_ms']:.0f} | {one['share']:.1%}"
        print(f"| {one['tokens']} | {one['attention']} | {times} | {one['overlap_ms']:.0f} |", flush=True)
        append_rows(options.out, {"bench": "sparse_prefill", **conditions(), **one})


if __name__ == "__main__":
    main()
