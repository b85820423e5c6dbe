"""What does each step of the split gain on `host`: parts alone, layers, operators, fast waits, blocks?

TinyLlama-1.1B's shape with random weights (2.2 GB, written where told unless a checkpoint is there), one core
a part, everything of a precision in turns in processes of its own: `gpu` on one core and on both, `npu` with
padding and as a pipe, `layer`, `tensor` with clFinish after every operator and with fast waits, `block`;
llama.cpp on both cores where it is installed; at `w4a16` and at `w4a8`. Prefill of 256 tokens and of lengths
without a graph, decode behind 256 others. Then decode of the bundled model with and without fast waits. The
ratios are held against the aims of the project.

The time that it will take is printed first; `--time-limit` ends it with what there is. What decodes very
slowly gets fewer tokens, lengths without a graph one sample and no trace, and both are said. `--out` has each
row as soon as it is whole: appended, or with `--replace` in place of the file's rows. Of rows of one test,
configuration and precision the last one counts.

    pip install -e '.[host,bench]'
    python bench/ablation.py /tmp/tinyllama --profile-first --replace --out bench/results/ablation.jsonl
    python bench/ablation.py --from bench/results/ablation.jsonl    # table and verdicts, from the file
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from ablation_plan import (
    ALIGNED,
    ODD,
    SPLIT,
    WARM_UP_S,
    Part,
    checkpoint_scale,
    estimate_s,
    part,
    waits,
)
from ablation_table import by_runs, latest, table
from aims import is_of_waits, judge_aims
from random_model import write_checkpoint

from heterollm.base import HeteroLLMError, format_duration, parse_duration
from heterollm.benchmarks import (
    BenchOptions,
    BenchResult,
    BenchRow,
    RowFile,
    Stop,
    profile_splits,
    read_rows,
    run_bench,
    signals_interrupt,
)
from heterollm.benchmarks.cases import Case
from heterollm.data import bundled_model
from heterollm.report import check_picture, write_picture
from heterollm.report import console as report
from heterollm.report.bench import bench_report

DECODED: Final = 32
WAITS_CASE: Final = Case(0, 64, 32)
WAITS_S: Final = 25.0
PRECISIONS: Final = ("w4a16", "w4a8")


def checkpoint(folder: Path, seed: int) -> Path:
    """Return a folder with a checkpoint; one without gets random weights."""
    return folder if (folder / "config.json").is_file() else write_checkpoint(folder, seed)


def has_llama_cpp() -> bool:
    """Whether llama.cpp can be used here."""
    try:
        import gguf  # noqa: F401
        import llama_cpp  # noqa: F401
    except (ImportError, OSError, RuntimeError):
        return False
    return True


class Measuring:
    """One run of everything.

    Args:
        options: What was asked for.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._begin_s = time.monotonic()
        self._model = bundled_model() if options.tiny else checkpoint(options.folder, options.seed)
        self._scale = checkpoint_scale(self._model)
        self._file = None if options.out is None else RowFile(options.out, replace=options.replace)
        llama_cpp = not options.no_llama_cpp and has_llama_cpp()
        if not llama_cpp:
            say("llama.cpp is left out: `pip install -e '.[bench]'` installs it.")
        self._parts = [
            part(
                precision, options.prompts, options.odd, options.decoded,
                llama_cpp=llama_cpp, scale=self._scale,
            )
            for precision in options.precisions
        ]  # fmt: skip
        # Those that follow have what precisions share from the first.
        budgets = [parse_duration(text, "--profile-budget") or 0.0 for text in options.profile_budget]
        self._profiles_s = {
            this.precision: budgets[min(place, len(budgets) - 1)] if options.profile_first else 0.0
            for place, this in enumerate(self._parts)
        }

    def announce(self) -> None:
        """Print the tests, the shortened ones, and an estimate of the time."""
        for this in self._parts:
            tests = ", ".join(case.name for case in this.cases)
            say(f"{this.precision}: {len(this.configurations)} configurations, {tests}")
            for remark in this.remarks:
                say(f"  {remark}")
        total_s = sum(map(self._estimate_s, self._parts)) + WAITS_S
        profiles_s = sum(self._profiles_s.values())
        words = f", of these {profiles_s / 60:.0f} for profiles" if profiles_s else ""
        say(f"About {total_s / 60:.0f} minutes on two cores such as those of earlier runs{words}.")

    def run(self) -> tuple[list[BenchRow], Stop | None]:
        """Profile, take all samples, and show the report of each precision."""
        rows: list[BenchRow] = []
        for place, this in enumerate(self._parts):
            left = self._parts[place:]
            own_s = self._estimate_s(this) / (sum(map(self._estimate_s, left)) + WAITS_S)
            deadline_s = time.monotonic() + self._left_s() * own_s
            self._profile(this, max(10.0, deadline_s - time.monotonic()))
            result = self._bench(this, max(1.0, deadline_s - time.monotonic()))
            rows += result.rows
            if result.stop is not None and result.stop.exit_code:
                return rows, result.stop
        result = self._waits()
        return rows + list(result.rows), result.stop

    def _estimate_s(self, this: Part) -> float:
        options = self._options
        trace = not options.no_trace
        return self._profiles_s[this.precision] + estimate_s(
            this, options.repetitions, trace=trace, scale=self._scale
        )

    def _left_s(self) -> float:
        limit_s = parse_duration(self._options.time_limit, "--time-limit")
        return math.inf if limit_s is None else limit_s - (time.monotonic() - self._begin_s)

    def _profile(self, this: Part, most_s: float) -> None:
        budget_s = self._profiles_s[this.precision]
        if not budget_s:
            return
        wanted = [one for one in this.configurations if one.threads == SPLIT]
        for text in profile_splits(self._model, wanted, budget_s=min(budget_s, most_s)):
            say(text)

    def _bench(self, this: Part, limit_s: float) -> BenchResult:
        options = self._options
        bench = BenchOptions(
            self._model,
            this.configurations,
            this.cases,
            repetitions=options.repetitions,
            seed=options.seed,
            patience_s=options.patience,
            memory_gib=options.memory_gib,
            trace=not options.no_trace,
            light=this.light,
            left_out=this.left_out,
            warm_up_s=WARM_UP_S,
            time_limit_s=_finite(limit_s),
        )
        return self._shown(bench)

    def _waits(self) -> BenchResult:
        options = self._options
        bench = BenchOptions(
            bundled_model(),
            waits("w4a16"),
            (WAITS_CASE,),
            repetitions=max(5, options.repetitions),
            seed=options.seed,
            patience_s=options.patience,
            trace=not options.no_trace,
            time_limit_s=_finite(max(1.0, self._left_s())),
        )
        return self._shown(bench)

    def _shown(self, bench: BenchOptions) -> BenchResult:
        with report.progress_bars() as progress:
            result = run_bench(
                bench, progress=progress, on_row=None if self._file is None else self._file.add
            )
        show(result)
        return result


