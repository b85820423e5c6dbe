"""Panels of the help, its short form and ``--help-all``."""

import re

import pytest
import typer

from heterollm.cli.command_line import app, main
from heterollm.cli.panels import HELP, PANELS, SHORT

COMMANDS = typer.main.get_command(app).commands
MOST_OPTIONS = 15


def own_options(command):
    """Return the options of a command that a help shows, by parameter, without its help."""
    options = [param for param in command.params if param.param_type_name == "option"]
    return {option.name: option for option in options if not option.hidden}


def shown(capsys, *words):
    """Return the options of each panel of a help."""
    assert main(words) == 0
    panels, name = {}, ""
    for line in capsys.readouterr().out.splitlines():
        if heading := re.fullmatch(r"(\S+):", line):
            name = heading[1]
        elif line.startswith("  -"):
            panels.setdefault(name, []).append(max(re.findall(r"-+[\w-]+", line.split("  ")[1]), key=len))
    return panels


@pytest.mark.parametrize("name", SHORT)
def test_the_short_help_has_few_options_and_the_long_one_has_all(name, capsys):
    own = own_options(COMMANDS[name])
    long_names = {param: max(option.opts, key=len) for param, option in own.items()}
    for option in HELP:
        short = shown(capsys, name, option)
        words = [word for panel in short.values() for word in panel]
        assert len(words) <= MOST_OPTIONS
        assert set(words) == {*(long_names[param] for param in SHORT[name].split()), "--help", "--help-all"}
    everything = shown(capsys, name, "--help-all")
    words = [word for panel in everything.values() for word in panel]
    assert sorted(words) == sorted([*long_names.values(), "--help", "--help-all"])
    assert set(everything) <= {*PANELS, "Options"}
    assert all(set(short[panel]) <= set(everything[panel]) for panel in short)


def test_tables_name_options_that_commands_have():
    of_commands = {param for name in SHORT for param in own_options(COMMANDS[name])}
    of_panels = [param for names in PANELS.values() for param in names.split()]
    assert len(set(of_panels)) == len(of_panels)
    assert set(of_panels) <= of_commands


def test_other_commands_have_one_help(capsys):
    assert list(shown(capsys, "doctor", "--help")) == ["Options"]
    assert main(["doctor", "--help-all"]) == 2
