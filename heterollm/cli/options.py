"""What the commands of the command line share: options, exit codes, and how a group of commands is made.

A new family of commands is a module ``cli_<name>.py`` with ``commands = command_group()`` and functions
under ``@commands.command()``, and joins the others in :mod:`heterollm.cli.command_line`.
"""

from __future__ import annotations

from typing import Annotated, Final

import typer

from heterollm.base import FAILED, OptionError
from heterollm.cli import complete as cli_complete

__all__ = [
    "FAILED",
    "AllowFallback",
    "AllowSlow",
    "Asymmetric",
    "Context",
    "DeviceOption",
    "GpuThreads",
    "GroupSize",
    "JsonOption",
    "MaybeModel",
    "MinP",
    "Model",
    "NpuThreads",
    "OutputOption",
    "Penalty",
    "PlanOption",
    "PrecisionOption",
    "Seed",
    "SyncOption",
    "Temperature",
    "TopK",
    "TopP",
    "check_form",
    "command_group",
    "whole_numbers",
]

ModelArgument = typer.Argument(
    metavar="MODEL", help="Folder of a checkpoint, or its hub name.", autocompletion=cli_complete.models
)
Model = Annotated[str, ModelArgument]
MaybeModel = Annotated[str | None, ModelArgument]
DeviceOption = Annotated[
    str,
    typer.Option(
        help="auto, snapdragon, host, emulator, or sim:SOC (simulated).", autocompletion=cli_complete.devices
    ),
]
PlanOption = Annotated[
    str,
    typer.Option(
        help="auto, gpu, npu, layer, tensor, block, or the file of a plan.", autocompletion=cli_complete.plans
    ),
]
PrecisionOption = Annotated[
    str, typer.Option(help="w4a16, w4a8 or fp16.", autocompletion=cli_complete.precisions)
]
GroupSize = Annotated[int, typer.Option(help="Weights that share a scale: 32, 64 or 128.")]
Asymmetric = Annotated[bool, typer.Option("--asymmetric", help="Give 4-bit weights zero points.")]
Context = Annotated[int | None, typer.Option(help="Positions of the KV cache.")]
Temperature = Annotated[float, typer.Option(help="0 takes the likeliest token every time.")]
TopK = Annotated[int, typer.Option(help="Sample among so many of the likeliest tokens; 0 among all.")]
TopP = Annotated[float, typer.Option(help="Sample among the likeliest tokens of this probability.")]
MinP = Annotated[float, typer.Option(help="Leave out what is less likely than this fraction of the best.")]
Penalty = Annotated[float, typer.Option(help="Above 1 makes tokens that were seen less likely.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
GpuThreads = Annotated[int | None, typer.Option(help="Threads of the GPU part on host and emulator.")]
NpuThreads = Annotated[int | None, typer.Option(help="Threads of the NPU part on host; 0 leaves it out.")]
AllowSlow = Annotated[bool, typer.Option("--allow-slow", help="Emulate models that take seconds a pass.")]
AllowFallback = Annotated[
    bool, typer.Option("--allow-fallback", help="Go on with the GPU alone when the NPU part fails.")
]
SyncOption = Annotated[
    str,
    typer.Option(
        help="How to wait for the GPU: auto, event, poll, flag, sleep_poll, sleep_flag, finish, or operator "
        "(after every operator)."
    ),
]
OUTPUTS: Final = ("table", "md", "csv", "json", "jsonl")
OutputOption = Annotated[
    str,
    typer.Option(
        "-o",
        "--output",
        help="table, md, csv, json or jsonl.",
        autocompletion=cli_complete.among(*OUTPUTS),
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON value and nothing else.")]


def command_group(name: str | None = None, description: str | None = None) -> typer.Typer:
    """Return an empty group of commands.

    Args:
        name: The word before its commands; without one they stand beside those of all groups.
        description: What ``--help`` says of a group with a name.
    """
    return typer.Typer(name=name, help=description, no_args_is_help=True, rich_markup_mode=None)


def check_form(output: str) -> None:
    """Check how results are to be shown.

    Raises:
        OptionError: There is no such form.
    """
    if output not in OUTPUTS:
        raise OptionError(f"There is no output {output!r:.80}.", fix=f"Choose among {', '.join(OUTPUTS)}.")


def whole_numbers(text: str, option: str) -> list[int]:
    """Return the numbers of an option that takes several, such as ``1,32,256``.

    Raises:
        OptionError: It is something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise OptionError(f"{option} is {text!r:.80}.", fix="Give whole numbers with commas between them.")
    return [int(part) for part in parts]
