"""The commands ``pull``, ``convert``, ``list`` and ``rm``: the models on this machine."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heterollm.base import InputError
from heterollm.cli import complete as cli_complete
from heterollm.cli.options import GroupSize, JsonOption, LoraOption, Model, command_group

if TYPE_CHECKING:
    from heterollm.model import StoredModel

commands = command_group()


@commands.command()
def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="OWNER/NAME or OWNER/NAME:Q4_K_M on the Hugging Face hub; or a known name such as "
            "qwen3-0.6b.",
            autocompletion=cli_complete.known_models,
        ),
    ],
    gguf: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="The GGUF file to fetch, such as '*Q4_K_M*'.")
    ] = None,
) -> None:
    """Fetch a model from the hub: safetensors or one GGUF file; an interrupted fetch goes on where it was."""
    from heterollm.base import write
    from heterollm.model import pull_model
    from heterollm.report import console as report

    with report.progress_bars() as progress:
        path = pull_model(name, gguf, progress)
    write(f"{path}\n")
    model = path if path.is_file() else name
    report.show(report.note(f'`heterollm generate {model} "Once upon a time"` runs it.'))


@commands.command()
def convert(
    model: Model,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="The new checkpoint.")],
    group_size: GroupSize = 32,
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help="Give the weights zero points.")] = False,
    lora: LoraOption = None,
    as_json: JsonOption = False,
) -> None:
    """Quantise a model once, as compressed-tensors W4A16, which other programs read, too."""
    from heterollm.model import convert_model
    from heterollm.report import console as report

    with report.progress_bars() as progress:
        found = convert_model(
            model, output, group_size=group_size, symmetric=not asymmetric, lora=lora, progress=progress
        )
    shown = asdict(found) | {"folder": os.fspath(found.folder)}
    report.answer(report.conversion_table(found), shown, as_json=as_json)
    report.show(report.note(f"`heterollm eval {output} --text FILE` measures its perplexity."))


@commands.command("list")
def list_models(as_json: JsonOption = False) -> None:
    """Show the models in the hub's cache, and those prepared in heterollm's own, with their sizes."""
    from heterollm.model import stored_models
    from heterollm.report import console as report

    found = stored_models()
    report.answer(report.models_table(found), [_json(model) for model in found], as_json=as_json)


@commands.command("rm")
def remove(
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...", help="Names in the list.", autocompletion=cli_complete.stored_models
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete models from the hub's cache and from heterollm's; the files of a folder of yours stay."""
    from heterollm.base import check_stdin, format_bytes, write
    from heterollm.model import remove_models, stored_models
    from heterollm.report import console as report

    every = stored_models()
    for name in names:
        if name not in {model.name for model in every}:
            raise InputError(f"No model is called {name!r:.200}.", fix="`heterollm list` shows the names.")
    found = [model for model in every if model.name in names]
    if not yes:
        check_stdin()
        report.show(report.models_table(found))
        typer.confirm("Delete these files?", abort=True, err=True)
    remove_models(found)
    write(f"Deleted {format_bytes(sum(model.size_bytes for model in found))}.\n")


def _json(model: StoredModel) -> dict[str, object]:
    paths = [os.fspath(path) for path in model.paths]
    return {"name": model.name, "kind": model.kind, "size_bytes": model.size_bytes, "paths": paths}
