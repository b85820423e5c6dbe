"""The commands under ``cache``."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from heterollm.base import KINDS
from heterollm.cli import complete as cli_complete
from heterollm.cli.options import JsonOption, command_group, one_of

commands = command_group("cache", "Look at and clear the cache.")


@commands.command("list")
def cache_list(as_json: JsonOption = False) -> None:
    """Show the kinds of cached files and their sizes."""
    from heterollm.base import list_cache
    from heterollm.report import console as report

    kinds = list_cache()
    report.answer(report.cache_table(kinds), kinds, as_json=as_json)


@commands.command("clear")
def cache_clear(
    kinds: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KIND]...",
            help=f"{', '.join(KINDS)}.",
            parser=one_of(KINDS),
            autocompletion=lambda incomplete: cli_complete.beginning(incomplete, KINDS),
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete cached files of some kinds, or of all but profiles; they are made again when needed."""
    from heterollm.base import CLEARED, cache_root, check_stdin, clear_cache, format_bytes, list_cache, write
    from heterollm.report import console as report

    wanted = kinds or CLEARED
    if not yes:
        check_stdin()
        report.show(report.cache_table(list_cache(wanted)))
        typer.confirm(f"Delete these files in {cache_root()}?", abort=True, err=True)
    cleared = clear_cache(wanted)
    files, size = sum(kind.files for kind in cleared), sum(kind.size_bytes for kind in cleared)
    write(f"Deleted {files} files, {format_bytes(size)}.\n")


@commands.command("path")
def cache_path() -> None:
    """Print the path of the cache folder."""
    from heterollm.base import cache_root, write

    write(f"{os.fspath(cache_root())}\n")
