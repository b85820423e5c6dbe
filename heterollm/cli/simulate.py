"""The command ``simulate``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal, TypeAlias, cast

import typer

from heterollm.base import FAILED, OptionError
from heterollm.cli import complete as cli_complete
from heterollm.cli.options import (
    Format,
    FormatOption,
    JsonOption,
    RowsOption,
    chosen_format,
    command_group,
    whole_numbers,
)
from heterollm.cli.records import takes_records

if TYPE_CHECKING:
    from heterollm.kernels.sim import GpuLoad
    from heterollm.simulate import LengthChoice, SimulatedSync, SimulationRequest
    from heterollm.trace import Trace

__all__ = ["check_output", "commands", "default_jobs", "parse_load", "parse_overrides", "words"]

commands = command_group()

MOST_JOBS: Final = 1024

Cluster: TypeAlias = Literal["dask", "ray"]


@dataclass(frozen=True, slots=True)
class CaseOptions:
    """What is simulated; lists make a grid, except of ``resolve``."""

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
            help="snapdragon-8gen3, snapdragon-8elite, or the path of a YAML file.",
            autocompletion=cli_complete.socs,
        ),
    ] = "snapdragon-8gen3"
    prompt: Annotated[str, typer.Option(help="Tokens of the prompt.")] = "256"
    decode: Annotated[str, typer.Option(help="Tokens made after the first.")] = "64"
    plan: Annotated[
        str,
        typer.Option(
            help="gpu, npu, layer, tensor or block.",
            autocompletion=cli_complete.among(*cli_complete.PLANS[1:]),
        ),
    ] = "tensor"
    length_policy: Annotated[
        str,
        typer.Option(
            help="auto, padding, pipe or online: how npu and layer run lengths without a graph.",
            autocompletion=cli_complete.among("auto", "padding", "pipe", "online"),
        ),
    ] = "auto"
    sync: Annotated[
        str,
        typer.Option(
            help="finish (the driver's waits and copies), poll or predict.",
            autocompletion=cli_complete.among("finish", "poll", "predict"),
        ),
    ] = "predict"
    resolve: Annotated[
        bool, typer.Option("--resolve", help="Solve the plan for --sync; else only the hand-over changes.")
    ] = False
    gpu_load: Annotated[
        str | None, typer.Option(metavar="60fps:5ms", help="A game beside it: its rate and GPU time a frame.")
    ] = None


@dataclass(frozen=True, slots=True)
class ModellingOptions:
    """How a case is modelled."""

    what_if: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Change a parameter of the SoC, such as npu.execute_us=50."),
    ] = None
    head_bits: Annotated[
        int | None, typer.Option(help="Bits of head and embedding: 4, as in the papers, or 8.")
    ] = None
    every_form: Annotated[
        bool, typer.Option("--every-form", help="Let graphs have forms that HeteroLLM does not have.")
    ] = False
    numerics: Annotated[
        bool, typer.Option("--numerics", help="Compute everything as well, of a checkpoint with weights.")
    ] = False


@commands.command("simulate")
@takes_records
def simulate_model(
    cases: CaseOptions,
    modelling: ModellingOptions,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a timeline for ui.perfetto.dev, and a picture beside it."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="Processes of a sweep; by default one a core.")] = None,
    cluster: Annotated[
        Cluster | None, typer.Option(help="Run a sweep on a cluster instead: see docs/simulation.md.")
    ] = None,
    form: FormatOption = "table",
    output: RowsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a model's shapes on a simulated SoC, on a virtual clock: no time it prints was measured.

    Lists with commas between their values (models, SoCs, prompts, decode, plans, length policies,
    syncs, game loads) make a grid, which runs in parallel; a case that fails is a row that says why.
    Names of files get the word simulated where they lack it: game.json is written as game.simulated.json.
    """
    form = chosen_format(form, as_json=as_json)
    out = check_output(output)
    timeline, picture = _check_timeline(timeline)
    requests = _requests(cases, modelling, trace=timeline is not None)
    if len(requests) == 1 and form in ("table", "json") and out is None:
        _one(requests[0], timeline, picture, as_json=form == "json")
    else:
        _several(requests, default_jobs(jobs, len(requests)), cluster, form, out)


def _requests(
    cases: CaseOptions, modelling: ModellingOptions, *, trace: bool
) -> tuple[SimulationRequest, ...]:
    """Return the cases of the grid.

    Raises:
        OptionError: An option is not legal.
    """
    from heterollm.simulate import SimulationRequest, expand

    models = _names(cases.model, "MODEL")
    prompts, decodes = whole_numbers(cases.prompt, "--prompt"), whole_numbers(cases.decode, "--decode")
    policies, syncs = words(cases.length_policy, "--length-policy"), words(cases.sync, "--sync")
    bits = modelling.head_bits
    base = SimulationRequest(
        models[0],
        prompt=prompts[0],
        decode=decodes[0],
        resolve=cases.resolve,
        overrides=parse_overrides(modelling.what_if or []),
        head_bits=(8 if modelling.numerics else 4) if bits is None else bits,
        every_form=True if modelling.every_form else None,
        numerics=modelling.numerics,
        trace=trace,
    )
    return expand(
        base,
        models=models,
        socs=_names(cases.soc, "--soc"),
        prompts=prompts,
        decodes=decodes,
        levels=words(cases.plan, "--plan"),
        policies=cast("list[LengthChoice]", policies),
        syncs=cast("list[SimulatedSync]", syncs),
        loads=[None]
        if cases.gpu_load is None
        else [parse_load(load) for load in words(cases.gpu_load, "--gpu-load")],
    )


