"""Typed records of files: plain data, as a strict reader returned it, becomes frozen records or an error."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from heterollm.base.errors import HeteroLLMError, OptionError
from heterollm.base.strict_json import parse_json

__all__ = [
    "Amount",
    "Count",
    "Number",
    "Positive",
    "PositiveNumber",
    "decode",
    "decode_json",
    "missing_field",
]

T = TypeVar("T")

LONGEST_PROBLEM: Final = 300
LARGEST: Final = sys.float_info.max
MOST: Final = 2**53 - 1
"""Largest whole number that every reader of JSON keeps exactly."""

Count = Annotated[int, Meta(ge=0, le=MOST)]
Positive = Annotated[int, Meta(ge=1, le=MOST)]
Amount = Annotated[float, Meta(ge=0, le=LARGEST)]
"""A finite number of at least 0."""

Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
"""A finite number."""

PositiveNumber = Annotated[float, Meta(gt=0, le=LARGEST)]
"""A finite number above 0."""


def decode_json(text: str | bytes, *, source: str, error: type[HeteroLLMError], fix: str = "") -> Any:  # noqa: ANN401 - any JSON value
    """Return the value of a JSON text that names no field twice.

    Args:
        text: The text.
        source: What to call the file in messages.
        error: Kind of error to raise.
        fix: What to do about it.

    Raises:
        HeteroLLMError: Of the kind ``error``: the text is not JSON, or names a field twice.
    """
    try:
        return parse_json(text)
    except ValueError as problem:
        raise error(f"{source} is not JSON: {problem}.", fix=fix) from problem


def decode(data: object, kind: type[T], *, source: str, error: type[HeteroLLMError], fix: str = "") -> T:
    """Return plain data as a record.

    Args:
        data: What :func:`parse_json` returned.
        kind: Type of the record.
        source: What to call the data in messages, such as ``plan.json is not a plan``.
        error: Kind of error to raise.
        fix: What to do about it.

    Raises:
        HeteroLLMError: Of the kind ``error``: a field is missing, unknown, of the wrong type or out of range;
            the message has the path of the field.
    """
    try:
        return msgspec.convert(data, kind, str_keys=True)
    except (msgspec.ValidationError, OptionError) as problem:
        raise error(f"{source}: {_problem(str(problem))}.", fix=fix) from problem


def missing_field(data: Mapping[str, object], kind: type[msgspec.Struct]) -> str | None:
    """Return the first field of a record that its file does not state, though Python gives it a default."""
    return next((name for name in kind.__struct_fields__ if name not in data), None)


def _problem(text: str) -> str:
    """Return the words of a validation error, path first, short and printable."""
    what, _, where = text.rpartition(" - at `")
    if what:
        where = where.removesuffix("`").replace("key` in `$", "$")
        text = f"{where.removeprefix('$').removeprefix('.')}: {what}"
    text = f"{text:.{LONGEST_PROBLEM}}"
    return (text if text.isprintable() else ascii(text)[1:-1]).removesuffix(".")
