"""The command ``simulate``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, get_args

import typer

from heterollm.base import FAILED, Effect, OptionError, refuse_idle
from heterollm.cli import complete as cli_complete
from heterollm.cli.bench import ResultOptions, show_results
from heterollm.cli.effects import given_options
from heterollm.cli.options import (
    TECHNIQUES,
    AttentionOptions,
    Format,
    FormatOption,
    InFlightOption,
    IntegerList,
    JsonOption,
    Names,
    OverflowOption,
    RowsOption,
    chosen_format,
    command_group,
    numbers,
    several,
)
from heterollm.cli.records import takes_records

if TYPE_CHECKING:
    from heterollm.kernels.sim import GpuLoad
    from heterollm.simulate import SimulationRequest
    from heterollm.trace import Trace

commands = command_group()

LEVELS: Final = cli_complete.PLANS[1:]

TECHNIQUE_SETS: Final = (
    *("none", *TECHNIQUES),
    *("llm.npu+shadowattn", "npumoe+shadowattn", "llm.npu+npu-attention", "npumoe+npu-attention"),
)
"""Techniques of a case, as the option takes them."""

GRID_EFFECTS: Final = (
    Effect(
        "jobs cluster",
        lambda facts: facts["cases"] > 1,
        "there is one case to run",
        "Give lists, which make a grid",
    ),
    Effect(
        "timeline explain",
        lambda facts: facts["cases"] == 1 and facts["output"] is None and facts["form"] in ("table", "json"),
        "it is of one case, printed as a table or as JSON",
        "Leave out lists, --format and -o",
    ),
)
"""Conditions by the number of cases."""

Lengths: TypeAlias = Literal["auto", "padding", "pipe", "online"]
Waits: TypeAlias = Literal["finish", "poll", "predict"]


def parse_load(text: str) -> GpuLoad:
    """Return the game of a text such as ``60fps:5ms``.

    Raises:
        BadParameter: The text has another form, or the game leaves the GPU no time.
    """
    from heterollm.kernels.sim import GpuLoad

    rate, _, time = text.partition(":")
    try:
        if not (rate.endswith("fps") and time.endswith("ms")):
            raise ValueError(text)
        return GpuLoad(float(rate.removesuffix("fps")), 1e3 * float(time.removesuffix("ms")))
    except ValueError:
        raise typer.BadParameter(
            f"{text!r:.80} is no frame rate with GPU time for each frame, such as 60fps:5ms."
        ) from None


def parse_parameter(text: str) -> tuple[str, float]:
    """Return the name of a parameter of the SoC and its value from a text such as ``npu.execute_us=50``.

    Raises:
        BadParameter: The text is not of this form.
    """
    name, _, value = text.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        raise typer.BadParameter(f"{text!r:.80} is no parameter such as npu.execute_us=50.") from None


ClusterOption: TypeAlias = Literal["dask", "ray"]


@dataclass(frozen=True, slots=True)
class CaseOptions:
    """The simulated cases; lists make a grid."""

    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A known model such as llama-3-8b, a checkpoint's folder or hub name, or a config.json.",
            autocompletion=cli_complete.known_models,
        ),
    ] = "llama-3-8b"
    soc: Annotated[
        str,
        typer.Option(
            help="snapdragon-8gen3, -8elite, -8elite-gen5, -x-elite, -x2-elite, -x2-elite-extreme (as this "
            "program would use them), snapdragon-8gen3-paper (HeteroLLM's conditions), apple-m2 (NPUMoE's), "
            "or a YAML file.",
            autocompletion=cli_complete.socs,
        ),
    ] = "snapdragon-8gen3"
    prompt: Annotated[IntegerList, numbers(help="Tokens of the prompt.")] = (256,)
    decode: Annotated[IntegerList, numbers(help="Tokens to decode after the first.")] = (64,)
    plan: Annotated[Names, several(help="gpu, npu, layer, tensor, block or fused.", names=LEVELS)] = (
        "tensor",
    )
    plan_for: Annotated[
        Literal["all", "prompt"],
        typer.Option(
            help="What tensor and block plan for: all lengths alike, as a load does, or this prompt alone."
        ),
    ] = "all"
    length_policy: Annotated[
        Sequence[Lengths],
        several(
            help="auto, padding, pipe or online: how npu and layer run lengths without a graph.",
            names=get_args(Lengths),
        ),
    ] = ("auto",)
    in_flight: InFlightOption = 1
    techniques: Annotated[
        Names,
        several(
            "--technique",
            help="none; llm.npu: see docs/llm-npu.md; shadowattn: see docs/shadow-attention.md; npumoe: see "
            "docs/mixture-of-experts.md; npu-attention: attention of prompts on the NPU; with +: both.",
            names=TECHNIQUE_SETS,
        ),
    ] = ("none",)
    sync: Annotated[
        Sequence[Waits],
        several(help="finish (the driver's waits and copies), poll or predict.", names=get_args(Waits)),
    ] = ("predict",)
    gpu_load: Annotated[
        Sequence[Any] | None,
        several(
            help="A game: its frame rate and GPU time for each frame.", metavar="60fps:5ms", item=parse_load
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class ModellingOptions:
    """Options of the model."""

    what_if: Annotated[
        list[Any] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="Change a parameter of the SoC, such as npu.execute_us=50.",
            parser=parse_parameter,
        ),
    ] = None
    every_form: Annotated[
        bool, typer.Option("--every-form", help="Let graphs have forms that HeteroLLM lacks.")
    ] = False
    calibrated: Annotated[
        bool,
        typer.Option(
            "--calibrated", help="Assume stepped scales and calibrated ranges, for integer NPU graphs."
        ),
    ] = False
    pruned: Annotated[
        float, typer.Option(help="Assumed share of layers whose outliers llm.npu leaves to the NPU.")
    ] = 0.85
    outlier_share: Annotated[
        float, typer.Option(help="llm.npu: assumed share of an operator's inputs that have outliers.")
    ] = 0.02
    overflow: OverflowOption = "gpu"
    imbalance: Annotated[
        float | None,
        typer.Option(
            help="Of a mixture of experts: assumed largest load of an expert over the mean one; by default 2."
        ),
    ] = None
    head_imbalance: Annotated[
        float | None,
        typer.Option(
            help="With shadowattn: assumed largest need of keys of a head over the mean; by default 1."
        ),
    ] = None
    head_pipeline: Annotated[
        Literal["heads", "fused", "ordered"],
        typer.Option(help="With shadowattn: a launch for each key head, fused heads, or these in order."),
    ] = "ordered"
    numerics: Annotated[
        bool, typer.Option("--numerics", help="Compute values, too, from a checkpoint with weights.")
    ] = False


@commands.command("simulate")
@takes_records
def simulate_model(
    context: typer.Context,
    cases: CaseOptions,
    modelling: ModellingOptions,
    attention: AttentionOptions,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a timeline for ui.perfetto.dev, and its picture."),
    ] = None,
    explain: Annotated[
        bool, typer.Option("--explain", help="Say where the time goes, by operator and processor.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Processes of a sweep; by default one for each core.")
    ] = None,
    cluster: Annotated[
        ClusterOption | None, typer.Option(help="Run a sweep on a cluster instead: see docs/simulation.md.")
    ] = None,
    form: FormatOption = "table",
    output: RowsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a model's shapes on a simulated SoC, on a virtual clock: no printed time was measured.

    Lists with commas between their values (models, SoCs, prompts, decode, plans, length policies,
    syncs, game loads) make a grid, which runs in parallel; the row of a failed case has the reason.
    File names get the word simulated if they lack it: game.json becomes game.simulated.json.
    """
    from heterollm.base import check_target, labelled

    form = chosen_format(form, as_json=as_json)
    if output is not None:
        output = labelled(output)
        check_target(output, "result")
    if timeline is not None:
        timeline = labelled(timeline)
        check_target(timeline, "timeline")
        check_target(_picture_of(timeline), "picture")
    given = {name: context.params[name] for name in given_options(context)}
    requests = _requests(cases, modelling, attention, given, trace=timeline is not None)
    refuse_idle(GRID_EFFECTS, given, context.params | {"cases": len(requests), "form": form})
    if len(requests) == 1 and form in ("table", "json") and output is None:
        _one(requests[0], timeline, as_json=form == "json", explain=explain)
    else:
        _several(requests, jobs, cluster, form, output)


