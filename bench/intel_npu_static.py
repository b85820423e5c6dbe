"""What the compiler of Intel's NPUs makes of graphs of linear layers: whether it takes them, and their size.

Nothing runs and no time is measured. The compiler is that of OpenVINO's wheel for Windows, under Wine, since
the wheel for Linux has none. The size of a compiled graph shows in how many bits the weights are held.

    python bench/intel_npu_static.py FOLDER --out bench/results/intel_npu_static.jsonl
    python bench/intel_npu_static.py FOLDER --only 'each block' --platform 4000

FOLDER takes 0.5 GB and is used again. The first run needs root: it installs wine64 and gcc-mingw-w64-x86-64.
It needs `pip install '.[intel]'`. A graph takes seconds.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from conditions import append_rows, origin, script_parser

from heterollm.kernels.formats import QuantizedTensor
from heterollm.kernels.npu import FfnShard, LinearShard
from heterollm.kernels.npu.graphs import write_graph
from heterollm.kernels.npu.openvino_npu import load_openvino
from heterollm.kernels.ops import GraphMemory, WeightFormat

PLATFORMS: Final = {"3720": "Meteor Lake, Arrow Lake", "4000": "Lunar Lake", "5010": "Panther Lake"}
VARIANTS: Final = (
    *("one scale a row", "a product for each block", "blocks as a batch"),
    *("scales as inputs", "codes and scales as inputs"),
)
"""Other ways to hold blocks of 4 bits."""
LIMIT_S: Final = 400
SMALL: Final = 2560 * 1024
"""Most weights of a graph that is compiled for the other platforms than 4000, whose sizes hardly differ."""

PROGRAM: Final = r"""
#include <stdio.h>
#include <stdlib.h>
#include "openvino/c/openvino.h"
#define TRY(call) if (call) { printf("refused: %s\n", ov_get_last_err_msg()); return 1; }
int main(int argc, char **argv) { /* PLATFORM MODEL BLOB */
    ov_core_t *core; ov_model_t *model; ov_compiled_model_t *compiled;
    TRY(ov_core_create(&core))
    TRY(ov_core_read_model(core, argv[2], NULL, &model))
    TRY(ov_core_compile_model(core, model, "NPU", 4, &compiled,
                              "NPU_PLATFORM", argv[1], "NPU_COMPILER_TYPE", "PLUGIN"))
    TRY(ov_compiled_model_export_model(compiled, argv[3]))
    printf("compiled\n"); fflush(stdout);
    _exit(0); /* its threads do not end under Wine */
}
"""


class Case(NamedTuple):
    """A graph: what computes a linear of ``rows`` x ``columns`` for some tokens, or an ffn of that width."""

    graph: str
    rows: int
    columns: int
    tokens: int
    weight: WeightFormat


def _run(command: Sequence[str], *, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:  # noqa: ANN401
    return subprocess.run(list(command), check=check, text=True, **options)  # noqa: S603 - commands of this file


def prepare(folder: Path) -> None:
    """Download the compiler and build the program, where they are missing."""
    tools = {"wine": "wine64 wine", "x86_64-w64-mingw32-gcc": "gcc-mingw-w64-x86-64"}
    missing = [name for tool, names in tools.items() if shutil.which(tool) is None for name in names.split()]
    if missing:
        _run(["apt-get", "install", "-y", "--no-install-recommends", *missing])
    if (folder / "libs" / "compile.exe").exists():
        return
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    named = ["--platform", "win_amd64", "--python-version", "3.11", f"openvino=={version('openvino')}"]
    _run([*command, *named, "-d", str(folder)])
    wheel = next(folder.glob("openvino-*win_amd64.whl"))
    with zipfile.ZipFile(wheel) as files:
        for name in files.namelist():
            if name.startswith(("openvino/libs/", "openvino/include/openvino/")):
                path = folder / name.removeprefix("openvino/")
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(files.read(name))
    (folder / "compile.c").write_text(PROGRAM)
    libs = folder / "libs"
    parts = ["-I", "include", "compile.c", "libs/openvino_c.lib", "-o", str(libs / "compile.exe")]
    _run(["x86_64-w64-mingw32-gcc", *parts], cwd=folder)


def cases() -> Iterator[Case]:
    """Yield the graphs of the table: the program's, then other ways to hold blocks of 4 bits."""
    blocks = [WeightFormat(4, 32), WeightFormat(4, 128)]
    for weight in blocks:
        for size in (1024, 2048, 4096):
            yield from (Case("linear", size, size, tokens, weight) for tokens in (1, 32, 256))
        yield Case("linear", 1024, 2560, 32, weight)
        yield Case("linear", 1024, 8192, 32, weight)
        yield Case("linear", 32000, 2048, 1, weight)
        yield from (Case("ffn", 2048, 2560, tokens, weight) for tokens in (1, 32))
    for weight in (WeightFormat(8, 32), WeightFormat(4, 32, symmetric=False), WeightFormat(16)):
        yield from (Case("linear", 1024, 4096, tokens, weight) for tokens in (1, 32))
    for weight in blocks:
        for graph in VARIANTS:
            yield from (Case(graph, 1024, 1024, tokens, weight) for tokens in (1, 32))


