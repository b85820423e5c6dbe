"""How much memory does a model take, while it is loaded and afterwards?

Anonymous and shared memory of the process (/proc/self/smaps_rollup), which cannot be given back without
swapping, every 10 ms; mapped files are listed beside it. Two figures, each beside its limit: the peak of a
load that quantises (an empty cache) or reads the cache, at most 1.6 times the quantised model and a layer in
float more (and the NPU's graphs, where a plan has any); and what stays after a prompt of 1024 tokens and
a few more, at most 1.25 times (`w4a8`: 1.7 times) the weights on the GPU, the NPU's graphs and the KV
cache. Each level in a process of its own.

TinyLlama-1.1B's shape with random weights.

    python bench/bench_memory.py /tmp/tinyllama --out bench/results/memory.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Final

from conditions import append_rows, conditions, script_parser

LEVELS: Final = ("gpu", "layer", "npu")
PEAK_FACTOR: Final = 1.6
RESIDENT_FACTORS: Final = {"w4a16": 1.25, "w4a8": 1.7}
MIB: Final = 2**20
INTERVAL_S: Final = 0.01


def held_bytes() -> tuple[int, int]:
    """Return anonymous and shared memory together, and pages of mapped files."""
    fields = {}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, _, value = line.partition(":")
        fields[name] = int(value.split()[0]) * 1024
    own = fields["Anonymous"] + fields["Pss_Shmem"]
    return own, fields["Rss"] - own


class Peak(threading.Thread):
    """Watches the process until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._stop_now = threading.Event()
        self.own = self.files = 0

    def run(self) -> None:
        """Keep the largest values."""
        while not self._stop_now.wait(INTERVAL_S):
            own, files = held_bytes()
            self.own, self.files = max(self.own, own), max(self.files, files)

    def stop(self) -> None:
        """End the thread."""
        self._stop_now.set()
        self.join()


def child(folder: Path, level: str, precision: str, context: int) -> dict[str, Any]:
    """Load in this process and return what it took."""
    import heterollm
    from heterollm.engine.memory import memory_need
    from heterollm.engine.slots import pool_sizes

    before, _ = held_bytes()
    peak = Peak()
    peak.start()
    llm = heterollm.LLM.load(folder, device="host", plan=level, precision=precision, context=context)  # type: ignore[arg-type]
    peak.stop()
    session = llm.session()
    session.prefill(list(range(1024)))
    for token in range(4):
        session.decode(token)
    own, files = held_bytes()
    specs = llm._weights.specs  # noqa: SLF001
    slots = pool_sizes(llm.config, specs, llm.plan, llm.device.activation_dtype.itemsize, context)
    need = memory_need(llm.config, specs, llm.plan, context, slots, llm.device.cache_dtype, llm.device.npu)
    config = llm.config
    layer = sum(spec.rows * spec.columns for spec in specs if spec.layer == 0) * 4
    del session
    return {
        "level": level,
        "precision": precision,
        "context": context,
        "before_bytes": before,
        "peak_bytes": peak.own,
        "peak_limit_bytes": int(PEAK_FACTOR * llm._weights.size_bytes) + layer + need.npu_graphs,  # noqa: SLF001
        "resident_bytes": own,
        "resident_limit_bytes": int(
            RESIDENT_FACTORS[precision] * (need.gpu_weights + need.npu_graphs + need.kv_cache)
        ),
        "need_bytes": need.total,
        "slots_bytes": need.slots,
        "kv_cache_bytes": need.kv_cache,
        "quantised_bytes": llm._weights.size_bytes,  # noqa: SLF001
        "file_bytes": files,
        "peak_file_bytes": peak.files,
        "layers": config.layers,
    }


def in_child(options: argparse.Namespace, level: str, cache: str | None) -> dict[str, Any]:
    """Return what a process of its own measures, with another cache folder if one is named."""
    command = [sys.executable, __file__, str(options.folder), "--child", level]
    command += ["--precision", options.precision, "--context", str(options.context)]
    variables = {**os.environ, **({"HETEROLLM_CACHE": cache} if cache else {})}
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=variables)  # noqa: S603
    row: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return {**row, "cached": cache is None}


def main() -> None:
    """Measure every level, print a table and append JSON lines."""
    parser = script_parser(__doc__)
    parser.add_argument("folder", type=Path, help="where the checkpoint is, or is written")
    parser.add_argument("--precision", choices=RESIDENT_FACTORS, default="w4a16")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options.folder, options.child, options.precision, options.context)))
        return
    from random_model import write_checkpoint

    from heterollm.base import cache_root

    write_checkpoint(options.folder)
    in_child(options, "npu", None)
    rows = []
    print("| level | load | peak MiB | limit | resident MiB | limit | mapped files MiB, peak and after |")
    print("|---|---|---:|---:|---:|---:|---:|")
    with tempfile.TemporaryDirectory(prefix="heterollm-bench-") as empty:
        # Compiled OpenCL programs are taken along: PoCL's compiler alone leaves 100 MiB in the process.
        shutil.copytree(cache_root() / "opencl", Path(empty) / "opencl", dirs_exist_ok=True)
        for level, cache in [("gpu", empty), *((level, None) for level in LEVELS)]:
            row = in_child(options, level, cache)
            names = ("peak_bytes", "peak_limit_bytes", "resident_bytes", "resident_limit_bytes")
            cells = [f"{row[name] / MIB:.0f}" for name in names]
            cells.append(f"{row['peak_file_bytes'] / MIB:.0f}, {row['file_bytes'] / MIB:.0f}")
            load = "cached" if row["cached"] else "quantises"
            print(f"| {level} | {load} | {' | '.join(cells)} |", flush=True)
            rows.append({**conditions(), **row})
    append_rows(options.out, *rows)


if __name__ == "__main__":
    main()
