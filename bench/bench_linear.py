"""How fast are the linear kernels of w4a16 and w4a8 beside ONNX Runtime's, thread for thread?

Times one linear layer of TinyLlama-1.1B's shapes on the OpenCL kernels and on ONNX Runtime's MatMulNBits
(the `host` device's two parts, alone, in turns), at 1 to 256 tokens on random data with weights that rotate
through more copies than the last-level cache holds where memory is the limit. Checks each result against
float64 first. ONNX Runtime has graphs of the standard lengths only.

    python bench/bench_linear.py --threads 1 --out bench/results/linear.jsonl
    python bench/bench_linear.py --threads 1 --precision w4a8 --out bench/results/linear.jsonl
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
from conditions import append_rows, script_parser

import heterollm
from heterollm.base import bandwidth_gbps
from heterollm.kernels.device import Device
from heterollm.kernels.devices import open_device
from heterollm.kernels.formats import QuantizedTensor, linear_errors, reference
from heterollm.kernels.gpu import GpuLinear
from heterollm.kernels.npu import HostNpu, LinearShard
from heterollm.profiler.measure import measure_interleaved

SHAPES = {"qkv": (2560, 2048), "o": (2048, 2048), "gate_up": (11264, 2048), "down": (2048, 5632)}
TOKENS = (1, 2, 4, 8, 16, 32, 128, 256)
MEMORY_BOUND_TOKENS = 16
COPIES_BYTES = 96 * 2**20
BLOCK = 32


def random_weight(generator: np.random.Generator, rows: int, columns: int) -> QuantizedTensor:
    """Return random 4-bit codes with scales that keep the outputs near one."""
    blocks = columns // BLOCK
    return QuantizedTensor(
        generator.integers(0, 256, (rows, blocks, BLOCK // 2), np.uint8),
        (generator.uniform(0.5, 1.5, (rows, blocks)) / (4 * np.sqrt(columns))).astype(np.float16),
        None,
        4,
        BLOCK,
    )


def in_turn(calls: list[Callable[[], Any]]) -> Callable[[], Any]:
    """Return a call that runs the next of several each time."""
    turns = cycle(calls)
    return lambda: next(turns)()


def bench_shape(device: Device, name: str, tokens: int, seed: int, rounded: bool) -> dict[str, Any]:
    """Measure one shape at one length and return its row."""
    rows, columns = SHAPES[name]
    assert device.npu is not None
    generator = np.random.default_rng([seed, rows, tokens])
    x = device.gpu.shared((tokens, columns), np.float32)
    y = device.gpu.shared((tokens, rows), np.float32)
    x.array[...] = generator.standard_normal((tokens, columns))
    copies = 2
    if tokens <= MEMORY_BOUND_TOKENS:
        copies = max(2, COPIES_BYTES // (rows * columns * 9 // 16))
    opencl, runtime = [], []
    inputs = reference.round_inputs(x.array, BLOCK) if rounded else x.array.astype(np.float64)
    for copy in range(copies):
        weight = random_weight(generator, rows, columns)
        packed = GpuLinear.pack(device.gpu, [weight], activation_dtype=np.float32, integer_inputs=rounded)
        opencl.append(packed.launch(x, y, tokens=tokens, label=name))
        checked = [(opencl[-1], device.gpu.finish)]
        if tokens in device.npu.standard_lengths:
            part = LinearShard(weight, copy, name, ((0, rows),), f"bench {seed} {tokens}", rounded)
            runtime.append(device.npu.prepare(part, tokens).bind({"x": x.array}, {"y": y.array}))
            checked.append((runtime[-1], lambda: None))
        expected = inputs @ weight.dequantize().astype(np.float64).T
        for launch, wait in checked:
            y.array.fill(np.nan)
            launch()
            wait()
            if not linear_errors(y.array, expected).within("fp32"):
                raise SystemExit(f"{name} at {tokens} tokens is wrong")
    run_opencl = in_turn(opencl)

    def opencl_and_wait() -> None:
        run_opencl()
        device.gpu.finish()

    calls: dict[str, Callable[[], Any]] = {"opencl": opencl_and_wait}
    if runtime:
        calls["onnxruntime"] = in_turn(runtime)
    times = measure_interleaved(calls, warmup=copies, min_time_s=0.5)
    size, work = weight.size_bytes, 2 * tokens * rows * columns
    row: dict[str, Any] = {"shape": name, "rows": rows, "columns": columns, "tokens": tokens}
    for engine, taken in times.items():
        row[f"{engine}_us"] = taken.median_us
        row[f"{engine}_gbps"] = bandwidth_gbps(size, taken.median_us)
        row[f"{engine}_gflops"] = work / taken.median_us / 1e3
        row[f"{engine}_samples_us"] = taken.samples_us
    return row


def cells(row: dict[str, Any], engine: str) -> str:
    """Return an engine's cells of the table, empty where it was not measured."""
    if f"{engine}_us" not in row:
        return "| | |"
    us, gbps, gflops = (row[f"{engine}_{unit}"] for unit in ("us", "gbps", "gflops"))
    return f"{us:.0f} | {gbps:.1f} | {gflops:.0f} |"


def main() -> None:
    """Run all shapes, print a table and append JSON lines."""
    parser = script_parser(__doc__)
    parser.add_argument("--threads", type=int, default=1, help="threads of each part")
    parser.add_argument("--precision", choices=("w4a16", "w4a8"), default="w4a16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    device = open_device("host", gpu_threads=options.threads, npu_threads=0)
    # The parts never run at once here, so both may have all cores.
    device.npu = HostNpu(threads=options.threads)
    common = {
        "version": heterollm.__version__,
        "machine": platform.processor() or platform.machine(),
        "threads": options.threads,
        "precision": options.precision,
        "seed": options.seed,
        **device.description(),
    }
    print("| shape | tokens | OpenCL us | GB/s | GFLOP/s | ONNX Runtime us | GB/s | GFLOP/s |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in SHAPES:
        for tokens in TOKENS:
            row = bench_shape(device, name, tokens, options.seed, options.precision == "w4a8")
            print(f"| {name} | {tokens} | {cells(row, 'opencl')} {cells(row, 'onnxruntime')}", flush=True)
            append_rows(options.out, {**common, **row})


if __name__ == "__main__":
    main()