def _check_timeline(path: Path | None) -> tuple[Path | None, Path | None]:
    """Return where a timeline and its picture go, before the work.

    Without matplotlib there is no picture, and a note says so.

    Raises:
        OptionError: One of them cannot be written.
    """
    if path is None:
        return None, None
    from heterollm.base import check_target, labelled
    from heterollm.report import console as report
    from heterollm.report import require_matplotlib

    path = labelled(path)
    picture = path.with_name(f"{path.name}.png")
    check_target(path, "timeline")
    try:
        require_matplotlib()
    except OptionError as error:
        report.show(report.note(f"The timeline gets no picture. {error}"))
        return path, None
    check_target(picture, "picture")
    return path, picture


def _one(request: SimulationRequest, timeline: Path | None, picture: Path | None, *, as_json: bool) -> None:
    """Simulate one case and print all that is known of it."""
    from heterollm.base import write, write_json
    from heterollm.report import console as report
    from heterollm.report import simulation_report
    from heterollm.simulate import simulate

    with report.progress_bars() as progress:
        result = simulate(request, progress)
    if timeline is not None and result.trace is not None:
        report.show(report.note(_write_timeline(result.trace, timeline, picture)))
    if as_json:
        write_json(result.to_dict())
        return
    write(report.render(simulation_report(result), like=sys.stdout))


def _several(
    requests: Sequence[SimulationRequest], jobs: int, cluster: Cluster | None, form: Format, out: Path | None
) -> None:
    """Simulate a grid and print a row for each case."""
    from heterollm.base import write
    from heterollm.report import SWEEP_FORMATS, append_simulated, sweep_report
    from heterollm.report import console as report
    from heterollm.simulate import run_sweep

    # Row by row: what an interrupted sweep has found is kept.
    keep = None if out is None else lambda row: append_simulated(out, [row])
    with report.progress_bars() as progress:
        rows = run_sweep(requests, jobs=jobs, cluster=cluster, progress=progress, keep=keep)
    if out is not None:
        report.show(report.note(f"Wrote {len(rows)} simulated rows to {out}."))
    if form == "table":
        write(report.render(sweep_report(rows), like=sys.stdout))
    else:
        write(SWEEP_FORMATS[form](rows))
    failed = sum(row.error is not None for row in rows)
    if failed:
        report.show(report.note(f"{failed} of {len(rows)} cases failed; their rows say why."))
        raise typer.Exit(FAILED)


def default_jobs(jobs: int | None, cases: int) -> int:
    """Return how many processes simulate: what was asked for, or one a core, and none without a case.

    Raises:
        OptionError: The number is not legal.
    """
    from heterollm.kernels.threads import allowed_cores

    if jobs is None:
        return max(1, min(cases, len(allowed_cores())))
    if not 1 <= jobs <= MOST_JOBS:
        raise OptionError(f"--jobs is {jobs}.", fix=f"Give 1 to {MOST_JOBS} processes.")
    return jobs


def check_output(out: Path | None) -> Path | None:
    """Return the file that rows go into, checked before the work; its name says that it is simulated.

    Raises:
        OptionError: The file cannot be written.
    """
    if out is None:
        return None
    from heterollm.base import check_target, labelled

    check_target(labelled(out), "result")
    return labelled(out)


def words(text: str, option: str) -> list[str]:
    """Return the values of an option that takes several.

    Raises:
        OptionError: There is none.
    """
    found = [part.strip() for part in text.split(",") if part.strip()]
    if not found:
        raise OptionError(f"{option} is {text!r:.80}.", fix="Give a value, or several with commas between.")
    return found


def _names(text: str, option: str) -> list[str]:
    """Return names or paths; a text that is a path as a whole is one, commas and all."""
    try:
        whole = "," in text and Path(text).expanduser().exists()
    except (OSError, RuntimeError, ValueError):  # no path, or nobody's home
        whole = False
    return [text] if whole else words(text, option)


def parse_load(text: str) -> GpuLoad:
    """Return the game that ``60fps:5ms`` describes.

    Raises:
        OptionError: It describes none, or one that leaves the GPU no time.
    """
    from heterollm.kernels.sim import GpuLoad

    rate, _, time = text.partition(":")
    try:
        if not (rate.endswith("fps") and time.endswith("ms")):
            raise ValueError(text)
        return GpuLoad(float(rate.removesuffix("fps")), 1e3 * float(time.removesuffix("ms")))
    except ValueError:
        raise OptionError(
            f"--gpu-load is {text!r:.80}.", fix="Give frames a second and GPU time a frame: 60fps:5ms."
        ) from None


def parse_overrides(given: list[str]) -> dict[str, float]:
    """Return the parameters that ``--what-if`` changes.

    Raises:
        OptionError: One is not of the form ``name=value``.
    """
    found: dict[str, float] = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            raise OptionError(
                f"--what-if is {text!r:.80}.", fix="Give a parameter and a number: npu.execute_us=50."
            ) from None
    return found


def _write_timeline(trace: Trace, path: Path, picture: Path | None) -> str:
    """Write the simulated timeline and its picture; return what was written."""
    from heterollm.trace import save_trace

    save_trace(trace, path)
    if picture is None:
        return f"Wrote the simulated timeline to {path}."
    from heterollm.base import save_file
    from heterollm.report import trace_png

    save_file(picture, trace_png(trace))
    return f"Wrote the simulated timeline to {path} and {picture}."
