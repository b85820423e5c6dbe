"""Typed records of files: decodes plain JSON data into frozen records."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from heterollm.base.errors import HeteroLLMError, OptionError
from heterollm.base.strict_json import parse_json

__all__ = ["Amount", "Count", "Number", "Positive", "decode", "decode_json", "missing_field"]

T = TypeVar("T")

LONGEST_PROBLEM: Final = 300
LARGEST: Final = sys.float_info.max
MOST: Final = 2**53 - 1
"""Largest integer that every JSON reader represents exactly."""

Count = Annotated[int, Meta(ge=0, le=MOST)]
Positive = Annotated[int, Meta(ge=1, le=MOST)]
Amount = Annotated[float, Meta(ge=0, le=LARGEST)]
"""A finite number of at least 0."""

Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
"""A finite number."""


def decode_json(text: str | bytes, *, source: str, error: type[HeteroLLMError], fix: str = "") -> Any:  # noqa: ANN401 - any JSON value
    """Return the value of a JSON text in which no object repeats a field.

    Args:
        text: The text.
        source: Name of the file in messages.
        error: Type of the error to raise.
        fix: The error's next step.

    Raises:
        HeteroLLMError: Of type ``error``: the text is not JSON, or repeats a field.
    """
    try:
        return parse_json(text)
    except ValueError as problem:
        raise error(f"{source} is not JSON: {problem}.", fix=fix) from problem


def decode(data: object, kind: type[T], *, source: str, error: type[HeteroLLMError], fix: str = "") -> T:
    """Return plain data as a record.

    Args:
        data: The value that :func:`parse_json` returned.
        kind: Type of the record.
        source: Beginning of the message, such as ``plan.json is not a plan``.
        error: Type of the error to raise.
        fix: The error's next step.

    Raises:
        HeteroLLMError: Of type ``error``: a field is missing, unknown, of the wrong type or out of range;
            the message has the path of the field.
    """
    try:
        return msgspec.convert(data, kind, str_keys=True)
    except (msgspec.ValidationError, OptionError) as problem:
        raise error(f"{source}: {_problem(str(problem))}.", fix=fix) from problem


def missing_field(data: Mapping[str, object], kind: type[msgspec.Struct]) -> str | None:
    """Return the first field of a record that a file omits, whether or not it has a default."""
    return next((name for name in kind.__struct_fields__ if name not in data), None)


def _problem(text: str) -> str:
    """Return the text of a validation error, path first, short and printable."""
    what, _, where = text.rpartition(" - at `")
    if what:
        where = where.removesuffix("`").replace("key` in `$", "$")
        text = f"{where.removeprefix('$').removeprefix('.')}: {what}"
    text = f"{text:.{LONGEST_PROBLEM}}"
    return (text if text.isprintable() else ascii(text)[1:-1]).removesuffix(".")
