"""How large is one context with several lengths or layers, beside contexts of one graph each?

    python bench/shared_contexts.py --out bench/results/shared_contexts.jsonl

QNN's compiler in the x86-64 Linux wheel makes both for a Snapdragon 8 Gen 3. Only files are measured: nothing
runs, since a context with shared weights loads on a Hexagon only.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from conditions import append_rows, script_parser

from heterollm.kernels.formats import QuantizedTensor, quantize
from heterollm.kernels.npu import (
    ContextGraph,
    FfnShard,
    GraphForm,
    LinearRanges,
    LinearShard,
    NpuShard,
    QnnNpu,
)

SIZE: Final = 1024
WIDTH: Final = 2816
DECODE_AND_PROMPTS: Final = (1, 32, 64, 128, 256, 512, 1024)
CASES: Final[tuple[tuple[GraphForm, tuple[int, ...], int], ...]] = (
    ("matmul_nbits", (32, 256), 1),
    ("matmul_nbits", DECODE_AND_PROMPTS, 1),
    ("matmul_nbits", (32, 256), 4),
    ("integer", (32, 256), 1),
    ("ffn", (32, 256), 1),
)


def weight(rows: int, columns: int, seed: int) -> QuantizedTensor:
    """Return random 4-bit weights in blocks of 32."""
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    return quantize(values / columns**0.5, bits=4, block=32, scale_kind="stepped")


def shard_of(form: GraphForm, layer: int) -> NpuShard:
    """Return a random shard of a layer for a form."""
    if form == "ffn":
        return FfnShard(
            *(weight(2 * WIDTH, SIZE, layer), weight(SIZE, WIDTH, 100 + layer)),
            *("silu", None, layer, "bench", (0, WIDTH)),
        )
    ranges = LinearRanges(4.0, 4.0)
    return LinearShard(weight(SIZE, SIZE, layer), layer, "o", ((0, SIZE),), "bench", ranges=ranges)


def measured(form: GraphForm, lengths: Sequence[int], layers: int, shared: bool) -> dict[str, Any]:
    """Compile some layers at some lengths, and return the bytes of the binaries and the time."""
    npu = QnnNpu(emulator=True, soc_model="57", context_layers=layers if shared else 0)
    shards = [shard_of(form, layer) for layer in range(layers)]
    npu.package(
        [
            [
                ContextGraph(
                    *(shard.layer, shard.group, tuple(stop for _, stop in shard.row_ranges)),
                    *(length, form, lambda shard=shard: shard),
                )
                for shard in shards
                for length in lengths
            ]
        ]
    )
    begin = time.perf_counter()
    for shard in shards:
        for length in lengths:
            npu.build(shard, length, form)
    return {
        "what": "shared_contexts",
        "form": form,
        "lengths": list(lengths),
        "layers": layers,
        "shared": shared,
        "weight_bytes": sum(shard.weight_bytes for shard in shards),
        "binary_bytes": _binary_bytes(),
        "compile_s": round(time.perf_counter() - begin, 2),
        "versions": npu.versions(),
    }


def _binary_bytes() -> int:
    folder = Path(os.environ["HETEROLLM_CACHE"]) / "graphs"
    return sum(path.stat().st_size for path in folder.glob("*_qnn.bin"))


def rows() -> Iterator[dict[str, Any]]:
    """Yield a row of each case, apart and shared, each from an empty cache."""
    for case in CASES:
        for shared in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                os.environ["HETEROLLM_CACHE"] = folder
                yield measured(*case, shared)


def main() -> None:
    """Measure, print the table, and append the rows to a file."""
    parser = script_parser(__doc__)
    out = parser.parse_args().out
    for row in rows():
        print(
            f"{row['form']:13} {len(row['lengths'])} lengths, {row['layers']} layers, "
            f"{'one context' if row['shared'] else 'one each':11} {row['binary_bytes'] / 2**20:7.2f} MiB of "
            f"{row['weight_bytes'] / 2**20:.2f} MiB weights, {row['compile_s']} s"
        )
        append_rows(out, row)


if __name__ == "__main__":
    main()
