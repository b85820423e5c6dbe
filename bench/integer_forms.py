"""What do 16-bit activations cost: in accuracy of linears, in emulated work, and in perplexity of a model?

    python bench/integer_forms.py linears --size 1024 --out bench/results/integer_forms.jsonl
    python bench/integer_forms.py perplexity MODEL --windows 20 --out bench/results/integer_forms.jsonl
    python bench/integer_forms.py w8a8 MODEL --windows 20 --out bench/results/integer_forms.jsonl
    python bench/integer_forms.py codes --out bench/results/integer_forms.jsonl

The first runs one weight in each form on Qualcomm's emulator: NMSE against float64 of the same weights, and
the CPU time of the process for a run, the smallest and the largest of several. CPU time is the cost of
emulating; it ranks no forms on silicon. Ranges come from other tokens than those of the test. Integer graphs
run with 16-bit codes at their edges and, for comparison, with floats that the graph itself converts; with the
input divided by the largest magnitude of each token, and on one static grid.

The second runs the model's integer graphs on ranges calibrated with other windows, beside its float graphs:
on ONNX Runtime's CPU provider by default, which multiplies values on the 16-bit grids in float32, or with
`--device emulator` on Qualcomm's emulator.

The third runs the model at precision w8a8 on ONNX Runtime's CPU provider, which multiplies its 8-bit integers
exactly: with float activations, with all activations in 8 bits, and with 16 bits below a limit.

The fourth times the GPU's kernels that write and read codes, in pairs, beside those that they follow.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from conditions import append_rows, origin, script_parser
from msgspec import structs
from numpy.typing import NDArray
from onnx import TensorProto, helper
from perplexity import perplexity

from heterollm.calibration import Policy, calibrate, load_calibration
from heterollm.data import bundled_model
from heterollm.kernels.devices import open_device
from heterollm.kernels.formats import CodeGrid, linear_errors, quantize
from heterollm.kernels.gpu import COUNT_WORDS, DeviceMemory, GlueKernels, NpuCodes
from heterollm.kernels.npu import LinearRanges, LinearShard, QnnNpu
from heterollm.kernels.npu.graphs import write_graph
from heterollm.kernels.npu.qnn_held import BLOCK_OPTION
from heterollm.kernels.npu.qnn_runtime import QnnTarget, open_session
from heterollm.kernels.npu.ranges import HEADROOM
from heterollm.kernels.npu.session import HeldSession, SessionGraph
from heterollm.kernels.npu.tensors import INPUT, OUTPUT
from heterollm.kernels.operators.norm import rms_norm
from heterollm.kernels.operators.npu_codes import read_codes, write_codes
from heterollm.llm import LLM
from heterollm.solver import Plan

WINDOW = 512
RUNS = 6
CODE_ROUNDS = 200
LENGTHS = (32, 128, 256)
CALIBRATION_TOKENS = 512
OUTLIER_CHANNELS, OUTLIER_FACTOR = 6, 50

Floats = NDArray[np.float32]


def linears(size: int, tails: bool, outliers: bool) -> Iterator[dict[str, Any]]:
    """Yield accuracy and CPU time of each form of a square weight at each length."""
    generator = np.random.default_rng(0)
    values = generator.standard_t(3, (size, size)) if tails else generator.standard_normal((size, size))
    weight = quantize((values / np.sqrt(size)).astype(np.float32), bits=4, block=32, scale_kind="stepped")
    exact = weight.dequantize().astype(np.float64).T
    channels = generator.choice(size, OUTLIER_CHANNELS, replace=False)

    def tokens(count: int) -> Floats:
        x = generator.standard_normal((count, size))
        if outliers:
            x[:, channels] *= OUTLIER_FACTOR
        return x.astype(np.float16).astype(np.float32)

    seen = tokens(CALIBRATION_TOKENS)
    made = np.abs(seen @ exact).max(axis=1)
    relative = LinearRanges(float((made / np.abs(seen).max(axis=1)).max()))
    # The same graph serves a static grid: all tokens have the factor that ends the range of the input.
    static = HEADROOM[16] * float(np.abs(seen).max())
    on_static = LinearRanges(float(made.max()) / static)
    npu = QnnNpu(emulator=True)
    for length in LENGTHS:
        x = tokens(length)
        expected = x.astype(np.float64) @ exact
        cases: dict[str, tuple[LinearRanges, float | None, str]] = {
            "matmul_nbits": (relative, None, "float16"),
            "integer, a scale for each token": (relative, None, "uint16"),
            "integer, static": (on_static, static, "uint16"),
            "integer, static, float edges": (on_static, static, "float16"),
        }
        for name, (ranges, factor, edges) in cases.items():
            key = f"bench {size} {tails} {outliers}"
            shard = LinearShard(weight, 0, "o", ((0, size),), key, ranges=ranges)
            used, y = _on_emulator(npu, shard, x, factor, edges, integer=name != "matmul_nbits")
            errors = linear_errors(y, expected)
            yield {
                "kind": "emulated linear",
                "label": "emulator, CPU ms",
                "size": size,
                "weights": "student t3" if tails else "normal",
                "activations": f"{OUTLIER_CHANNELS} channels x{OUTLIER_FACTOR}" if outliers else "normal",
                "tokens": length,
                "form": name,
                "edges": edges,
                "sqnr_db": -10 * np.log10(errors.nmse),
                "nmse": errors.nmse,
                "worst_row": errors.worst_row,
                "worst_token": errors.worst_token,
                "cpu_ms": min(used),
                "cpu_ms_most": max(used),
            }
            npu.release(shard)


def _on_emulator(
    npu: QnnNpu, shard: LinearShard, x: Floats, factor: float | None, edges: str, *, integer: bool
) -> tuple[list[float], NDArray[Any]]:
    """Return the CPU times of some runs, in ms, and the output.

    Args:
        npu: The emulator.
        shard: The linear.
        x: Its input.
        factor: The factor of all tokens of an integer graph; None for each token's own.
        edges: Element type of input and output.
        integer: Whether the graph computes in integers.
    """
    length = len(x)
    if not integer:
        y = np.zeros((length, shard.rows), np.float16)
        graph = npu.prepare(shard, length, "matmul_nbits")
        return _cpu_ms(graph.bind({"x": x.astype(np.float16)}, {"y": y})), y
    assert shard.ranges is not None
    grid = shard.ranges.grid
    if edges == "uint16":
        if factor is None:
            given, factors = grid.codes(x)
        else:
            given, _ = replace(grid, input_step=grid.input_step * factor, per_token=False).codes(x)
            factors = np.full(length, factor, np.float32)
        codes = np.zeros((length, shard.rows), np.uint16)
        used = _cpu_ms(npu.prepare(shard, length, "integer").bind({"x": given}, {"y": codes}))
        return used, grid.values(codes, factors)
    assert factor is not None
    with tempfile.TemporaryDirectory() as folder:
        session = open_session(_with_float_edges(shard, length, Path(folder)), _target(), shard.label)
        y = np.zeros((length, shard.rows), np.float16)
        graph = SessionGraph(HeldSession(session), shard, length, np.dtype(np.float16))
        used = _cpu_ms(graph.bind({"x": (x / factor).astype(np.float16)}, {"y": y}))
        return used, y.astype(np.float32) * factor


def _target() -> QnnTarget:
    options = {"backend_type": "htp", "enable_htp_fp16_precision": "1", "soc_model": "57"}
    return QnnTarget(True, options | BLOCK_OPTION | {"htp_graph_finalization_optimization_mode": "3"})


def _with_float_edges(shard: LinearShard, length: int, folder: Path) -> Path:
    """Write an integer graph that converts floats at its edges itself, and return its path."""
    path = write_graph(shard, "integer", np.dtype(np.float16), folder, length)
    model = onnx.load(str(path), load_external_data=False)
    graph = model.graph
    for node in graph.node:
        for names, outer, inner in ((node.input, INPUT, "x_codes"), (node.output, OUTPUT, "y_codes")):
            names[:] = [inner if name == outer else name for name in names]
    before = [
        helper.make_node("Cast", [INPUT], ["x_wide"], to=TensorProto.FLOAT),
        helper.make_node("QuantizeLinear", ["x_wide", "x_step", "zero"], ["x_codes"]),
    ]
    after = [
        helper.make_node("DequantizeLinear", ["y_codes", "y_step", "zero"], ["y_wide"]),
        helper.make_node("Cast", ["y_wide"], [OUTPUT], to=TensorProto.FLOAT16),
    ]
    nodes = [*before, *graph.node, *after]
    del graph.node[:]
    graph.node.extend(nodes)
    for edge in (*graph.input, *graph.output):
        edge.type.tensor_type.elem_type = TensorProto.FLOAT16
    path.write_bytes(model.SerializeToString())
    return path


def _cpu_ms(call: Callable[[], None]) -> list[float]:
    used = []
    for _ in range(RUNS + 1):
        begin = time.process_time()
        call()
        used.append(1e3 * (time.process_time() - begin))
    return used[1:]


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


def models(model: Path, text: Path, count: int, device: str) -> Iterator[dict[str, Any]]:
    """Yield the perplexity of a model in each form; the last tenth of the text calibrates."""
    words = text.read_text("utf-8")
    common: dict[str, Any] = {"device": device, "context": WINDOW, "allow_slow": True}
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
        arithmetic = "float32 of ONNX Runtime between 16-bit grids"
        if device == "emulator":
            arithmetic = "emulated by Qualcomm's emulator"
        for name, options in cases:
            integer = "16-bit" in name
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
                    "device": device,
                    "arithmetic": arithmetic if integer else "float",
                    "perplexity": value,
                    "calibrated": len(found.linears) if integer else 0,
                    "failed": [name for name in found.failed if ".ffn" not in name] if integer else [],
                    "notes": notes,
                }


def eight_bits(model: Path, text: Path, count: int) -> Iterator[dict[str, Any]]:
    """Yield the perplexity of a model at precision w8a8; the last tenth of the text calibrates."""
    words = text.read_text("utf-8")
    begin = len(words) * 9 // 10
    with tempfile.TemporaryDirectory() as folder:
        last = Path(folder) / "last.txt"
        last.write_text(words[begin:], "utf-8")
        cases: dict[str, dict[str, Any]] = {
            "float weights": {"plan": "gpu", "precision": "fp16"},
            "w4a16": {"plan": "gpu"},
            "w8a8, float activations": {"plan": "gpu", "precision": "w8a8"},
        }
        for name, limit_db in (("8-bit activations", None), ("16 bits below 30 dB", 30.0)):
            file = Path(folder) / f"{name}.json"
            calibrate(
                model,
                [last],
                output=file,
                precision="w8a8",
                policy=Policy(limit_db, pruned=1.0),
                gpu_threads=1,
            )
            cases[f"w8a8, {name}"] = {"plan": "npu", "precision": "w8a8", "calibration": file}
        for name, options in cases.items():
            wide = 0
            if "calibration" in options:
                decided = load_calibration(options["calibration"]).activations().values()
                wide = sum(kind == "int16" for kind in decided)
            with LLM.load(model, device="host", context=WINDOW, **options) as llm:
                ids = llm.tokenizer.encode(words[:begin], add_bos=False)
                windows = [ids[at : at + WINDOW] for at in range(0, len(ids) - WINDOW, WINDOW)][:count]
                yield {
                    "kind": "w8a8 perplexity",
                    "model": model.name,
                    "text": text.name,
                    "windows": len(windows),
                    "weights": name,
                    "device": "host",
                    "perplexity": perplexity(llm, windows),
                    "operators in 16 bits": wide,
                    "notes": [note for note in llm.notes if "ranges" in note],
                }


def codes() -> Iterator[dict[str, Any]]:
    """Yield the times of the kernels that write and read codes, beside a norm without codes."""
    with_device = open_device("host", gpu_threads=1, npu_threads=0)
    try:
        for tokens, width in ((1, 4096), (256, 4096)):
            yield from _code_rows(with_device.gpu, tokens, width)
    finally:
        with_device.close()


def _code_rows(gpu: Any, tokens: int, width: int) -> Iterator[dict[str, Any]]:  # noqa: ANN401 - a runtime
    layers = GlueKernels(gpu, np.float32, np.float32)
    x, y, residual = (gpu.shared((tokens, width), np.float32) for _ in range(3))
    generator = np.random.default_rng(0)
    x.array[...] = residual.array[...] = generator.standard_normal((tokens, width))
    weight = gpu.upload(np.ones(width, np.float32))
    sizes = (4 * tokens, 4 * COUNT_WORDS)
    made = {}
    for name, per_token in (("a scale for each token", True), ("static", False)):
        memory = [DeviceMemory(gpu.scratch(size), size) for size in sizes]
        shared = [gpu.shared((tokens, width), np.uint16) for _ in range(2)]
        shared[1].array[...] = generator.integers(1, 65535, (tokens, width))
        grid = CodeGrid(2.0**-12, 2.0**-12, per_token=per_token)
        made[name] = NpuCodes(*shared, *memory, 0, grid)
    options = {"hidden": width, "tokens": tokens, "epsilon": 1e-5}
    launches = {"norm": rms_norm(layers, residual, weight, y, **options)}
    for name, codes in made.items():
        launches[f"norm with codes, {name}"] = rms_norm(layers, residual, weight, y, **options, rounded=codes)
        launches[f"writing of codes, {name}"] = write_codes(layers, x, codes, tokens=tokens, columns=width)
    launches["reading of codes"] = read_codes(layers, made["static"], y, tokens=tokens, member_rows=(width,))
    times: dict[str, list[float]] = {name: [] for name in launches}
    for _ in range(CODE_ROUNDS):
        for name, launch in launches.items():
            begin = time.perf_counter()
            launch()
            gpu.finish()
            times[name].append(1e6 * (time.perf_counter() - begin))
    for name, found in times.items():
        median = float(np.median(found))
        own = {"kind": "codes on PoCL, one core", "tokens": tokens, "columns": width}
        yield {**own, "kernel": name, "median_us": median, "least_us": min(found)}


def main() -> None:
    """Print a table and append its rows."""
    parser = script_parser(__doc__, out=False)
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("linears")
    first.add_argument("--size", type=int, default=1024)
    second = commands.add_parser("perplexity")
    second.add_argument("model", type=Path)
    second.add_argument("--text", type=Path, default=bundled_model() / "held_out.txt")
    second.add_argument("--windows", type=int, default=40)
    second.add_argument("--device", choices=("host", "emulator"), default="host")
    third = commands.add_parser("w8a8")
    third.add_argument("model", type=Path)
    third.add_argument("--text", type=Path, default=bundled_model() / "held_out.txt")
    third.add_argument("--windows", type=int, default=40)
    fourth = commands.add_parser("codes")
    for one in (first, second, third, fourth):
        one.add_argument("--out", type=Path)
    asked = parser.parse_args()
    if asked.command == "linears":
        both = (False, True)
        rows = (row for tails in both for outliers in both for row in linears(asked.size, tails, outliers))
    elif asked.command == "perplexity":
        rows = models(asked.model, asked.text, asked.windows, asked.device)
    elif asked.command == "w8a8":
        rows = eight_bits(asked.model, asked.text, asked.windows)
    else:
        rows = codes()
    for row in rows:
        shown = {name: f"{value:.4g}" if isinstance(value, float) else value for name, value in row.items()}
        print(" | ".join(f"{name} {value}" for name, value in shown.items()), flush=True)
        append_rows(asked.out, {**origin("integer_forms"), **row})


if __name__ == "__main__":
    main()