def _requests(
    cases: CaseOptions,
    modelling: ModellingOptions,
    attention: AttentionOptions,
    given: Mapping[str, Any],
    *,
    trace: bool,
) -> tuple[SimulationRequest, ...]:
    """Return the cases of the grid.

    Raises:
        OptionError: An option is not legal.
    """
    from heterollm.benchmarks import expand_simulated
    from heterollm.simulate import SimulationRequest
    from heterollm.solver import ExpertsRequest

    models = _names(cases.model, "MODEL")
    base = SimulationRequest(
        models[0],
        plan_for=cases.plan_for,
        in_flight=cases.in_flight,
        overrides=dict(modelling.what_if or ()),
        head_bits=8 if modelling.numerics else 4,
        every_form=True if modelling.every_form else None,
        calibrated=modelling.calibrated,
        pruned=modelling.pruned,
        outlier_share=modelling.outlier_share,
        attention=attention.request(pipeline=modelling.head_pipeline),
        experts=ExpertsRequest(modelling.overflow),
        imbalance=modelling.imbalance,
        head_imbalance=modelling.head_imbalance,
        numerics=modelling.numerics,
        trace=trace,
    )
    return expand_simulated(
        base,
        given,
        model=models,
        soc=_names(cases.soc, "--soc"),
        prompt=cases.prompt,
        decode=cases.decode,
        level=cases.plan,
        length_policy=cases.length_policy,
        sync=cases.sync,
        load=cases.gpu_load or (None,),
        techniques=[() if text == "none" else tuple(text.split("+")) for text in cases.techniques],
    )


