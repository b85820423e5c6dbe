"""Writes what of the documents follows from the program.

That is docs/commands.md, the numbers and the figure of docs/how-the-split-works.md, the model types in
docs/checkpoints.md, docs/checkpoint-fields.md, and the schemas of files in docs/schemas.

    python docs/generate.py          writes them
    python docs/generate.py --check  exit code 1 if one of them is out of date

``tests/test_docs.py`` checks the same.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import field_tables
import typer
import worked_example
from file_schemas import schema_files

from heterollm.cli.command_line import app

PAGE: Final = Path(__file__).parent / "commands.md"
NAME: Final = "heterollm"

HEAD: Final = """\
# Commands

Written by `python docs/generate.py` from the program; a test fails where this page is out of date.

Results go to stdout, everything else to stderr: progress, notes, statistics and errors. `--json` prints one
JSON value. `--debug`, before or after the command, shows tracebacks and the warnings of libraries. Where
`--help` shows some options of a command, `--help-all` shows all. Errors and what to do about them:
[troubleshooting.md](troubleshooting.md).

A file of simulated times has the word in its name: what is asked for as `run.json` is written as
`run.simulated.json`, and stderr says so.
"""


def commands(command: Any, words: tuple[str, ...] = (NAME,)) -> Iterator[tuple[tuple[str, ...], Any]]:  # noqa: ANN401
    """Yield the words and the command of a group and of everything under it, in the order of the help.

    Args:
        command: A command of typer's own click.
        words: What is typed to run it.
    """
    yield words, command
    for name, below in getattr(command, "commands", {}).items():
        if not below.hidden:
            yield from commands(below, (*words, name))


def reference() -> str:
    """Return the page."""
    parts = [HEAD]
    for words, command in commands(typer.main.get_command(app)):
        level = "##" if len(words) < 3 else "###"
        parts.append(f"{level} `{' '.join(words)}`\n")
        parts += [f"{_plain(command.help)}\n"] if command.help else []
        parts += [f"{block}\n" for block in _blocks(command.epilog or "")]
        shown = [param for param in command.params if not getattr(param, "hidden", False)]
        parts += _table("argument", [param for param in shown if param.param_type_name == "argument"])
        parts += _table("option", [param for param in shown if param.param_type_name != "argument"])
    return "\n".join(parts)


def _plain(text: str) -> str:
    """Return a help text as Markdown; click's mark of lines that are not wrapped says nothing here."""
    lines = (line.rstrip() for line in inspect.cleandoc(text).replace("\f", "").splitlines())
    return "\n".join(line for line in lines if line != "\b").strip()


def _blocks(epilog: str) -> Iterator[str]:
    """Yield what stands under a help: titles, and lines that stay as they are. Tests parse them there."""
    for block in filter(None, (part.strip() for part in epilog.split("\b\n"))):
        title, *lines = block.splitlines()
        body = inspect.cleandoc("\n".join(["", *lines]))
        yield f"{title}\n\n```text\n{body}\n```"


def _table(kind: str, params: list[Any]) -> list[str]:
    if not params:
        return []
    rows = [f"| {kind} | meaning | default |", "|---|---|---|"]
    for param in params:
        help_text = " ".join((param.help or "").split()).replace("|", "\\|")
        rows.append(f"| `{_spelling(param)}` | {help_text} | {_default(param)} |")
    return ["\n".join(rows) + "\n"]


def _spelling(param: Any) -> str:  # noqa: ANN401 - a parameter of typer's own click
    if param.param_type_name == "argument":
        return (param.metavar or param.name.upper()).replace("|", "\\|")
    names = ", ".join(sorted(param.opts, key=len))
    if param.is_flag:
        return names
    value = param.metavar or "VALUE"
    return f"{names} {value}".replace("|", "\\|")


def _default(param: Any) -> str:  # noqa: ANN401 - a parameter of typer's own click
    if param.required:
        return "required"
    default = param.default
    if isinstance(default, tuple):
        default = ",".join(map(str, default))
    return "" if default is False or default in (None, "") or callable(default) else f"`{default}`"


def example_files() -> dict[Path, str]:
    """Return the page and the figure of the worked example."""
    example = worked_example.solved()
    page = worked_example.PAGE.read_text("utf-8")
    return {
        worked_example.PAGE: worked_example.with_numbers(page, example),
        worked_example.FIGURE: worked_example.figure(example),
    }


def main() -> int:
    """Write or check the files; return the exit code."""
    files = {PAGE: reference(), **example_files(), **field_tables.pages(), **schema_files()}
    if "--check" in sys.argv[1:]:
        return int(any(not path.exists() or path.read_text("utf-8") != text for path, text in files.items()))
    for path, text in files.items():
        path.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
