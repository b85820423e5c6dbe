"""The command ``bench``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from heterollm.base import FAILED, PARTLY, OptionError
from heterollm.cli.complete import PLANS
from heterollm.cli.effects import given_options
from heterollm.cli.load import fetch
from heterollm.cli.options import (
    PRECISIONS,
    TECHNIQUES,
    CalibrationOption,
    DeviceOption,
    ExpertsGibOption,
    FormatOption,
    GroupSize,
    IntegerList,
    JsonOption,
    MaybeModel,
    Names,
    OverflowOption,
    PowerOption,
    RowsOption,
    ScalesOption,
    chosen_format,
    command_group,
    numbers,
    several,
    whole_number,
)
from heterollm.cli.records import takes_records
from heterollm.engine import Sync

if TYPE_CHECKING:
    from heterollm.benchmarks import BenchOptions, BenchResult, Configuration, RowFile

commands = command_group()

ENGINES = ("self", "llama.cpp", "transformers")
POLICIES = ("padding", "pipe", "auto")

OF_SAVED = ("saved", "form", "as_json", "picture", "html")
"""Parameters of the output, which ``--from`` allows."""


def parse_pair(text: str) -> tuple[int, int]:
    """Return the prompt length and the number of decoded tokens of a text such as ``256,64``.

    Raises:
        BadParameter: The text has another form.
    """
    found = [whole_number(part.strip()) for part in text.split(",")]
    if len(found) != 2:
        raise typer.BadParameter(f"{text!r:.80} is no pair such as 256,64.")
    return found[0], found[1]


@dataclass(frozen=True, slots=True)
class WorkloadOptions:
    """The measured lengths; lists make a grid."""

    prompt: Annotated[IntegerList, numbers("-p", "--prompt", help="Prompt lengths; 0 for none.")] = (512,)
    decode: Annotated[IntegerList, numbers("-n", "--decode", help="Tokens to decode; 0 for none.")] = (128,)
    pairs: Annotated[
        list[Any] | None,
        typer.Option("-pg", metavar="P,N", help="A prompt, then tokens; repeatable.", parser=parse_pair),
    ] = None
    depth: Annotated[IntegerList, numbers("-d", "--depth", help="Tokens in the KV cache before.")] = (0,)
    repetitions: Annotated[int, typer.Option("-r", "--repetitions", help="Samples of each test.")] = 5


@dataclass(frozen=True, slots=True)
class ConfigurationOptions:
    """The measured configurations; lists make a grid."""

    engine: Annotated[
        Names, several(help="self, llama.cpp, transformers, or another plug-in.", names=ENGINES, item=str)
    ] = ("self",)
    plan: Annotated[Names, several(help=f"{', '.join(PLANS)}, or files of plans.", names=PLANS, item=str)] = (
        "auto",
    )
    length_policy: Annotated[
        Names,
        OverflowOption,
        several(help="padding, pipe, auto: how npu and layer run lengths without a graph.", names=POLICIES),
    ] = ("padding",)
    sync: Annotated[
        Names, several(help="How to wait for the GPU, as for generate.", names=get_args(Sync))
    ] = ("auto",)
    precision: Annotated[Names, several(help="w4a16, w4a8, w8a8, fp16.", names=PRECISIONS)] = ("w4a16",)
    threads: Annotated[str | None, typer.Option(help="Splits of the cores, GPU first: 1+1,2+0.")] = None
    gpu_threads: Annotated[IntegerList | None, numbers(help="Threads of the GPU.")] = None
    npu_threads: Annotated[IntegerList | None, numbers(help="Threads of the NPU.")] = None
    device: DeviceOption = "auto"
    group_size: GroupSize = 32
    scales: ScalesOption = "free"
    calibration: CalibrationOption = None
    techniques: Annotated[
        Names,
        OverflowOption,
        several(
            "--technique",
            help="none, llm.npu, shadowattn, npumoe, npu-attention.",
            names=("none", *TECHNIQUES),
        ),
    ] = ("none",)
    overflow: OverflowOption = "gpu"
    power: PowerOption = "burst"
    experts_gib: ExpertsGibOption = None


@dataclass(frozen=True, slots=True)
class SampleOptions:
    """Options of the samples."""

    seed: Annotated[int, typer.Option(help="Seed of the token ids.", rich_help_panel="Options")] = 0
    patience: Annotated[
        float, typer.Option(help="Seconds to wait for an idle machine before a sample, and to take it again.")
    ] = 0.0
    memory_gib: Annotated[
        float | None, typer.Option(help="Memory of all loaded models; if they need more, they take turns.")
    ] = None
    no_trace: Annotated[
        bool,
        typer.Option("--no-trace", help="Skip the traced run of every test (overlap and synchronisation)."),
    ] = False
    traces: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write these traces there, for `heterollm trace`.")
    ] = None
    profile_first: Annotated[
        bool, typer.Option("--profile-first", help="Profile the device quickly for each split of the cores.")
    ] = False
    time_limit: Annotated[
        str | None, typer.Option(help="Take no further sample after this time, such as 90s or 10m.")
    ] = None


@dataclass(frozen=True, slots=True)
class ResultOptions:
    """Format and files of the output."""

    form: FormatOption = "table"
    as_json: JsonOption = False
    output: RowsOption = None
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE.svg", help="Draw the report into this file.")
    ] = None
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write one page with tables and charts.")
    ] = None


@commands.command("bench")
@takes_records
def bench(
    context: typer.Context,
    model: MaybeModel = None,
    *,
    tests: WorkloadOptions,
    grid: ConfigurationOptions,
    sampling: SampleOptions,
    shown: ResultOptions,
    saved: Annotated[
        Path | None,
        typer.Option("--from", metavar="ROWS", help="Show rows that -o wrote, and measure nothing."),
    ] = None,
) -> None:
    """Measure prefill and decode as llama-bench does, at any plan level, and compare other engines.

    Options that take lists make a grid. On host the bench always adds a row of gpu on all cores: splitting
    a CPU into two processors pays only if it beats that row. Ctrl-C ends the run and keeps its rows.
    """
    from heterollm.base import labelled
    from heterollm.benchmarks import RowFile
    from heterollm.kernels.sim import is_simulated
    from heterollm.report import console as report

    _check_outputs(shown)
    if saved is not None:
        _refuse_others(context)
        show_results(_saved_results(saved), saved.stem, shown)
        return
    if model is None:
        raise typer.BadParameter("Name a model, or rows with --from.", ctx=context, param_hint="MODEL")
    given = {name: context.params[name] for name in given_options(context)}
    options = _options(model, tests, grid, sampling, given)
    if sampling.traces is not None:
        _check_traces(sampling.traces, sampling.no_trace)
    out = None if shown.output is None else labelled(shown.output, simulated=is_simulated(grid.device))
    file = None if out is None else RowFile(out)
    result = _measured(options, file, profile_first=sampling.profile_first)
    show_results([result], Path(model).name, shown)
    if result.stop is not None and result.stop.exit_code:
        raise typer.Exit(result.stop.exit_code)
    if file is not None and file.error is not None:
        raise typer.Exit(FAILED)
    if out is not None:
        report.show(report.note(f"Wrote the rows to {out}."))
    if not all(row.usable for row in result.rows):
        raise typer.Exit(PARTLY if any(row.usable for row in result.rows) else FAILED)


def _options(
    model: str,
    tests: WorkloadOptions,
    grid: ConfigurationOptions,
    sampling: SampleOptions,
    given: Mapping[str, Any],
) -> BenchOptions:
    """Return the options of the bench.

    Raises:
        OptionError: An option is not legal.
    """
    from heterollm.base import parse_duration
    from heterollm.benchmarks import BenchOptions, cases_of

    limit = sampling.time_limit
    return BenchOptions(
        model,
        _configurations(grid, given),
        cases_of(tests.prompt, tests.decode, tests.pairs or (), tests.depth),
        repetitions=tests.repetitions,
        seed=sampling.seed,
        patience_s=sampling.patience,
        memory_gib=sampling.memory_gib,
        trace=not sampling.no_trace,
        traces=sampling.traces,
        time_limit_s=None if limit is None else parse_duration(limit, "--time-limit"),
    )


def _configurations(grid: ConfigurationOptions, given: Mapping[str, Any]) -> tuple[Configuration, ...]:
    from heterollm.benchmarks import Configuration, expand, with_baseline

    base = Configuration(
        device=grid.device,
        group_size=grid.group_size,
        scales=grid.scales,
        power=grid.power,
        calibration="" if grid.calibration is None else str(grid.calibration),
        experts_gib=grid.experts_gib,
        overflow=grid.overflow,
    )
    configurations = expand(
        base,
        given,
        engine=grid.engine,
        plan_level=grid.plan,
        length_policy=grid.length_policy,
        sync=grid.sync,
        precision=grid.precision,
        threads=_splits(grid.threads, grid.gpu_threads, grid.npu_threads),
        technique=grid.techniques,
    )
    return with_baseline(configurations)


def _measured(options: BenchOptions, file: RowFile | None, *, profile_first: bool) -> BenchResult:
    """Measure, and append each row to a file as soon as it is complete."""
    from heterollm.benchmarks import Stop, TerminatedInterrupt, profile_splits, run_bench, signals_interrupt
    from heterollm.report import console as report

    try:
        with signals_interrupt():
            if profile_first:
                fetch(str(options.model))
                for text in profile_splits(str(options.model), options.configurations):
                    report.show(report.note(text))
            with report.progress_bars() as progress:
                return run_bench(options, progress=progress, on_row=None if file is None else file.add)
    except TerminatedInterrupt as error:  # before the first row
        raise typer.Exit(Stop.of(error).exit_code) from None


def _check_outputs(shown: ResultOptions) -> None:
    from heterollm.base import check_folder
    from heterollm.report import check_picture

    chosen_format(shown.form, as_json=shown.as_json)
    if shown.picture is not None:
        check_picture(shown.picture)
    if shown.html is not None:
        check_folder(shown.html, "page")


def _check_traces(folder: Path, no_trace: bool) -> None:
    from heterollm.base import check_target

    if no_trace:
        raise OptionError("--traces has nothing to write with --no-trace.", fix="Leave out one of the two.")
    check_target(folder / "trace.json")


def _refuse_others(context: typer.Context) -> None:
    """Refuse options of a measurement together with ``--from``, which would ignore them."""
    given = given_options(context)
    for param in context.command.params:
        if param.name in given and param.name not in OF_SAVED:
            raise OptionError(
                f"{max(param.opts, key=len)} is for a measurement, and --from measures nothing.",
                fix="Leave out one of the two.",
            )


def _saved_results(path: Path) -> list[BenchResult]:
    from heterollm.benchmarks import BenchResult, read_rows
    from heterollm.report import runs_of

    return [BenchResult(tuple(rows), ()) for rows in runs_of(read_rows(path))]


def show_results(results: Sequence[BenchResult], name: str, options: ResultOptions) -> None:
    """Write the results of each run to stdout and into files."""
    from heterollm.base import labelled, save_file, write
    from heterollm.benchmarks import FORMATS
    from heterollm.report import bench_reports, write_picture
    from heterollm.report import console as report

    rows = [row for result in results for row in result.rows]
    notes = [text for result in results for text in result.notes]
    simulated = any(row.time_kind == "simulated" for row in rows)
    shown = bench_reports([result for result in results if result.rows])
    form = chosen_format(options.form, as_json=options.as_json)
    if form == "table" and rows:
        report.present(shown)
    else:
        write(FORMATS[form](rows) if form != "table" else "")
        for text in notes:
            report.show(report.note(text))
    if options.picture is not None and rows:
        picture = labelled(options.picture, simulated=simulated)
        write_picture(picture, shown, title=f"heterollm bench {name}")
        report.show(report.note(f"Wrote {picture}."))
    if options.html is not None and rows:
        from heterollm.report import bench_page

        html = labelled(options.html, simulated=simulated)
        page = bench_page([result.rows for result in results if result.rows], notes)
        save_file(html, page.encode())
        report.show(report.note(f"Wrote {html}."))


def _splits(threads: str | None, gpu: IntegerList | None, npu: IntegerList | None) -> list[tuple[int, int]]:
    """Return the splits of the cores that the three options name."""
    from heterollm.benchmarks import parse_threads
    from heterollm.kernels.threads import split_threads

    if threads is not None:
        if gpu is not None or npu is not None:
            raise OptionError(
                "--threads already names GPU and NPU.", fix="Leave out --gpu-threads and --npu-threads."
            )
        return parse_threads(threads)
    if gpu is None and npu is None:
        return []
    splits = [
        split_threads(gpu_count, npu_count) for gpu_count in gpu or (None,) for npu_count in npu or (None,)
    ]
    return [(len(split.gpu_cores), len(split.npu_cores)) for split in splits]
