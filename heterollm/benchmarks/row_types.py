"""Checks values that were read from a file against the types of a record's fields."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping
from typing import Any, Final, Union, get_args, get_origin

__all__ = ["fits", "neutral"]

LARGEST_INTEGER: Final = 2**63
"""Greater numbers are no count of anything here, and Python is slow with them."""


def fits(value: object, hint: Any) -> bool:  # noqa: ANN401 - a type, or a union of some
    """Whether a value of JSON has a type: ``str``, numbers, tuples and mappings of them, and unions.

    A whole number is a float too; numbers are finite. Below ``Any`` lies what has no further type: text, a
    number, nothing, or lists and tables of these.
    """
    if hint is Any:
        return _is_plain(value)
    if hint is type(None):
        return value is None
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in arguments)
    if origin is tuple:
        return isinstance(value, list | tuple) and all(fits(item, arguments[0]) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(
            isinstance(key, str) and fits(item, arguments[1]) for key, item in value.items()
        )
    if hint is float:
        return _is_number(value)
    if hint is int:
        return _is_number(value) and isinstance(value, int)
    return isinstance(value, hint)


def neutral(hint: Any) -> Any:  # noqa: ANN401 - of and by any type
    """Return what stands for nothing in a field of a type: None where that is allowed, else what is empty."""
    if fits(None, hint):
        return None
    if hint in (str, int, float, bool):
        return hint()
    return () if get_origin(hint) is tuple else {}


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) < LARGEST_INTEGER if isinstance(value, int) else math.isfinite(value)


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, str | bool) or _is_number(value)
