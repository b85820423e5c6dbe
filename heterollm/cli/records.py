"""Commands whose options are the fields of small frozen records.

Typer reads the options of a command from its signature. A command under :func:`takes_records` names records
instead, and shares them with other commands; typer sees their fields, in their order::

    @dataclass(frozen=True, slots=True)
    class ThreadOptions:
        gpu_threads: Annotated[int | None, typer.Option(help="Threads of the GPU.")] = None
        npu_threads: Annotated[int | None, typer.Option(help="Threads of the NPU.")] = None


    @commands.command()
    @takes_records
    def doctor(threads: ThreadOptions, as_json: JsonOption = False) -> None: ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import get_type_hints


def takes_records(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command that takes the fields of its records one by one, as typer calls it.

    A record may hold records. Names of fields are unique within a command.

    Args:
        command: A function whose parameters are options, arguments, or records of such.

    Raises:
        ValueError: Two fields have one name.
    """
    hints = get_type_hints(command, include_extras=True)
    expanded: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        expanded += _options(name, hints[name], parameter.default)

    @functools.wraps(command)
    def called(**values: object) -> None:
        command(**{name: _value(name, hints[name], values) for name in hints if name != "return"})

    called.__signature__ = inspect.Signature(expanded)  # type: ignore[attr-defined]
    return called


def _options(name: str, hint: object, default: object) -> Iterator[inspect.Parameter]:
    """Yield the parameters behind one parameter or field."""
    if not (isinstance(hint, type) and is_dataclass(hint)):
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
        return
    hints = get_type_hints(hint, include_extras=True)
    for field in fields(hint):
        own = inspect.Parameter.empty if field.default is MISSING else field.default
        yield from _options(field.name, hints[field.name], own)


def _value(name: str, hint: object, values: Mapping[str, object]) -> object:
    """Return the value of a parameter or field; for a record, the record of its fields' values."""
    if not (isinstance(hint, type) and is_dataclass(hint)):
        return values[name]
    hints = get_type_hints(hint, include_extras=True)
    return hint(**{field.name: _value(field.name, hints[field.name], values) for field in fields(hint)})
