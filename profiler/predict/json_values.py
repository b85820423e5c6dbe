"""Values of a predictor's JSON form, each checked: a damaged file is refused and never half believed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any

from heterollm.base import ProfileError

__all__ = ["ascending", "count", "mapping", "number", "numbers", "positive", "sequence", "whole", "word"]


def mapping(value: object, names: Collection[str], what: str) -> dict[str, Any]:
    """Return an object that has just these fields.

    Raises:
        ProfileError: It is not one; likewise below.
    """
    if not isinstance(value, dict) or set(value) != set(names):
        raise ProfileError(f"{what} has the fields {', '.join(sorted(names))}, not {value!r:.160}.")
    return value


def sequence(value: object, what: str, length: int | None = None) -> list[Any]:
    """Return a list, of a given length where one is stated."""
    if not isinstance(value, list) or (length is not None and len(value) != length):
        wanted = "a list" if length is None else f"a list of {length}"
        raise ProfileError(f"{what} is {wanted}, not {value!r:.160}.")
    return value


def number(value: object, what: str) -> float:
    """Return a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < math.inf:
        raise ProfileError(f"{what} is a number, not {value!r:.80}.")
    try:
        return float(value)
    except OverflowError as error:
        raise ProfileError(f"{what} is a number, not {value!r:.80}.") from error


def positive(value: object, what: str, *, or_zero: bool = False) -> float:
    """Return a finite number above zero, or zero too where that is said."""
    found = number(value, what)
    if found < 0.0 or (found == 0.0 and not or_zero):
        raise ProfileError(f"{what} is above zero, not {value!r:.80}.")
    return found


def numbers(value: object, what: str, length: int | None = None, *, or_zero: bool = False) -> list[float]:
    """Return a list of numbers above zero, or zero too where that is said."""
    return [positive(item, what, or_zero=or_zero) for item in sequence(value, what, length)]


def ascending(values: Sequence[float], what: str) -> None:
    """Check that numbers rise, each above the one before."""
    if any(later <= earlier for earlier, later in itertools.pairwise(values)):
        raise ProfileError(f"{what} must rise, and is {values!r:.160}.")


def count(value: object, what: str, limit: int) -> int:
    """Return a whole number from -1 to below ``limit``."""
    if type(value) is not int or not -1 <= value < limit:
        raise ProfileError(f"{what} is a whole number from -1 to {limit - 1}, not {value!r:.80}.")
    return value


def word(value: object, what: str) -> str:
    """Return a text."""
    if not isinstance(value, str):
        raise ProfileError(f"{what} is a text, not {value!r:.80}.")
    return value


def whole(value: object, what: str) -> list[int]:
    """Return whole numbers above zero, at least one."""
    items = sequence(value, what)
    if not items or not all(type(item) is int and 0 < item < 2**53 for item in items):
        raise ProfileError(f"{what} are whole numbers above zero, not {value!r:.80}.")
    return items
