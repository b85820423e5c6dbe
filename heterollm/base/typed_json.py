"""Typed records of files: decodes plain JSON data into frozen records."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta, inspect

from heterollm.base.errors import HeteroLLMError, OptionError
from heterollm.base.strict_json import parse_json

T = TypeVar("T")

LONGEST_PROBLEM: Final = 300
LARGEST: Final = sys.float_info.max
MOST: Final = 2**53 - 1
"""Largest integer that every JSON reader represents exactly."""

Count = Annotated[int, Meta(ge=0, le=MOST)]
Positive = Annotated[int, Meta(ge=1, le=MOST)]
Amount = Annotated[float, Meta(ge=0, le=LARGEST)]
"""A finite number of at least 0."""

Factor = Annotated[float, Meta(ge=1, le=LARGEST)]
"""A finite number of at least 1."""

Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
"""A finite number."""

PositiveNumber = Annotated[float, Meta(gt=0, le=LARGEST)]
"""A finite number above 0."""


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
        raise error(f"{source}: {_problem(str(problem), kind)}.", fix=fix) from problem


def missing_field(data: Mapping[str, object], kind: type[msgspec.Struct]) -> str | None:
    """Return the first field of a record that a file omits, whether or not it has a default."""
    return next((name for name in kind.__struct_fields__ if name not in data), None)


def _problem(text: str, kind: Any) -> str:  # noqa: ANN401 - a type or an annotation
    """Return the words of a validation error, short and printable: path, problem and legal choices."""
    what, _, where = text.rpartition(" - at `")
    where = where.removesuffix("`").replace("key` in `$", "$") if what else ""
    what = what or text
    if choices := _choices(what, where, kind):
        what = f"{what}; choose {', '.join(map(str, choices))}"
    path = where.removeprefix("$").removeprefix(".")
    text = f"{path}: {what}" if path else what
    text = f"{text:.{LONGEST_PROBLEM}}"
    return (text if text.isprintable() else ascii(text)[1:-1]).removesuffix(".")


def _choices(what: str, where: str, kind: Any) -> list[Any]:  # noqa: ANN401 - a type or an annotation
    """Return what may stand in place of a wrong choice or of an unknown field."""
    if what.startswith("Invalid enum value"):
        types = _types_at(kind, where)
        return [value for one in types if isinstance(one, inspect.LiteralType) for value in one.values]
    if what.startswith("Object contains unknown field"):
        records = [one for one in _types_at(kind, where) if isinstance(one, inspect.StructType)]
        return [field.encode_name for one in records for field in one.fields] if len(records) == 1 else []
    return []


def _types_at(kind: Any, where: str) -> list[inspect.Type]:  # noqa: ANN401 - a type or an annotation
    """Return the types that a value at a path may have."""
    found = _alternatives(inspect.type_info(kind))
    for name in re.findall(r"\.(\w+)|\[", where):  # an empty name for an item
        found = [inner for one in found for part in _parts(one, name) for inner in _alternatives(part)]
    return found


def _alternatives(info: inspect.Type) -> list[inspect.Type]:
    if isinstance(info, inspect.Metadata):
        return _alternatives(info.type)
    if isinstance(info, inspect.UnionType):
        return [inner for one in info.types for inner in _alternatives(one)]
    return [info]


def _parts(info: inspect.Type, name: str) -> list[inspect.Type]:
    """Return the types of the field of this name; without a name, of items."""
    if isinstance(info, inspect.StructType):
        return [field.type for field in info.fields if field.encode_name == name]
    if isinstance(info, inspect.ListType | inspect.VarTupleType):
        return [info.item_type]
    if isinstance(info, inspect.DictType):
        return [info.value_type]
    return list(info.item_types) if isinstance(info, inspect.TupleType) else []
