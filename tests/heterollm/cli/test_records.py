"""Commands that take records, through typer itself."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from heterollm.cli.records import takes_records


@dataclass(frozen=True)
class Inner:
    size: Annotated[int, typer.Option("--size", "-s", help="How many.")] = 3


@dataclass(frozen=True)
class Outer:
    name: Annotated[str, typer.Option(help="Who.")]
    inner: Inner = Inner()
    quiet: Annotated[bool, typer.Option("--quiet", help="Say nothing.")] = False


def program(command):
    app = typer.Typer(rich_markup_mode=None)
    app.command()(takes_records(command))
    return app


def test_fields_of_records_are_options_in_their_order():
    seen = []

    def command(
        context: typer.Context, file: str, outer: Outer, last: Annotated[int, typer.Option()] = 7
    ) -> None:
        seen.append((context.params["size"], file, outer, last))

    app = program(command)
    assert CliRunner().invoke(app, ["a.txt", "--name", "x", "-s", "5", "--quiet"]).exit_code == 0
    assert CliRunner().invoke(app, ["b.txt", "--name", "y", "--last", "1"]).exit_code == 0
    assert seen == [(5, "a.txt", Outer("x", Inner(5), True), 7), (3, "b.txt", Outer("y", Inner(3), False), 1)]
    shown = CliRunner().invoke(app, ["--help"]).output
    places = [shown.index(text) for text in ("--name", "--size", "--quiet", "--last")]
    assert places == sorted(places)
    assert "default: 3" in shown
    # A field without a default is an option that must be given.
    assert CliRunner().invoke(app, ["c.txt"]).exit_code == 2
    assert len(seen) == 2


def test_two_fields_of_one_name_are_refused():
    def command(outer: Outer, size: int = 1) -> None: ...

    with pytest.raises(ValueError, match="size"):
        takes_records(command)
