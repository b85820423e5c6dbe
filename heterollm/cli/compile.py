"""The command ``compile``."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, cast

import typer

from heterollm.cli.options import (
    Context,
    JsonOption,
    Model,
    WeightOptions,
    command_group,
    whole_numbers,
)
from heterollm.cli.records import takes_records

if TYPE_CHECKING:
    from heterollm.kernels.ops import Precision

__all__ = ["commands"]

commands = command_group()


@commands.command("compile")
@takes_records
def compile_graphs(
    model: Model,
    soc: Annotated[str, typer.Option(help="Qualcomm's number of the chip: 57 is the Snapdragon 8 Gen 3.")],
    plan: Annotated[str, typer.Option(help="npu, layer, or the file of a plan for snapdragon.")] = "layer",
    *,
    weights: WeightOptions,
    prompt: Annotated[
        str | None, typer.Option(help="Some lengths of prompts only, such as 32,256; 0 for none.")
    ] = None,
    decode: Annotated[
        int, typer.Option(min=0, help="Tokens to decode; 0 leaves out the graphs of one token.")
    ] = 1,
    context: Context = None,
    as_json: JsonOption = False,
) -> None:
    """Compile a Snapdragon's NPU graphs ahead, on Linux x86-64; they are then copied to the device."""
    from heterollm.base import write, write_json
    from heterollm.planning import precompile
    from heterollm.report import console as report

    with report.progress_bars() as progress:
        result = precompile(
            model,
            soc=soc,
            plan=plan,
            precision=cast("Precision", weights.precision),
            group_size=weights.group_size,
            symmetric=not weights.asymmetric,
            prompts=None if prompt is None else [n for n in whole_numbers(prompt, "--prompt") if n],
            decode=decode > 0,
            context=context,
            progress=progress,
        )
    if as_json:
        write_json(result.to_dict())
        return
    write(report.render(report.precompile_report(result), like=sys.stdout))
