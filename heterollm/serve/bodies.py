"""Bodies of requests: JSON objects of bounded size, decoded into the records of a door."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import msgspec

from heterollm.base import decode, decode_json, parse_json
from heterollm.serve.errors import RequestError
from heterollm.serve.options import MOST_CHOICES
from heterollm.serve.reading import check_values

T = TypeVar("T", bound=msgspec.Struct)

LONG_BODY: Final = 1 << 16
"""Bytes from which the values of a body are counted before they are decoded."""

MOST_VALUES: Final = 1 << 16
"""Values of a body, beside the token ids of as many full contexts as there may be prompts."""


class BodyPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a body; other fields than its own are refused."""


def decoded(
    content: bytes,
    kind: type[T],
    context: int,
    settle: Callable[[dict[str, Any], Sequence[str]], None] | None = None,
) -> T:
    """Return the body of a request.

    Args:
        content: The bytes.
        kind: Type of the record.
        context: Tokens of the context, which bound the number of values.
        settle: Changes the object before its fields are checked; takes the names of the fields, too.

    Raises:
        RequestError: It is no JSON object, or a field is unknown or has a wrong value; with the field.
    """
    if len(content) > LONG_BODY:
        check_values(content, MOST_VALUES + MOST_CHOICES * context)
    data = decode_json(content, source="The body", error=RequestError)
    if not isinstance(data, dict):
        raise RequestError("The body is no JSON object.")
    if settle is not None:
        settle(data, kind.__struct_fields__)
    try:
        return decode(data, kind, source="The request is not valid", error=RequestError)
    except RequestError as error:
        error.param = _field(error.message)
        raise


def object_of(text: str) -> dict[str, Any] | None:
    """Return the JSON object that a call's arguments are, empty for no text; None if they are none."""
    try:
        value = parse_json(text or "{}")
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def check_model(given: str, name: str) -> None:
    """Refuse a request for another model.

    Raises:
        RequestError: The model has another name.
    """
    if given != name:
        raise RequestError(
            f"There is no model {given!r:.100} here.",
            fix=f"This server has {name!r}.",
            status=404,
            param="model",
            code="model_not_found",
        )


def _field(message: str) -> str | None:
    """Return the path of the field that a message of :func:`decode` names."""
    found = re.search(r"valid: (\w[\w\[\].]*): |field `(\w+)`", message)
    return None if found is None else found[1] or found[2]
