"""The command ``export``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from heterollm.cli.effects import options_of_file
from heterollm.cli.options import (
    ExpertsGibOption,
    JsonOption,
    KvBitsOption,
    Model,
    ModelOptions,
    PowerOption,
    ThreadOptions,
    command_group,
    load_keywords,
)
from heterollm.cli.records import takes_records

if TYPE_CHECKING:
    from heterollm.planning import LoadKeywords

commands = command_group()


@commands.command()
@takes_records
def export(
    model: Model,
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", metavar="FOLDER", help="The folder; an interrupted export goes on in it."
        ),
    ],
    *,
    options: ModelOptions,
    kv_bits: KvBitsOption = None,
    experts_gib: ExpertsGibOption = None,
    threads: ThreadOptions,
    power: PowerOption = "burst",
    allow_slow: Annotated[
        bool, typer.Option("--allow-slow", help="Emulate a model even if a pass takes seconds.")
    ] = False,
    soc: Annotated[
        str | None,
        typer.Option(
            help="Qualcomm's number of a Snapdragon that is not here, with --device snapdragon on Linux "
            "x86-64: 57 is the 8 Gen 3."
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A profile's file, in place of that of the device."),
    ] = None,
    context_layers: Annotated[
        int | None,
        typer.Option(
            min=0, help="With --soc: layers that share a context, 1 by default; 0 for contexts of one graph."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Put all that a device needs to run a model into a folder, which `generate`, `chat` and `serve` take."""
    from heterollm.report import console as report

    more = {
        "kv_bits": kv_bits,
        "experts_gib": experts_gib,
        "power": power,
        "allow_slow": allow_slow,
        "profile": profile,
        "defaults": options_of_file(),
    }
    with report.progress_bars() as progress:
        progress("Loading", 0, 1)
        from heterollm.exporting import export_model

        progress("Loading", 1, 1)
        result = export_model(
            model,
            output,
            soc=soc,
            context_layers=context_layers,
            progress=progress,
            **cast("LoadKeywords", {**load_keywords(options, threads), **more}),
        )
    report.answer(report.export_report(result), result.to_dict(), as_json=as_json)
