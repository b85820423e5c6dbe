"""The command ``calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from heterollm.cli.options import GroupSize, JsonOption, Model, PrecisionOption, command_group

commands = command_group()


@commands.command("calibrate")
def calibrate_model(
    model: Model,
    texts: Annotated[
        list[Path] | None,
        typer.Argument(metavar="TEXT", help="Files of plain text; by default a built-in one."),
    ] = None,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The calibration; continued if it exists.")
    ] = Path("calibration.json"),
    windows: Annotated[int, typer.Option(help="Windows of text to run, at least 2.")] = 8,
    window: Annotated[
        int, typer.Option(metavar="TOKENS", help="Length of a window: about that of prompts, for shadowattn.")
    ] = 512,
    head_importance: Annotated[
        bool, typer.Option("--head-importance", help="Measure the loss without each head and layer: slow.")
    ] = False,
    precision: PrecisionOption = "w4a16",
    group_size: GroupSize = 32,
    int16_limit: Annotated[
        float | None, typer.Option(metavar="DB", help="w8a8: operators below this SQNR keep 16 bits.")
    ] = None,
    pruned: Annotated[
        float | None, typer.Option(metavar="SHARE", help="w8a8: share of the shadows to prune, 0 to 1.")
    ] = None,
    loss_limit: Annotated[
        float | None,
        typer.Option(metavar="PERCENT", help="w8a8: perplexity that pruning may cost; 1 by default."),
    ] = None,
    gpu_threads: Annotated[int | None, typer.Option(help="Threads that compute.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure a model's activations and attention heads, for integer NPU graphs and sparse attention."""
    from heterollm.calibration import Policy, calibrate
    from heterollm.report import calibration_json, calibration_report
    from heterollm.report import console as report

    with report.progress_bars() as progress:
        found = calibrate(
            model,
            texts or (),
            output=output,
            windows=windows,
            window_tokens=window,
            head_importance=head_importance,
            precision=precision,
            group_size=group_size,
            policy=Policy(int16_limit, pruned, loss_limit),
            gpu_threads=gpu_threads,
            progress=progress,
        )
    path = str(output)
    report.answer(calibration_report(found, path), calibration_json(found, path), as_json=as_json)