def _one(request: SimulationRequest, timeline: Path | None, *, as_json: bool, explain: bool) -> None:
    """Simulate one case and print its report."""
    from heterollm.benchmarks import modelled_row
    from heterollm.report import console as report
    from heterollm.report import simulation_report
    from heterollm.simulate import simulate

    with report.progress_bars() as progress:
        result = simulate(request, progress)
    if timeline is not None and result.trace is not None:
        report.show(report.note(_write_timeline(result.trace, timeline)))
    data = modelled_row(request, result).to_dict() | ({"explained_ms": result.explained()} if explain else {})
    report.answer(simulation_report(result, explain=explain), data, as_json=as_json)


def _several(
    requests: Sequence[SimulationRequest],
    jobs: int | None,
    cluster: ClusterOption | None,
    form: Format,
    out: Path | None,
) -> None:
    """Simulate a grid and print a row for each case."""
    from heterollm.benchmarks import BenchResult, RowFile, run_sweep
    from heterollm.kernels.threads import allowed_cores
    from heterollm.report import console as report

    # Row by row: an interrupted sweep keeps its rows.
    keep = None if out is None else RowFile(out).add
    jobs = jobs or min(len(requests), len(allowed_cores()))
    with report.progress_bars() as progress:
        rows = run_sweep(requests, jobs=jobs, cluster=cluster, progress=progress, keep=keep)
    if out is not None:
        report.show(report.note(f"Wrote {len(rows)} simulated rows to {out}."))
    show_results([BenchResult(tuple(rows), ())], "", ResultOptions(form))
    failed = sum(row.error is not None for row in rows)
    if failed:
        report.show(report.note(f"{failed} of {len(rows)} cases failed; their rows say why."))
        raise typer.Exit(FAILED)


def _names(text: str, option: str) -> list[str]:
    """Return names or paths; the path of a file may have commas."""
    try:
        whole = "," in text and Path(text).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # no path, or no such home
        whole = False
    found = [text] if whole else [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise typer.BadParameter("It is empty.", param_hint=option)
    return found


def _picture_of(timeline: Path) -> Path:
    return timeline.with_name(f"{timeline.name}.png")


def _write_timeline(trace: Trace, path: Path) -> str:
    """Write the simulated timeline and its picture, and return a note with their paths."""
    from heterollm.base import save_file
    from heterollm.report import trace_png
    from heterollm.trace import save_trace

    save_trace(trace, path)
    try:
        save_file(_picture_of(path), trace_png(trace))
    except OptionError as error:
        return f"Wrote the simulated timeline to {path}. The timeline gets no picture. {error}"
    return f"Wrote the simulated timeline to {path} and {_picture_of(path)}."
