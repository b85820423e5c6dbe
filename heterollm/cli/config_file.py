"""The file of defaults: a table of options for each command, and one for all of them.

The file is ``heterollm.toml`` in the platform's folder of configurations, or the one that
``HETEROLLM_CONFIG`` names::

    [defaults]
    device = "host"

    [generate]
    max-new-tokens = 128
"""

from __future__ import annotations

import difflib
import json
import os
import stat
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, get_origin

import platformdirs

from heterollm.base import OptionError
from heterollm.cli.panels import HELP

CONFIG_VARIABLE: Final = "HETEROLLM_CONFIG"
"""Environment variable that names the file."""

EVERY: Final = "defaults"
"""The table whose options go to every command that has them and takes their value."""

MOST_DOTS: Final = 1000
LARGEST_BYTES: Final = 1 << 18
"""Far more than all options of all commands take."""


KINDS: Final[dict[Any, tuple[tuple[type, ...], str]]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "text"),
    Path: ((str,), "the name of a file"),
}
"""The TOML types of an option's values, and their name, by the option's type in Python."""


def config_path() -> Path:
    """Return the path of the file, which need not exist.

    Raises:
        OptionError: There is no home folder.
    """
    if named := os.environ.get(CONFIG_VARIABLE):
        return Path(named)
    try:
        return platformdirs.user_config_path("heterollm", appauthor=False) / "heterollm.toml"
    except RuntimeError as error:
        raise OptionError(
            f"The file of defaults has no place: {error}.", fix=f"Set {CONFIG_VARIABLE}."
        ) from error


def read_config(path: Path) -> dict[str, Any]:
    """Return the tables of a file; nothing if the file of the platform's folder does not exist.

    Raises:
        OptionError: The file cannot be read, is no regular file, is too large, or is not TOML.
    """
    try:
        text = _text(path)
        return tomllib.loads(text)
    except FileNotFoundError:
        if not os.environ.get(CONFIG_VARIABLE):
            return {}
        raise OptionError(
            f"{path} is missing, which {CONFIG_VARIABLE} names.",
            fix="Create the file or unset the variable.",
        ) from None
    except RecursionError:
        raise _wrong(path, "its values are nested too deeply") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _wrong(path, f"it cannot be read: {reason!s:.200}") from error


def _text(path: Path) -> str:
    """Return the text of a file of defaults.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no regular file, too large, or not UTF-8.
    """
    # A pipe would wait for a writer, and a device may have no end.
    if not stat.S_ISREG(path.stat().st_mode):
        raise ValueError("it is no regular file")
    with path.open("rb") as file:
        content = file.read(LARGEST_BYTES + 1)
    if len(content) > LARGEST_BYTES:
        raise ValueError(f"it has more than {LARGEST_BYTES} bytes")
    text = content.decode("utf-8")
    # tomllib's time grows with the square of the parts of a name.
    if any(line.count(".") > MOST_DOTS for line in text.splitlines()):
        raise ValueError(f"a line has more than {MOST_DOTS} dots")
    return text


def config_defaults(program: Any, path: Path) -> dict[str, Any]:  # noqa: ANN401 - a group of typer's own click
    """Return the defaults of a file by command and parameter, as click takes them.

    Args:
        program: The group of all commands.
        path: The file.

    Raises:
        OptionError: The file cannot be read, or has a table, option or value that no command takes.
    """
    tables = read_config(path)
    every = tables.pop(EVERY, {})
    for name, table in ((EVERY, every), *tables.items()):
        if not isinstance(table, dict):
            raise _wrong(
                path,
                f"{name:.80} is in no table",
                f"Put it below [{EVERY}] or the name of a command.",
            )
    found = _command_defaults(program, tables, path)
    for key, value in every.items():
        having = [(words, command) for words, command in _commands(program) if key in _options(command)]
        if not having:
            known = {name for _, command in _commands(program) for name in _options(command)}
            raise _wrong(path, f"[{EVERY}] {key:.80}: no command has this option", _close(key, known))
        refusals = []
        for words, command in having:
            try:
                taken = _value(command, key, value, f"[{EVERY}]", path)
            except OptionError as error:  # such as a level that one command takes and another does not
                refusals.append(error)
                continue
            place = found
            for word in words:
                place = place.setdefault(word, {})
            place.setdefault(_options(command)[key].name, taken)
        if len(refusals) == len(having):
            raise refusals[0]
    return found


