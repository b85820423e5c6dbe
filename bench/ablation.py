"""What does each step of the split gain on `host`: parts alone, layers, operators, fast waits, blocks?

TinyLlama-1.1B's shape with random weights (made where told, 2.2 GB), one core a part, everything in turns in
processes of its own: `gpu` on one core and on both, `npu` with padding and as a pipe, `layer`, `tensor` with
clFinish after every operator and with fast waits, `block`; llama.cpp on both cores where it is installed; at
`w4a16` and at `w4a8`. Prefill of 256 tokens and of lengths without a graph, decode behind 256 others. Then
decode of the bundled model with and without fast waits. The ratios are held against the aims of the project.

    pip install -e '.[host,bench]'
    python bench/ablation.py /tmp/tinyllama --profile-first --out bench/results/ablation.jsonl
    python bench/ablation.py --from bench/results/ablation.jsonl    # the same tables, from the file
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from aims import judge_aims
from random_model import write_checkpoint

from heterollm import report
from heterollm.benchmarks.cases import Case, Configuration, Threads, expand
from heterollm.benchmarks.formats import append_jsonl, read_rows
from heterollm.benchmarks.profile_first import profile_splits
from heterollm.benchmarks.rows import BenchRow
from heterollm.benchmarks.run import BenchOptions, BenchResult, run_bench
from heterollm.demo import bundled_model
from heterollm.errors import HeteroLLMError
from heterollm.report_bench import bench_report

SPLIT: Final[Threads] = (1, 1)
WHOLE: Final[Threads] = (2, 0)
PROMPTS: Final = (256, 135, 300, 525, 600, 1000)
DEPTH: Final = 256
DECODED: Final = 32
WAITS_DECODED: Final = 64
PRECISIONS: Final = ("w4a16", "w4a8")


def configurations(precision: str, *, llama_cpp: bool) -> tuple[Configuration, ...]:
    """Return the rows of the table of one precision, in its order."""
    common = {"precisions": [precision], "device": "host"}
    found = expand(levels=["gpu"], threads=[SPLIT, WHOLE], **common)
    found += expand(levels=["npu"], policies=["padding", "pipe"], threads=[SPLIT], **common)
    found += expand(levels=["layer"], threads=[SPLIT], **common)
    found += expand(levels=["tensor"], syncs=["operator", "auto"], threads=[SPLIT], **common)
    found += expand(levels=["block"], threads=[SPLIT], **common)
    if llama_cpp:
        found += expand(engines=["llama.cpp"], threads=[WHOLE], **common)
    return found


def cases(prompts: Sequence[int], decoded: int) -> tuple[Case, ...]:
    """Return the tests."""
    return (*(Case(prompt, 0) for prompt in prompts), Case(0, decoded, DEPTH))


def waits(precision: str) -> tuple[Configuration, ...]:
    """Return the configurations of the bundled model that differ in how they wait."""
    common = {"precisions": [precision], "threads": [SPLIT], "device": "host"}
    return expand(levels=["npu"], syncs=["operator", "auto"], **common)


def has_llama_cpp() -> bool:
    """Whether llama.cpp can be used here."""
    try:
        import gguf  # noqa: F401
        import llama_cpp  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        return False
    return True


def measure(options: argparse.Namespace) -> list[BenchRow]:
    """Take all samples, show the report of each precision, and append the rows to the file."""
    model = bundled_model() if options.tiny else write_checkpoint(options.folder, options.seed)
    rows: list[BenchRow] = []
    llama_cpp = not options.no_llama_cpp and has_llama_cpp()
    if not llama_cpp:
        report.show(report.note("llama.cpp is left out: `pip install -e '.[bench]'` installs it."))
    runs = [
        (model, configurations(precision, llama_cpp=llama_cpp), cases(options.prompts, options.decoded))
        for precision in options.precisions
    ]
    runs.append((bundled_model(), waits("w4a16"), (Case(0, WAITS_DECODED, 32),)))
    for folder, wanted, tests in runs:
        if options.profile_first and folder == model:
            for text in profile_splits(folder, wanted):
                report.show(report.note(text))
        bench = BenchOptions(
            folder,
            wanted,
            tests,
            repetitions=options.repetitions,
            seed=options.seed,
            patience_s=options.patience,
            memory_gib=options.memory_gib,
            trace=not options.no_trace,
        )
        with report.progress_bars() as progress:
            result = run_bench(bench, progress=progress)
        show(result)
        rows += result.rows
        if options.out:
            append_jsonl(options.out, result.rows)
    return rows


def show(result: BenchResult) -> None:
    """Print what one run found."""
    print(report.render(bench_report(result), like=sys.stdout), flush=True)


def main() -> int:
    """Measure, or read what was measured, and judge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", help="where the checkpoint is, or is written")
    parser.add_argument("--from", dest="file", type=Path, help="judge the rows of this file; measure nothing")
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    parser.add_argument("--prompts", type=int, nargs="+", default=PROMPTS)
    parser.add_argument("--decoded", type=int, default=DECODED, help="tokens of a sample of decode")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--patience", type=float, default=0.0, help="seconds to wait for an idle machine a sample"
    )
    parser.add_argument("--memory-gib", type=float, help="what all models of a run may take together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--profile-first", action="store_true", help="profile the device quickly for both splits"
    )
    parser.add_argument("--no-llama-cpp", action="store_true")
    parser.add_argument("--no-trace", action="store_true")
    parser.add_argument(
        "--tiny", action="store_true", help="the bundled model instead: a check of this script"
    )
    options = parser.parse_args()
    if options.folder is None and options.file is None and not options.tiny:
        parser.error("name a folder, or a file with --from")
    try:
        rows = measure(options) if options.file is None else read_rows(options.file)
        if options.file is not None:
            show(BenchResult(tuple(rows), ()))
    except HeteroLLMError as error:
        print(error, file=sys.stderr)
        return 1
    print("\n".join(judge_aims(rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
