"""The command ``plan``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from heterollm.cli import complete as cli_complete
from heterollm.cli.options import (
    Asymmetric,
    Context,
    DeviceOption,
    GpuThreads,
    GroupSize,
    JsonOption,
    Model,
    NpuThreads,
    PrecisionOption,
    command_group,
    whole_numbers,
)

if TYPE_CHECKING:
    from heterollm.kernels.ops import Precision
    from heterollm.solver import RequestedLevel

__all__ = ["commands"]

commands = command_group()

DEFAULT_LENGTHS = "1,64,256,1024"


@commands.command("plan")
def plan_model(
    model: Model,
    device: DeviceOption = "auto",
    profile: Annotated[Path | None, typer.Option(help="File of a profile; no device is opened then.")] = None,
    length: Annotated[str, typer.Option(help="Prompt lengths to show, such as 64,300.")] = DEFAULT_LENGTHS,
    level: Annotated[
        str,
        typer.Option(
            help="tensor, block (whole feed-forward networks too), or auto: the better one.",
            autocompletion=cli_complete.levels,
        ),
    ] = "auto",
    explain: Annotated[
        bool, typer.Option("--explain", help="Say what the other placements would cost.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the plan to this file.")
    ] = None,
    precision: PrecisionOption = "w4a16",
    group_size: GroupSize = 32,
    asymmetric: Asymmetric = False,
    context: Context = None,
    gpu_share: Annotated[
        float, typer.Option(help="Most of an operator's time that the GPU may compute.")
    ] = 1.0,
    energy_weight: Annotated[float, typer.Option(help="0 counts time alone, 1 energy alone.")] = 0.0,
    forbid: Annotated[
        str | None,
        typer.Option(
            help="gpu or npu: it computes no linear layer; row, sequence, hybrid or block: no such split. "
            "Several with commas."
        ),
    ] = None,
    npu_gib: Annotated[float | None, typer.Option(help="Most that the NPU's slices may take.")] = None,
    histogram: Annotated[
        str | None,
        typer.Option(
            help="How often prompts of a length come, 64:10,256:3 (decoded tokens count under 1), or a file "
            "of such pairs."
        ),
    ] = None,
    build_budget: Annotated[
        str | None,
        typer.Option(
            help="Longest that building the NPU's graphs may take, such as 30s: chooses the standard lengths "
            "for --histogram."
        ),
    ] = None,
    gpu_threads: GpuThreads = None,
    npu_threads: NpuThreads = None,
    as_json: JsonOption = False,
) -> None:
    """Solve for the best cut of every operator, and show what was chosen and why."""
    from heterollm.base import OptionError, check_target, parse_duration, write, write_json
    from heterollm.planning import LoadOptions, solve_for
    from heterollm.report import console as report
    from heterollm.report import plan_report
    from heterollm.solver import PlanRequest

    prompts = whole_numbers(length, "--length")
    if min(prompts) < 1:
        raise OptionError(f"--length is {length!r:.80}.", fix="Prompts have at least one token.")
    if output is not None:
        check_target(output, "plan")
    options = LoadOptions(
        device=device,
        precision=cast("Precision", precision),
        group_size=group_size,
        symmetric=not asymmetric,
        context=context,
        gpu_threads=gpu_threads,
        npu_threads=npu_threads,
        request=PlanRequest(
            gpu_share=gpu_share,
            energy_weight=energy_weight,
            forbidden=tuple(forbid.split(",")) if forbid else (),
            npu_gib=npu_gib,
            histogram=None if histogram is None else _histogram(histogram),
            build_budget_s=None if build_budget is None else parse_duration(build_budget, "--build-budget"),
            level=cast("RequestedLevel", level),
        ),
    )
    solved = solve_for(model, options, profile)
    if output is not None:
        solved.plan.save(output)
    if as_json:
        import json

        write_json(json.loads(solved.plan.to_json()))
        return
    write(report.render(plan_report(solved, prompts, explain=explain), like=sys.stdout))
    if output is not None:
        report.show(report.note(f"Written to {output}; run it with `heterollm generate --plan {output}`."))


def _histogram(text: str) -> dict[int, float]:
    """Return the counts of pairs, or of a file that holds such, separated by commas or white space."""
    from heterollm.base import OptionError

    fix = "Give lengths with weights, 64:10,256:3, or a file of such pairs."
    pairs = text
    try:
        if Path(text).is_file():
            pairs = Path(text).read_text(encoding="utf-8")
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
