"""The commands under ``config``."""

from __future__ import annotations

import os

import typer

from heterollm.cli.options import JsonOption, command_group

commands = command_group("config", "Look at the file of defaults.")


@commands.command("path")
def config_path() -> None:
    """Print the path of the file of defaults, which need not exist."""
    from heterollm.base import write
    from heterollm.cli import config_file

    write(f"{os.fspath(config_file.config_path())}\n")


@commands.command("show")
def config_show(context: typer.Context, as_json: JsonOption = False) -> None:
    """Check the file of defaults, and show its options."""
    from heterollm.cli import config_file
    from heterollm.report import console as report

    path = config_file.config_path()
    config_file.config_defaults(context.find_root().command, path)
    tables = config_file.read_config(path)
    made = report.table("table", "option", "value", title=str(path))
    for row in config_file.rows(tables):
        made.add_row(*row)
    report.answer(
        made if tables else f"{path} sets nothing.", {"path": path, "tables": tables}, as_json=as_json
    )
