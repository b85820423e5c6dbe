"""Arguments that are not JSON, such as Python's literals and texts in tags: written, and read again."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from heterollm.tools.forms import ToolForm, ValueForm
from heterollm.tools.schemas import Schema, allows_null, is_text, resolved

NUMBER: Final = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
BARE: Final = re.compile(r"[\w.-]+")
QUOTED: Final = re.compile(r"'((?:[^'\\]|\\.)*)'", re.DOTALL)
ESCAPED: Final = re.compile(r"\\(.)", re.DOTALL)
ESCAPES: Final = {"n": "\n", "r": "\r", "t": "\t"}
STRING: Final = json.JSONDecoder(strict=False)


class CutError(ValueError):
    """A text that ends, or differs from its form, at a place."""


def dumps(value: object) -> str:
    """Return JSON as models and templates write it."""
    return json.dumps(value, ensure_ascii=False)


def write_value(value: object, values: ValueForm) -> str:
    """Return a value in the form of a family."""
    if isinstance(value, str):
        return _quoted(value, values)
    if isinstance(value, Mapping):
        members = (
            f"{key if values.bare_keys else _quoted(str(key), values)}:"
            f"{'' if values.bare_keys else ' '}{write_value(one, values)}"
            for key, one in value.items()
        )
        return "{" + _joined(values).join(members) + "}"
    if isinstance(value, list):
        return "[" + _joined(values).join(write_value(one, values) for one in value) + "]"
    if value is None or isinstance(value, bool):
        return values.words[2 if value is None else 1 - value]
    return dumps(value)


def _joined(values: ValueForm) -> str:
    return "," if values.bare_keys else ", "


def _quoted(text: str, values: ValueForm) -> str:
    if values.quote != "'":
        return f"{values.quote}{text}{values.quote}"
    for name, character in (("\\", "\\"), ("'", "'"), *ESCAPES.items()):
        text = text.replace(character, f"\\{name}")
    return f"'{text}'"


def write_arguments(arguments: Mapping[str, Any], form: ToolForm) -> str:
    """Return a call's arguments in the form of a family."""
    if not form.member:
        return dumps(arguments)
    before, between, after = member_parts(form)
    made = []
    for key, value in arguments.items():
        text = write_value(value, form.values) if form.values.quote else _tagged(value)
        made.append(f"{before}{key}{between}{text}{after}")
    return form.joint.join(made)


def _tagged(value: object) -> str:
    return value if isinstance(value, str) else dumps(value)


def member_parts(form: ToolForm) -> tuple[str, str, str]:
    """Return the texts before an argument's key, between key and value, and behind the value."""
    before, _, rest = form.member.partition("{key}")
    between, _, after = rest.partition("{value}")
    return before, between, after


def read_arguments(text: str, place: int, form: ToolForm, parameters: Schema) -> tuple[dict[str, Any], int]:
    """Return arguments that begin at a place of a text, and the place behind them.

    Args:
        text: A call.
        place: The beginning of the arguments.
        form: Its form, which has members.
        parameters: The tool's schema, whose types tell texts from other values in tags.

    Raises:
        CutError: The text ends before.
    """
    before, between, after = member_parts(form)
    known: Mapping[str, Any] = resolved(parameters, parameters).get("properties", {})
    keys = sorted(known, key=len, reverse=True)
    found: dict[str, Any] = {}
    while True:
        begin = place + len(form.joint) if found and text.startswith(form.joint, place) else place
        fitting = (key for key in keys if text.startswith(f"{before}{key}{between}", begin))
        if (key := next(fitting, None)) is None or key in found:
            return found, place
        place = begin + len(before) + len(key) + len(between)
        if form.values.quote:
            found[key], place = read_value(text, place, form.values)
            continue
        end = text.find(after, place)
        if end < 0:
            raise CutError
        found[key] = _read_tagged(text[place:end], known[key], parameters)
        place = end + len(after)


def _read_tagged(text: str, schema: Any, root: Schema) -> Any:  # noqa: ANN401 - JSON
    if not is_text(schema, root):
        return json.loads(text)
    return None if text == "null" and allows_null(schema, root) else text


def read_value(text: str, place: int, values: ValueForm) -> tuple[Any, int]:
    """Return a value that begins at a place of a text, and the place behind it; errors as above."""
    if values.quote != "'" and text.startswith(values.quote, place):
        begin = place + len(values.quote)
        end = text.find(values.quote, begin)
        if end < 0:
            raise CutError
        return text[begin:end], end + len(values.quote)
    if found := QUOTED.match(text, place):
        return ESCAPED.sub(lambda one: ESCAPES.get(one[1], one[1]), found[1]), found.end()
    if text.startswith('"', place):
        try:
            return STRING.raw_decode(text, place)
        except json.JSONDecodeError as error:
            raise CutError from error
    if text[place : place + 1] in ("[", "{"):
        return _read_container(text, place, values)
    for word, value in zip((*values.words, "true", "false", "null"), (True, False, None) * 2, strict=True):
        if text.startswith(word, place):
            return value, place + len(word)
    if (number := NUMBER.match(text, place)) is None:
        raise CutError
    return json.loads(number[0]), number.end()


def _read_container(text: str, place: int, values: ValueForm) -> tuple[Any, int]:
    is_object, place = text[place] == "{", place + 1
    made: dict[str, Any] = {}
    items: list[Any] = []
    while True:
        place = _behind_space(text, place)
        if text[place : place + 1] in ("]", "}"):
            return made if is_object else items, place + 1
        if (made or items) and text[place : place + 1] == ",":
            place = _behind_space(text, place + 1)
        key = ""
        if is_object:
            key, place = _read_key(text, place, values)
            place = _behind_space(text, place)
            if text[place : place + 1] != ":":
                raise CutError
            place = _behind_space(text, place + 1)
        value, place = read_value(text, place, values)
        if is_object:
            made[key] = value
        else:
            items.append(value)


def _read_key(text: str, place: int, values: ValueForm) -> tuple[str, int]:
    if (bare := BARE.match(text, place)) is not None:
        return bare[0], bare.end()
    key, place = read_value(text, place, values)
    return str(key), place


def _behind_space(text: str, place: int) -> int:
    while text[place : place + 1].isspace():
        place += 1
    return place