def _weight(case: Case, rows: int, columns: int) -> Any:  # noqa: ANN401
    random, (bits, block) = np.random.default_rng(0), (case.weight.bits, case.weight.block)
    if not case.weight.quantized:
        return random.standard_normal((rows, columns)).astype(np.float16)
    scales = random.uniform(0.01, 0.1, (rows, columns // block)).astype(np.float16)
    codes = random.integers(0, 256, (*scales.shape, block * bits // 8), np.uint8)
    zeros = (
        None if case.weight.symmetric else random.integers(0, 256, (rows, columns // block // 2), np.uint8)
    )
    return QuantizedTensor(codes, scales, zeros, bits, block)


def _own(case: Case, folder: Path) -> Any:  # noqa: ANN401
    """Return the program's own graph."""
    shard: LinearShard | FfnShard
    if case.graph == "ffn":
        gate_up, down = _weight(case, 2 * case.rows, case.columns), _weight(case, case.columns, case.rows)
        shard, form = FfnShard(gate_up, down, "silu", None, 0, "key", (0, case.rows)), "ffn"
    else:
        shard = LinearShard(_weight(case, case.rows, case.columns), 0, "o", ((0, case.rows),), "key")
        form = "matmul_nbits" if case.weight.quantized else "activation_first"
    model = write_graph(shard, form, np.dtype(np.float16), folder, case.tokens)  # type: ignore[arg-type]
    return load_openvino().Core().read_model(model)


def _variant(case: Case) -> Any:  # noqa: ANN401
    """Return a graph that is written for OpenVINO alone."""
    openvino, random = load_openvino(), np.random.default_rng(0)
    op, (graph, rows, columns, tokens, weight) = openvino.opset13, case
    block, blocks = weight.block, columns // weight.block
    x = op.parameter([1, tokens, columns], np.float16)
    inputs = [x]

    def given(shape: list[int], kind: Any) -> Any:  # noqa: ANN401
        inputs.append(op.parameter(shape, kind))
        return inputs[-1]

    def codes(*shape: int) -> Any:  # noqa: ANN401
        packed = random.integers(0, 256, int(np.prod(shape)) // 2, np.uint8)
        tensor = openvino.Tensor(packed, openvino.Shape(list(shape)), openvino.Type.i4)
        return op.convert(openvino.op.Constant(tensor, shared_memory=False), "f16")

    def scales(*shape: int) -> Any:  # noqa: ANN401
        return op.constant(random.uniform(0.01, 0.1, shape).astype(np.float16))

    def product(inputs: Any, weight: Any) -> Any:  # noqa: ANN401
        return op.matmul(inputs, weight, False, True)

    if graph == "one scale a row":
        y = product(x, op.multiply(codes(rows, columns), scales(rows, 1)))
    elif graph == "a product for each block":
        parts = op.split(x, 2, blocks).outputs()
        products = [product(part, op.multiply(codes(rows, block), scales(rows, 1))) for part in parts]
        y = functools.reduce(op.add, products)
    elif graph == "blocks as a batch":
        batch = op.transpose(op.reshape(x, [tokens, blocks, block], False), [1, 0, 2])
        products = product(batch, codes(blocks, rows, block))
        y = op.reduce_sum(op.multiply(products, scales(blocks, 1, rows)), [0], False)
    else:
        shape, signed = [rows, blocks, block], openvino.Type.i4
        values = op.convert(given(shape, signed), "f16") if graph.startswith("codes") else codes(*shape)
        values = op.multiply(values, given([rows, blocks, 1], np.float16))
        y = product(x, op.reshape(values, [rows, columns], False))
    return openvino.Model([y], inputs, "graph")


def compiled_bytes(case: Case, platform: str, folder: Path) -> int | str:
    """Return the size of a compiled graph, or why there is none."""
    model = _variant(case) if case.graph in VARIANTS else _own(case, folder)
    load_openvino().serialize(model, str(folder / "graph.xml"))
    blob = folder / "graph.blob"
    blob.unlink(missing_ok=True)
    environment = os.environ | {"WINEDEBUG": "-all", "WINEPREFIX": str(folder / "wine")}
    command = ["wine", "compile.exe", platform, "../graph.xml", "../graph.blob"]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "env": environment}
    try:
        done = _run(command, cwd=folder / "libs", timeout=LIMIT_S, check=False, **output)
    except subprocess.TimeoutExpired:
        return f"not compiled in {LIMIT_S} s"
    if blob.exists() and "compiled" in done.stdout:
        return blob.stat().st_size
    return next((line for line in done.stdout.splitlines() if line.strip()), "crashed")[:200]


def counted_bytes(case: Case) -> int | None:
    """Return the bytes that the program counts for a graph of its own."""
    memory = GraphMemory(unrolls_blocks=True)
    sizes = {
        "linear": [(case.rows, case.columns)],
        "ffn": [(2 * case.rows, case.columns), (case.columns, case.rows)],
    }.get(case.graph)
    return sizes and sum(memory.weight_bytes(case.weight, *size, case.tokens) for size in sizes)


def main() -> None:
    """Compile the graphs and print their sizes."""
    parser = script_parser(__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="TEXT", help="graphs whose name has this text")
    parser.add_argument("--platform", choices=(*PLATFORMS, "all"), default="all")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    folder = options.folder.resolve()
    prepare(folder)
    for platform in PLATFORMS if options.platform == "all" else (options.platform,):
        for case in cases():
            if options.only not in case.graph or (platform != "4000" and case.rows * case.columns > SMALL):
                continue
            found = compiled_bytes(case, platform, folder)
            size, problem = (found, "") if isinstance(found, int) else (None, found)
            bits = None if size is None else round(size * 8 / _weights(case), 1)
            names = (case.graph, case.rows, case.columns, case.tokens, str(case.weight))
            print(platform, *names, f"{bits} bits a weight" if size else problem, flush=True)
            row = dict(zip(("graph", "rows", "columns", "tokens", "weight"), names, strict=True))
            sizes = {"blob_bytes": size, "counted_bytes": counted_bytes(case), "problem": problem}
            compiler = {"openvino": version("openvino"), "platform": platform}
            append_rows(options.out, origin("intel_npu_static") | compiler | row | sizes)


def _weights(case: Case) -> int:
    return case.rows * case.columns * (3 if case.graph == "ffn" else 1)


if __name__ == "__main__":
    main()
