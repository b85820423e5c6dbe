"""Options that several commands share, the records that hold them, and groups of commands.

A new family of commands is a module of this room with ``commands = command_group()`` and functions under
``@commands.command()``, and joins the others in :mod:`heterollm.cli.command_line`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

import typer
from typer.core import TyperGroup

from heterollm.base import FAILED, OptionError
from heterollm.cli import complete as cli_complete

__all__ = [
    "FAILED",
    "Context",
    "DeviceOption",
    "DeviceOptions",
    "Format",
    "FormatOption",
    "GroupSize",
    "JsonOption",
    "MaybeModel",
    "Model",
    "ModelOptions",
    "RowsOption",
    "RunOptions",
    "SyncOption",
    "ThreadOptions",
    "TokenOptions",
    "WeightOptions",
    "chosen_format",
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
PrecisionOption = Annotated[
    str, typer.Option(help="w4a16, w4a8 or fp16.", autocompletion=cli_complete.precisions)
]
GroupSize = Annotated[int, typer.Option(help="Weights that share a scale: 32, 64 or 128.")]
Context = Annotated[int | None, typer.Option(help="Positions of the KV cache.")]
SyncOption = Annotated[
    str,
    typer.Option(
        help="How to wait for the GPU: auto, event, poll, flag, sleep_poll, sleep_flag, finish, or operator "
        "(after every operator)."
    ),
]
Format: TypeAlias = Literal["table", "md", "csv", "json", "jsonl"]
FormatOption = Annotated[Format, typer.Option("--format", help="Form of what is printed.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON value and nothing else.")]
RowsOption = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="Append each row as a JSON line.")
]


@dataclass(frozen=True, slots=True)
class ThreadOptions:
    """The threads of both parts, where they share the cores of one processor."""

    gpu_threads: Annotated[int | None, typer.Option(help="Threads of the GPU part on host and emulator.")] = (
        None
    )
    npu_threads: Annotated[
        int | None, typer.Option(help="Threads of the NPU part on host; 0 leaves it out.")
    ] = None


@dataclass(frozen=True, slots=True)
class DeviceOptions:
    """A device and the threads of its parts."""

    device: DeviceOption = "auto"
    threads: ThreadOptions = ThreadOptions()


@dataclass(frozen=True, slots=True)
class WeightOptions:
    """How weights are stored and multiplied."""

    precision: PrecisionOption = "w4a16"
    group_size: GroupSize = 32
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help="Give 4-bit weights zero points.")] = False


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model is loaded: where it runs, by which plan, with which weights and how long a context."""

    device: DeviceOption = "auto"
    plan: Annotated[
        str,
        typer.Option(
            help="auto, gpu, npu, layer, tensor, block, or the file of a plan.",
            autocompletion=cli_complete.plans,
        ),
    ] = "auto"
    weights: WeightOptions = WeightOptions()
    context: Context = None


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How both parts run a loaded model."""

    threads: ThreadOptions = ThreadOptions()
    allow_slow: Annotated[
        bool, typer.Option("--allow-slow", help="Emulate models that take seconds a pass.")
    ] = False
    sync: SyncOption = "auto"
    allow_fallback: Annotated[
        bool, typer.Option("--allow-fallback", help="Go on with the GPU alone when the NPU part fails.")
    ] = False


@dataclass(frozen=True, slots=True)
class TokenOptions:
    """How the tokens of an answer are chosen."""

    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token every time.")] = 0.0
    top_k: Annotated[int, typer.Option(help="Sample among so many of the likeliest tokens; 0 among all.")] = 0
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens of this probability.")] = 1.0
    min_p: Annotated[
        float, typer.Option(help="Leave out what is less likely than this fraction of the best.")
    ] = 0.0
    repetition_penalty: Annotated[
        float, typer.Option(help="Above 1 makes tokens that were seen less likely.")
    ] = 1.0
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None


def command_group(
    name: str | None = None, description: str | None = None, cls: type[TyperGroup] = TyperGroup
) -> typer.Typer:
    """Return an empty group of commands.

    Args:
        name: The word before its commands; without one they stand beside those of all groups.
        description: What ``--help`` says of a group with a name.
        cls: The class of the group.
    """
    return typer.Typer(name=name, cls=cls, help=description, no_args_is_help=True, rich_markup_mode=None)


def chosen_format(form: Format, *, as_json: bool) -> Format:
    """Return the format that ``--format`` and ``--json`` name together.

    Raises:
        BadParameter: They name two.
    """
    if not as_json:
        return form
    if form not in ("table", "json"):
        raise typer.BadParameter(f"--json prints JSON, and --format {form} does not.", param_hint="--json")
    return "json"


def whole_numbers(text: str, option: str) -> list[int]:
    """Return the numbers of an option that takes several, such as ``1,32,256``.

    Raises:
        OptionError: It is something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 10 for part in parts):
        raise OptionError(f"{option} is {text!r:.80}.", fix="Give whole numbers with commas between them.")
    return [int(part) for part in parts]
