"""How long does sparse attention take on the OpenCL device of `host`, beside dense attention?

Times the kernels of one layer at random data, in turns: dense attention, and the four steps of sparse
attention (codes, estimate, selection, attention to what was selected), for a chunk of 256 tokens at the end
of a context. The estimate is the GPU's own; where an NPU makes it, it takes none of the GPU's time, so the
table has both ratios: with all four steps, and without the estimate. Below 1 sparse attention is faster.

    python bench/sparse_attention.py --threads 1 --out bench/results/sparse_attention.jsonl
    python bench/sparse_attention.py --threads 1 --processor-time
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from conditions import append_rows, conditions, script_parser

from heterollm.kernels.device import Device
from heterollm.kernels.devices import open_device
from heterollm.kernels.formats import score_scales
from heterollm.kernels.gpu import (
    STEP_WORDS,
    GlueKernels,
    HeadShape,
    HeadTable,
    KernelStyle,
    KvLayer,
    Launch,
    ScoreMemory,
    Scores,
    Selection,
    SparseShape,
    page_elements,
    pages_of,
)
from heterollm.kernels.operators.attention import attend
from heterollm.kernels.operators.data import fill_slot, step_slot
from heterollm.kernels.operators.score_codes import estimate_scores, write_score_codes
from heterollm.kernels.operators.selection import select_positions
from heterollm.kernels.operators.sparse_attention import attend_selected
from heterollm.profiler.measure import measure_interleaved

HEADS: Final = {"smollm2-135m": (9, 3, 64), "qwen2-1.5b": (12, 2, 128)}
CONTEXTS: Final = (1024, 2048, 4096, 8192)
KEEP: Final = (0.1, 0.2, 0.3, 0.5)
TOKENS: Final = 256
STEPS: Final = ("codes", "estimate", "selection", "attention")


def bench_context(
    device: Device,
    heads: tuple[int, int, int],
    context: int,
    half: bool,
    style: KernelStyle | None,
    timer: Callable[[], int],
) -> list[dict[str, Any]]:
    """Measure one context and return a row for each share that is kept."""
    gpu, generator = device.gpu, np.random.default_rng([*heads, context])
    shape = SparseShape(HeadShape(*heads, context), TOKENS, context)
    own = shape.heads
    kv = np.float16 if half else np.float32
    layers = GlueKernels(gpu, np.float32, kv, style=style)
    end = pages_of(context) * page_elements(own.kv_heads, own.head_dim, kv)
    cache = KvLayer(fill_slot(gpu, generator.standard_normal(end, np.float32).astype(kv)), STEP_WORDS)
    q = fill_slot(gpu, 2 * generator.standard_normal((TOKENS, own.query_columns), np.float32))
    out = gpu.shared((TOKENS, own.query_columns), np.float32)
    step = step_slot(gpu, context - TOKENS, TOKENS)
    scale = score_scales((10.0,) * own.group, 5.0, (80.0,) * own.group)
    memory, scores = ScoreMemory.allocate(gpu, shape), Scores(own.head_dim**-0.5)
    whole = 0, own.kv_heads
    options: dict[str, Any] = {"shape": shape, "slots": whole}

    def call(launches: Sequence[Launch]) -> Callable[[], None]:
        def run() -> None:
            for launch in launches:
                launch()
            gpu.finish()

        return run

    dense = attend(layers, q, cache, out, step, shape=own, scores=scores, tokens=TOKENS)
    calls: dict[tuple[str, float], Callable[[], None]] = {("dense", 0.0): call(dense)}
    for keep in KEEP:
        table = HeadTable.upload(
            gpu, own, [scale] * own.kv_heads, order=range(own.kv_heads), keep=[keep] * own.heads
        )
        selection = Selection.allocate(gpu, shape)
        if keep == KEEP[0]:
            codes = write_score_codes(layers, q, cache, memory, table, step, shape=shape)
            calls["codes", 0.0] = call(codes)
            calls["estimate", 0.0] = call(
                [estimate_scores(layers, memory, exponent=scale.exponent, **options)]
            )
        choice = select_positions(layers, memory, table, selection, step, scores=scores, **options)
        calls["selection", keep] = call([choice])
        sparse = attend_selected(layers, q, cache, table, selection, out, step, scores=scores, **options)
        calls["attention", keep] = call(sparse)
    times = measure_interleaved(calls, warmup=1, min_time_s=1.0, timer=timer)
    medians = {name: taken.median_us for name, taken in times.items()}
    rows = []
    for keep in KEEP:
        parts = {name: medians.get((name, keep), medians.get((name, 0.0), 0.0)) for name in STEPS}
        row: dict[str, Any] = {"keep": keep, "dense_us": medians["dense", 0.0]}
        row |= {f"{name}_us": taken for name, taken in parts.items()}
        total = sum(parts.values())
        row["sparse_over_dense"] = total / row["dense_us"]
        row["without_estimate_over_dense"] = (total - parts["estimate"]) / row["dense_us"]
        rows.append(row)
    return rows


def main() -> None:
    """Run all shapes, print a table and append JSON lines."""
    parser = script_parser(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="threads of the OpenCL device")
    parser.add_argument("--heads", choices=HEADS, nargs="+", default=list(HEADS))
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--half", action="store_true", help="keep keys and values in float16")
    parser.add_argument("--style", choices=("vector", "simt"), help="kernel style; default the device's")
    parser.add_argument(
        "--processor-time", action="store_true", help="the process's time on cores, where others compute too"
    )
    options = parser.parse_args()
    device = open_device("host", gpu_threads=options.threads, npu_threads=0)
    common = {"label": "measured", "threads": options.threads, "style": options.style, "half": options.half}
    timer = time.process_time_ns if options.processor_time else time.perf_counter_ns
    common |= {"clock": timer.__name__, "tokens": TOKENS, **conditions(), **device.description()}
    print(f"Measured on {device.gpu.traits.name}, {options.threads} threads; us of one layer.")
    print(
        "| heads | context | keep | dense | codes | estimate | selection | attention | all / dense |", end=""
    )
    print(" without estimate / dense |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name in options.heads:
        for context in options.contexts:
            for row in bench_context(device, HEADS[name], context, options.half, options.style, timer):
                cells = [f"{row[f'{part}_us']:.0f}" for part in ("dense", *STEPS)]
                cells += [
                    f"{row[ratio]:.2f}" for ratio in ("sparse_over_dense", "without_estimate_over_dense")
                ]
                print(f"| {name} | {context} | {row['keep']} | {' | '.join(cells)} |", flush=True)
                append_rows(options.out, {**common, "heads": name, "context": context, **row})


if __name__ == "__main__":
    main()
