"""The command ``demo``."""

from __future__ import annotations

import functools
from typing import Annotated

import typer

from heterollm.cli.options import DeviceOption, JsonOption, SyncOption, command_group

commands = command_group()


@commands.command()
def demo(
    device: DeviceOption = "auto",
    max_new_tokens: Annotated[int, typer.Option(help="Length of the text.")] = 64,
    sync: SyncOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Write some text, measure GPU, NPU and both here, and simulate them on a phone; needs no download."""
    from heterollm.base import OptionError, write, write_json

    if max_new_tokens < 1:
        raise OptionError(f"--max-new-tokens is {max_new_tokens}.", fix="Give at least 1 token.")
    from heterollm.benchmarks import PROMPT, run_demo
    from heterollm.report import console as report
    from heterollm.report import demo_heading, demo_report

    run = functools.partial(run_demo, device=device, max_new_tokens=max_new_tokens, sync=sync)
    with report.progress_bars() as progress:
        if as_json:
            write_json(run(progress=progress).to_dict())
            return
        result = run(
            on_start=lambda device, size: report.present(demo_heading(device, size, PROMPT)),
            on_text=write,
            progress=progress,
        )
    write("\n\n")
    report.present(demo_report(result))
