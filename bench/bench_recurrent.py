"""What do recurrent blocks cost beside the linears of their layer, and beside attention?

At TinyLlama-1.1B's width of 2048, alone on `host`'s GPU part. A step of decode is the operators between the
linears of such a layer, for one token, beside the four linears of `w4a16`, whose weights and states rotate
through more memory than caches hold. A prompt of 1024 tokens is the scan beside causal attention of as many
heads of that width, a key head to each. Medians of calls in turns, on random data.

    python bench/bench_recurrent.py --threads 1 --out bench/results/recurrent.jsonl
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from bench_linear import COPIES_BYTES, in_turn, random_weight
from conditions import append_rows, conditions, script_parser

from heterollm.kernels.device import Device
from heterollm.kernels.devices import open_device
from heterollm.kernels.gpu import DeltaShape, GlueKernels, GpuLinear, HeadShape, Launch
from heterollm.kernels.operators.attention import AttentionCase
from heterollm.kernels.operators.data import Data
from heterollm.kernels.operators.delta_net import DeltaCase
from heterollm.kernels.operators.operator import Launched
from heterollm.kernels.operators.output_gate import OutputGateCase
from heterollm.kernels.operators.short_conv import ShortConvCase
from heterollm.profiler.measure import measure_interleaved

WIDTH, NETWORK, PROMPT = 2048, 5632, 1024
DELTA: Final = DeltaShape(key_heads=16, value_heads=16, key_dim=128, value_dim=128, taps=4)
SPACE: Final = DeltaShape(key_heads=1, value_heads=32, key_dim=128, value_dim=64, taps=4, recalls=False)
BLOCKS: Final[dict[str, tuple[int, Callable[[int], Sequence[Launched]]]]] = {
    "gated delta net": (
        sum(DELTA.members.values()),
        lambda tokens: (
            DeltaCase(tokens, 1, DELTA),
            OutputGateCase(tokens, 16, 128, (0, 0), normed=True),
        ),
    ),
    "state space": (
        sum(SPACE.members.values()),
        lambda tokens: (
            DeltaCase(tokens, 1, SPACE),
            OutputGateCase(tokens, 1, WIDTH, (0, 0), normed=True, gate_first=True, weights_by_head=True),
        ),
    ),
    "short convolution": (3 * WIDTH, lambda tokens: (ShortConvCase(tokens, 1, WIDTH, 3, (0,) * 3),)),
}
"""Rows of the first linear, and the operators of a pass, by block."""

HEADS: Final = {"gated delta net": (16, 128), "state space": (32, 64)}
"""Heads of values and their width."""


def waited(device: Device, calls: Sequence[Sequence[Callable[[], Any]]]) -> Callable[[], Any]:
    """Return a call that makes the next group of calls and waits for the last of them."""

    def run(group: Sequence[Callable[[], Any]]) -> None:
        for call in group:
            call()
        device.gpu.finish()

    return in_turn([lambda group=group: run(group) for group in calls])


def launches(on: GlueKernels, cases: Sequence[Launched], seed: int) -> list[Launch]:
    """Return the launches of operators on data of their own."""
    return [launch for case in cases for launch in case.launches(on, Data(on, np.random.default_rng(seed)))]


def linears(device: Device, rows: int, seed: int) -> list[Launch]:
    """Return the launches of a layer's linears for one token."""
    generator, found = np.random.default_rng(seed), []
    for outputs, inputs in ((rows, WIDTH), (WIDTH, WIDTH), (2 * NETWORK, WIDTH), (WIDTH, NETWORK)):
        x = device.gpu.shared((1, inputs), np.float32)
        y = device.gpu.shared((1, outputs), np.float32)
        x.array[...] = generator.standard_normal((1, inputs))
        weight = random_weight(generator, outputs, inputs)
        packed = GpuLinear.pack(device.gpu, [weight], activation_dtype=np.float32)
        found.append(packed.launch(x, y, tokens=1, label="linear"))
    return found


def decode_row(device: Device, on: GlueKernels, name: str) -> dict[str, Any]:
    """Measure a step of a block beside the linears of its layer."""
    rows, cases = BLOCKS[name]
    weights = (rows * WIDTH + WIDTH**2 + 3 * NETWORK * WIDTH) * 9 // 16
    copies = range(COPIES_BYTES // weights + 1)
    # As many states as a model of 22 layers has.
    calls = {
        "step": waited(device, [launches(on, cases(1), seed) for seed in range(22)]),
        "linears": waited(device, [linears(device, rows, seed) for seed in copies]),
    }
    times = measure_interleaved(calls, warmup=22, min_time_s=2.0)
    step_us, linears_us = (times[part].median_us for part in calls)
    share = step_us / (step_us + linears_us)
    return {"phase": "decode", "block": name, "own_us": step_us, "other_us": linears_us, "share": share}


def prefill_row(device: Device, on: GlueKernels, name: str) -> dict[str, Any]:
    """Measure the scan of a prompt, without its convolution, beside attention."""
    heads, width = HEADS[name]
    scan = launches(on, BLOCKS[name][1](PROMPT)[:1], 0)[1:]
    attention = launches(on, [AttentionCase(PROMPT, 0, HeadShape(heads, heads, width, PROMPT))], 1)
    calls = {"scan": waited(device, [scan]), "attention": waited(device, [attention])}
    times = measure_interleaved(calls, warmup=2, repeats=9)
    scan_us, attention_us = (times[part].median_us for part in calls)
    ratio = scan_us / attention_us
    return {"phase": "prefill", "block": name, "own_us": scan_us, "other_us": attention_us, "share": ratio}


def main() -> None:
    """Measure all blocks, print a table and append JSON lines."""
    parser = script_parser(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="threads of the GPU part")
    options = parser.parse_args()
    device = open_device("host", gpu_threads=options.threads, npu_threads=0)
    on = GlueKernels(device.gpu, device.activation_dtype, device.cache_dtype)
    common = {"bench": "recurrent", "threads": options.threads, **conditions()}
    print("| phase | block | own us | beside us | share |\n|---|---|---:|---:|---:|")
    measured = [*((decode_row, name) for name in BLOCKS), *((prefill_row, name) for name in HEADS)]
    for measure, name in measured:
        row = measure(device, on, name)
        cells = row["phase"], name, f"{row['own_us']:.0f}", f"{row['other_us']:.0f}", f"{row['share']:.3f}"
        print("| " + " | ".join(cells) + " |", flush=True)
        append_rows(options.out, {**common, **row})


if __name__ == "__main__":
    main()
