"""The command ``compile``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heterollm.cli.options import (
    AttentionOptions,
    Context,
    IntegerList,
    JsonOption,
    Model,
    OverflowOption,
    TechniqueOption,
    WeightOptions,
    command_group,
    numbers,
    technique_request,
)
from heterollm.cli.records import takes_records

commands = command_group()


@commands.command("compile")
@takes_records
def compile_graphs(
    model: Model,
    soc: Annotated[str, typer.Option(help="Qualcomm's number of the chip: 57 is the Snapdragon 8 Gen 3.")],
    plan: Annotated[
        str,
        typer.Option(
            help="npu, layer, or the file of a plan for snapdragon; with --profile any level, or auto."
        ),
    ] = "layer",
    *,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Profile of the device, which tensor, block and techniques need."),
    ] = None,
    techniques: TechniqueOption = (),
    overflow: OverflowOption = "gpu",
    attention: AttentionOptions,
    weights: WeightOptions,
    prompt: Annotated[IntegerList | None, numbers(help="Only these prompt lengths; 0 for none.")] = None,
    decode: Annotated[
        int, typer.Option(min=0, help="Tokens to decode; 0 leaves out the graphs of one token.")
    ] = 1,
    context: Context = None,
    context_layers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Layers that share a context, with all their lengths; 0 for contexts of one graph. "
            "Default 1, or 0 with --prompt or --decode 0.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compile a Snapdragon's NPU graphs ahead, on Linux x86-64, to copy them to the device."""
    from heterollm.planning import precompile
    from heterollm.report import console as report

    with report.progress_bars() as progress:
        result = precompile(
            model,
            soc=soc,
            plan=plan,
            profile=profile,
            request=technique_request(techniques, attention, overflow),
            precision=weights.precision,
            group_size=weights.group_size,
            symmetric=not weights.asymmetric,
            scales=weights.scales,
            calibration=weights.calibration,
            prompts=None if prompt is None else [n for n in prompt if n],
            decode=decode > 0,
            context=context,
            context_layers=context_layers,
            progress=progress,
        )
    report.answer(report.precompile_report(result), result.to_dict(), as_json=as_json)