def rows(tables: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield table, option and value of everything in a file."""
    for key, value in tables.items():
        if isinstance(value, dict):
            yield from rows(value, f"{above}.{key}" if above else key)
        else:
            yield above, key, json.dumps(value, ensure_ascii=False)


def _command_defaults(
    group: Any,  # noqa: ANN401 - a group of typer's own click
    tables: Mapping[str, Any],
    path: Path,
    above: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Return the defaults of the commands of a group and of those below."""
    found: dict[str, Any] = {}
    for name, table in tables.items():
        title = f"[{'.'.join((*above, name)):.80}]"
        command = group.commands.get(name)
        if command is None:
            raise _wrong(path, f"{title}: there is no such command", _close(name, (EVERY, *group.commands)))
        below = getattr(command, "commands", {})
        inner = {key: value for key, value in table.items() if key in below and isinstance(value, dict)}
        found[name] = _command_defaults(command, inner, path, (*above, name)) if inner else {}
        options = _options(command)
        for key, value in table.items():
            if key in inner:
                continue
            if key not in options:
                names = (*options, *below)
                raise _wrong(path, f"{title} {key:.80}: the command has no such option", _close(key, names))
            found[name][options[key].name] = _value(command, key, value, title, path)
    return found


def _commands(group: Any, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:  # noqa: ANN401
    """Yield the words and the command of everything below a group."""
    for name, command in group.commands.items():
        yield (*above, name), command
        if hasattr(command, "commands"):
            yield from _commands(command, (*above, name))


def _options(command: Any) -> dict[str, Any]:  # noqa: ANN401 - of typer's own click
    """Return the options of a command by the word after ``--``."""
    return {
        word.removeprefix("--"): param
        for param in command.params
        if param.param_type_name == "option" and param.name != "help"
        for word in param.opts
        if word.startswith("--")
    }


def _value(command: Any, key: str, value: object, title: str, path: Path) -> Any:  # noqa: ANN401
    """Return the value of an option as click takes it.

    Raises:
        OptionError: The option does not take it.
    """
    param = _options(command)[key]
    place = f"{title} {key} is {value!r:.80}"
    if param.multiple and not isinstance(value, list):
        raise _wrong(path, f"{place}, but must be an array")
    kind = param.type_descriptor.annotation
    if get_origin(kind) is Sequence and not param.multiple:  # several values with commas between them
        value = ",".join(map(str, value if isinstance(value, list) else [value]))
    types, name = KINDS.get(kind, ((type(value),), ""))
    if type(value) not in types:
        raise _wrong(path, f"{place}, but must be {name}")
    try:
        # A command makes its help option once, with the names of its first context.
        context = command.make_context(None, [], resilient_parsing=True, help_option_names=HELP)
        param.process_value(context, value)
    except Exception as error:
        # The base class of the errors of typer's own click is not exported.
        reason = str(getattr(error, "message", error)).replace("Value error, ", "").removesuffix(".")
        raise _wrong(path, f"{place}: {reason}") from error
    return value


def _close(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name[:80], list(names), 3)
    return f"Close to it: {', '.join(near)}." if near else ""


def _wrong(path: Path, problem: str, fix: str = "") -> OptionError:
    problem = "".join(one if one.isprintable() else repr(one)[1:-1] for one in problem)
    return OptionError(f"{path}: {problem:.400}.", fix=fix or "Change the file, or give --no-config.")
