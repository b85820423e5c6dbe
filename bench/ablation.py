"""What does each step of the split gain on `host`: parts alone, layers, operators, fast waits, blocks?

TinyLlama-1.1B's shape with random weights (2.2 GB, written where told unless a checkpoint is there), one core
a part, everything of a precision in turns in processes of its own: `gpu` on one core and on both, `npu` with
padding and as a pipe, `layer`, `tensor` with clFinish after every operator and with fast waits, `block`;
llama.cpp on both cores where it is installed; at `w4a16` and at `w4a8`. Prefill of 256 tokens and of lengths
without a graph, decode behind 256 others. Then decode of the bundled model with and without fast waits. The
bench/figures.py writes the ratios into docs/measured.md.

The time that it will take is printed first; `--time-limit` ends it with what there is. What decodes very
slowly gets fewer tokens, lengths without a graph one sample and no trace, and both are said. `--out` has each
row as soon as it is whole: appended, or with `--replace` in place of the file's rows. Of rows of one test,
configuration and precision the last one counts.

    pip install -e '.[host,bench]'
    python bench/ablation.py /tmp/tinyllama --profile-first --replace --out bench/results/ablation.jsonl
    python bench/ablation.py --from bench/results/ablation.jsonl    # the table, from the file
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from ablation_rows import ODD_LENGTHS, STANDARD_LENGTHS, by_runs, is_of_waits, latest, table
from conditions import script_parser
from random_model import write_checkpoint

from heterollm.base import HeteroLLMError, format_duration, parse_duration
from heterollm.benchmarks import (
    BenchOptions,
    BenchResult,
    BenchRow,
    Configuration,
    RowFile,
    Stop,
    expand,
    profile_splits,
    read_rows,
    run_bench,
    signals_interrupt,
)
from heterollm.benchmarks.cases import Case, Threads
from heterollm.data import bundled_model
from heterollm.report import check_picture, write_picture
from heterollm.report import console as report
from heterollm.report.bench import bench_report

SPLIT: Final[Threads] = (1, 1)
WHOLE: Final[Threads] = (2, 0)
ALIGNED: Final = (256,)
DEPTH: Final = 256

SLOW_DECODE_S: Final = 4.0
"""A sample of decode that would take longer gets fewer tokens, down to `FEWEST`."""
FEWEST: Final = 4
WARM_UP_S: Final = 3.0
LOAD_S: Final = 4.0
"""To load a model and compare its logits."""

TINYLLAMA_BYTES: Final = 2.2e9
RATES: Final[dict[tuple[str, str], tuple[float, float]]] = {
    ("w4a16", "gpu"): (43, 13.5),
    ("w4a16", "gpu whole"): (75, 21),
    ("w4a16", "npu"): (42, 1.3),
    ("w4a16", "layer"): (46, 13),
    ("w4a16", "tensor operator"): (79, 10),
    ("w4a16", "tensor"): (78, 15.8),
    ("w4a16", "block"): (67, 16),
    ("w4a8", "gpu"): (128, 18.9),
    ("w4a8", "gpu whole"): (210, 28),
    ("w4a8", "npu"): (45, 4),
    ("w4a8", "layer"): (45, 18),
    ("w4a8", "tensor operator"): (125, 14),
    ("w4a8", "tensor"): (130, 21),
    ("w4a8", "block"): (150, 20),
    ("w4a16", "llama.cpp"): (150, 25),
}
"""Tokens a second of TinyLlama-1.1B's shape in prefill and decode, from earlier runs on two cores of a Xeon
with AVX-512 VNNI: for estimates, and to tell what is too slow for all tokens. Never compared with."""

DECODED: Final = 32
WAITS_CASE: Final = Case(0, 64, 32)
WAITS_S: Final = 25.0
PRECISIONS: Final = ("w4a16", "w4a8")


@dataclass(frozen=True, slots=True)
class Part:
    """One precision: everything in it takes turns.

    Args:
        precision: Of weights and activations.
        configurations: The columns of the table.
        cases: The tests.
        light: Tests of which one sample is enough.
        left_out: What is not run.
        remarks: What was left out or shortened, and why.
    """

    precision: str
    configurations: tuple[Configuration, ...]
    cases: tuple[Case, ...]
    light: frozenset[Case]
    left_out: frozenset[tuple[Configuration, Case]]
    remarks: tuple[str, ...]


def configurations(precision: str, *, llama_cpp: bool) -> tuple[Configuration, ...]:
    """Return the columns of the table of one precision, in its order."""
    common = {"precisions": [precision], "device": "host"}
    found = expand(levels=["gpu"], threads=[SPLIT], **common)
    found += expand(levels=["npu"], policies=["padding", "pipe"], threads=[SPLIT], **common)
    found += expand(levels=["layer"], threads=[SPLIT], **common)
    found += expand(levels=["tensor"], syncs=["operator", "auto"], threads=[SPLIT], **common)
    found += expand(levels=["block"], threads=[SPLIT], **common)
    found += expand(levels=["gpu"], threads=[WHOLE], **common)
    if llama_cpp:
        found += expand(engines=["llama.cpp"], threads=[WHOLE], **common)
    return found


def waits(precision: str) -> tuple[Configuration, ...]:
    """Return the configurations of the bundled model that differ in how they wait."""
    common = {"precisions": [precision], "threads": [SPLIT], "device": "host"}
    return expand(levels=["npu"], syncs=["operator", "auto"], **common)


def part(
    precision: str, aligned: Sequence[int], odd: Sequence[int], decoded: int, *, llama_cpp: bool, scale: float
) -> Part:
    """Return the tests and configurations of one precision.

    Args:
        precision: The precision.
        aligned: Prompts of full repetitions, and with traces.
        odd: Prompts of which one sample is enough.
        decoded: Tokens of a sample of decode.
        llama_cpp: Whether llama.cpp takes part.
        scale: Size of the model's checkpoint by that of TinyLlama's shape.
    """
    columns = configurations(precision, llama_cpp=llama_cpp)
    whole = Case(0, decoded, DEPTH)
    cases = [*(Case(length, 0) for length in aligned)]
    left_out: set[tuple[Configuration, Case]] = set()
    remarks, own = [], {}
    if decoded:
        for one in columns:
            if one.length_policy == "pipe":
                remarks.append(f"{one.label} decodes as padding does, and is left out there.")
                continue
            rate = rates(one)[1] / scale
            count = min(decoded, max(FEWEST, int(SLOW_DECODE_S * rate)))
            own[one] = replace(whole, n_gen=count)
            if count < decoded:
                remarks.append(
                    f"{one.label} decodes {count} tokens a sample instead of {decoded}, as it was seen to "
                    f"write {rate:.1f} a second."
                )
        cases += dict.fromkeys(own.values())
    light = [Case(length, 0) for length in odd]
    for one in columns:
        left_out |= {(one, case) for case in cases if case.n_gen and own.get(one) != case}
    return Part(precision, columns, (*cases, *light), frozenset(light), frozenset(left_out), tuple(remarks))


def rates(one: Configuration) -> tuple[float, float]:
    """Return the rates of an earlier run that come nearest."""
    kind = one.plan_level if one.engine == "self" else one.engine
    if one.engine == "self" and one.threads == WHOLE:
        kind = f"{kind} whole"
    if one.sync == "operator" and kind == "tensor":
        kind = "tensor operator"
    return RATES[one.precision, kind]


def estimate_s(this: Part, repetitions: int, *, trace: bool, scale: float) -> float:
    """Return about how long a part takes on two cores like those that the rates are from."""
    return sum(_estimates(this, repetitions, trace, scale))


def _estimates(this: Part, repetitions: int, trace: bool, scale: float) -> Iterator[float]:
    for one in this.configurations:
        traced = trace and one.engine == "self"
        yield LOAD_S * (2 if traced else 1)
        prefill, decode = (rate / scale for rate in rates(one))
        for case in this.cases:
            if (one, case) in this.left_out:
                continue
            length = case.n_prompt
            if one.length_policy == "padding" and length:
                length = next((at for at in STANDARD_LENGTHS if at >= length), length)
            sample_s = length / prefill + case.n_gen / decode
            times = 1 if case in this.light else repetitions + (2 if traced else 0)
            warm = case not in this.light or sample_s < WARM_UP_S
            fills = (2 if traced else 1) * case.n_depth / prefill
            yield (times + warm) * sample_s + fills


def checkpoint_scale(folder: Path) -> float:
    """Return the size of a checkpoint by that of TinyLlama's shape."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / TINYLLAMA_BYTES


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
    """Yield the lines of the table of each model."""
    large = [row for row in rows if not is_of_waits(row)]
    for model in dict.fromkeys(row.setup.model_filename for row in large):
        yield f"\n{Path(model).name}\n"
        yield from table([row for row in large if row.setup.model_filename == model])


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
    parser = script_parser(__doc__, out=False)
    add = parser.add_argument
    add("folder", type=Path, nargs="?", help="where a checkpoint is, or is written")
    add("--from", dest="file", type=Path, help="show the rows of this file; measure nothing")
    add("--only", nargs="+", metavar="TEST", help="with --from: these tests alone, such as pp256")
    add("--picture", type=Path, metavar="FILE.svg", help="with --from: draw the reports into this file")
    add("--out", type=Path, help="each row is appended here as a JSON line")
    add("--replace", action="store_true", help="drop the rows that --out has once there is a new one")
    add("--precisions", nargs="+", default=PRECISIONS, choices=PRECISIONS)
    add("--prompts", type=int, nargs="*", default=ALIGNED, help="lengths of full repetitions")
    add("--odd", type=int, nargs="*", default=ODD_LENGTHS, help="lengths of one sample each")
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
    """Measure, or read rows, and print the table."""
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
