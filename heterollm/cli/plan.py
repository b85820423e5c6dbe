"""The command ``plan``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from heterollm.cli.effects import options_of_file
from heterollm.cli.options import (
    AttentionOptions,
    Context,
    DeviceOption,
    InFlightOption,
    IntegerList,
    JsonOption,
    Model,
    Names,
    OverflowOption,
    PowerOption,
    TechniqueOption,
    ThreadOptions,
    WeightOptions,
    command_group,
    numbers,
    several,
)
from heterollm.cli.records import takes_records

if TYPE_CHECKING:
    from heterollm.planning import Planned
    from heterollm.solver import PlanRequest

commands = command_group()

FORBIDDEN = ("gpu", "npu", "row", "sequence", "hybrid", "block")


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """Where the times come from."""

    device: DeviceOption = "auto"
    profile: Annotated[Path | None, typer.Option(help="File of a profile; no device is opened then.")] = None


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """The level of the plan and its output."""

    plan: Annotated[
        Literal["auto", "tensor", "block", "fused"],
        typer.Option(
            help="auto takes the fastest of tensor, block (whole networks) and fused (o with them)."
        ),
    ] = "auto"
    prompt: Annotated[IntegerList, numbers(help="Prompt lengths to show.")] = (1, 64, 256, 1024)
    decode: Annotated[
        int, typer.Option(min=0, help="Tokens to decode after each prompt; 0 shows no decode.")
    ] = 1
    explain: Annotated[bool, typer.Option("--explain", help="Show the times of rejected placements.")] = False
    steps: Annotated[
        bool, typer.Option("--steps", help="Show the steps of the passes that the engine would run.")
    ] = False
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the plan to this file.")
    ] = None
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write one page: who computes what at every length, and times."),
    ] = None


@dataclass(frozen=True, slots=True)
class LimitOptions:
    """The objective of a plan and its limits."""

    gpu_share: Annotated[float, typer.Option(help="Largest fraction of an operator's time on the GPU.")] = 1.0
    energy_weight: Annotated[float, typer.Option(help="0 minimises time alone, 1 energy alone.")] = 0.0
    forbid: Annotated[
        Names,
        several(
            help="gpu, npu: no linear layer there; row, sequence, hybrid, block: no such split.",
            names=FORBIDDEN,
        ),
    ] = ()
    npu_gib: Annotated[
        float | None, typer.Option(help="Largest memory of the NPU's graphs; by default the device's limit.")
    ] = None
    histogram: Annotated[
        str | None,
        typer.Option(
            help="Prompt lengths with frequencies, 64:10,256:3 (1 stands for decoded tokens), or a file of "
            "such pairs."
        ),
    ] = None
    in_flight: InFlightOption = 1
    techniques: TechniqueOption = ()
    overflow: OverflowOption = "gpu"
    build_budget: Annotated[
        str | None,
        typer.Option(
            help="Limit for building the NPU's graphs, such as 30s: chooses the standard lengths for "
            "--histogram."
        ),
    ] = None


@commands.command("plan")
@takes_records
def plan_model(
    model: Model,
    source: SourceOptions,
    answer: AnswerOptions,
    weights: WeightOptions,
    context: Context = None,
    *,
    limits: LimitOptions,
    attention: AttentionOptions,
    threads: ThreadOptions,
    power: PowerOption = "burst",
    as_json: JsonOption = False,
) -> None:
    """Solve for the best split of every operator, and show the chosen placements."""
    from heterollm.base import OptionError, check_target, write_json
    from heterollm.loading import plan_for
    from heterollm.planning import LoadOptions
    from heterollm.report import console as report

    prompts = answer.prompt
    if min(prompts) < 1:
        raise OptionError("--prompt is 0.", fix="Prompts have at least one token.")
    if answer.output is not None:
        check_target(answer.output, "plan")
    if answer.html is not None:
        check_target(answer.html, "page")
    options = LoadOptions(
        device=source.device,
        plan=answer.plan,
        precision=weights.precision,
        group_size=weights.group_size,
        symmetric=not weights.asymmetric,
        scales=weights.scales,
        calibration=weights.calibration,
        context=context,
        gpu_threads=threads.gpu_threads,
        npu_threads=threads.npu_threads,
        power=power,
        request=_request(limits, attention),
        defaults=options_of_file(),
    )
    with report.progress_bars() as progress:
        planned = plan_for(model, options, source.profile, progress)
    if answer.output is not None:
        planned.plan.save(answer.output)
    if answer.html is not None:
        _write_page(model, planned, answer, answer.html)
    if answer.steps:
        from heterollm.cli.steps import show_steps

        show_steps(model, planned, prompts, options, decode=answer.decode > 0, as_json=as_json)
        return
    if as_json:
        import json

        write_json(json.loads(planned.plan.to_json()))
        return
    _show(planned, prompts, answer)


def _write_page(model: str, planned: Planned, answer: AnswerOptions, path: Path) -> None:
    from heterollm.base import labelled, save_file
    from heterollm.report import console as report
    from heterollm.report import plan_page

    assert planned.model is not None
    path = labelled(path, simulated=planned.model.profile.time_kind == "simulated")
    name = model.replace("\\", "/").rstrip("/").rpartition("/")[2] or model
    save_file(path, plan_page(name, planned, answer.prompt, answer.decode).encode())
    report.show(report.note(f"Wrote {path}."))


def _request(limits: LimitOptions, attention: AttentionOptions) -> PlanRequest:
    """Return the request to the solver."""
    from heterollm.base import parse_duration
    from heterollm.solver import ExpertsRequest, PlanRequest

    budget = limits.build_budget
    return PlanRequest(
        gpu_share=limits.gpu_share,
        energy_weight=limits.energy_weight,
        forbidden=tuple(limits.forbid),
        npu_gib=limits.npu_gib,
        histogram=None if limits.histogram is None else _histogram(limits.histogram),
        build_budget_s=None if budget is None else parse_duration(budget, "--build-budget"),
        in_flight=limits.in_flight,
        techniques=tuple(limits.techniques),
        attention=attention.request(),
        experts=ExpertsRequest(limits.overflow),
    )


def _show(planned: Planned, prompts: Sequence[int], answer: AnswerOptions) -> None:
    """Print the plan for a token and for prompts, and the file that it was written to."""
    from heterollm.report import console as report
    from heterollm.report import plan_report

    report.present(plan_report(planned, prompts, answer.decode, explain=answer.explain))
    if answer.output is not None:
        command = f"heterollm generate --plan {answer.output}"
        report.show(report.note(f"Written to {answer.output}; run it with `{command}`."))


def _histogram(text: str) -> dict[int, float]:
    """Return weights by length from pairs, or from a file of pairs, separated by commas or white space."""
    from heterollm.base import OptionError, read_file

    fix = "Give lengths with weights, 64:10,256:3, or a file of such pairs."
    pairs = text
    try:
        if Path(text).is_file():
            pairs = read_file(Path(text)).decode()
    except (OSError, ValueError) as error:
        raise OptionError(f"--histogram is {text!r:.80}, which cannot be read: {error}.", fix=fix) from error
    counts: dict[int, float] = {}
    for pair in pairs.replace(",", " ").split():
        tokens, _, weight = pair.partition(":")
        try:
            counts[int(tokens)] = counts.get(int(tokens), 0.0) + float(weight or 1)
        except ValueError:
            counts[0] = 0.0
    if min(counts, default=0) < 1 or not any(counts.values()):
        raise OptionError(f"--histogram is {pairs!r:.80}.", fix=fix)
    return counts