def _finite(limit_s: float) -> float | None:
    return limit_s if math.isfinite(limit_s) else None


def say(text: str) -> None:
    """Print a line of progress."""
    report.show(report.note(text))


def show(result: BenchResult) -> None:
    """Print what one run found."""
    if result.rows:
        print(report.render(bench_report(result), like=sys.stdout), flush=True)


def summary(rows: Sequence[BenchRow]) -> Iterator[str]:
    """Yield the lines of the table and of the aims."""
    large = [row for row in rows if not is_of_waits(row)]
    for model in dict.fromkeys(row.setup.model_filename for row in large):
        yield f"\n{Path(model).name}\n"
        yield from table([row for row in large if row.setup.model_filename == model])
    yield from judge_aims(rows)


def from_file(options: argparse.Namespace) -> list[BenchRow]:
    """Return the rows of a file that are wanted, and show or draw their reports."""
    rows = [
        row
        for row in latest(read_rows(options.file))
        if not options.only or row.test in options.only
    ]  # fmt: skip
    results = [BenchResult(tuple(run), ()) for run in by_runs(rows)]
    results = [one for one in results if {row.precision for row in one.rows} & set(options.precisions)]
    for result in results:
        show(result)
    if options.picture:
        from rich.console import Group

        write_picture(options.picture, Group(*map(bench_report, results)), title="bench/ablation.py")
        say(f"Wrote {options.picture}.")
    return [row for result in results for row in result.rows]


def parse_options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="where a checkpoint is, or is written")
    add("--from", dest="file", type=Path, help="judge the rows of this file; measure nothing")
    add("--only", nargs="+", metavar="TEST", help="with --from: these tests alone, such as pp256")
    add("--picture", type=Path, metavar="FILE.svg", help="with --from: draw the reports into this file")
    add("--out", type=Path, help="each row is appended here as a JSON line")
    add("--replace", action="store_true", help="drop the rows that --out has once there is a new one")
    add("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    add("--prompts", type=int, nargs="*", default=ALIGNED, help="lengths of full repetitions")
    add("--odd", type=int, nargs="*", default=ODD, help="lengths of one sample each")
    add("--decoded", type=int, default=DECODED, help="tokens of a sample of decode; 0 for none")
    add("--repetitions", type=int, default=3)
    add("--patience", type=float, default=0.0, help="seconds to wait for an idle machine a sample")
    add("--memory-gib", type=float, help="what all models of a run may take together")
    add("--seed", type=int, default=0)
    add("--time-limit", default="none", help="such as 35m: then the rows so far are the result")
    add("--profile-first", action="store_true", help="profile the split anew for each precision")
    add("--profile-budget", nargs="+", default=("4m", "3m"), help="of each precision's profile")
    add("--no-llama-cpp", action="store_true")
    add("--no-trace", action="store_true")
    add("--tiny", action="store_true", help="the bundled model instead: a check of this script")
    options = parser.parse_args()
    if options.folder is None and options.file is None and not options.tiny:
        parser.error("name a folder, or a file with --from")
    return options


def main() -> int:
    """Measure, or read rows, and judge."""
    options = parse_options()
    stop: Stop | None = None
    try:
        if options.picture:
            check_picture(options.picture)
        if options.file is not None:
            rows = from_file(options)
        else:
            measuring = Measuring(options)
            measuring.announce()
            begin_s = time.monotonic()
            with signals_interrupt():
                rows, stop = measuring.run()
            say(f"It took {format_duration(time.monotonic() - begin_s)}.")
    except HeteroLLMError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt as error:
        return Stop.of(error).exit_code
    print("\n".join(summary(rows)))
    return 0 if stop is None else stop.exit_code


if __name__ == "__main__":
    sys.exit(main())
