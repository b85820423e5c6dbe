"""Typed access to the JSON files of checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from heterollm.base import CheckpointError, parse_json, read_file

LARGEST_COUNT: Final = 2**31 - 1
LARGEST_NUMBER: Final = sys.float_info.max


class JsonFields:
    """Typed access to a JSON object; errors name the field, its value and the file."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self.values = values
        self.where = where

    def get(self, name: str) -> object:
        """Return the raw value; None if it is missing."""
        return self.values.get(name)

    def fail(self, name: str, expected: str) -> CheckpointError:
        """Return the error about a field."""
        value = self.get(name)
        said = "is missing" if value is None else f"is {value!r:.80}"
        return CheckpointError(f"{self.where}: {name} {said}; expected {expected}.")

    def count(
        self, name: str, default: int | None = None, *, minimum: int = 1, maximum: int = LARGEST_COUNT
    ) -> int:
        """Return a whole number from ``minimum`` to ``maximum``."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.fail(name, f"a whole number of at least {minimum}")
        if value > maximum:
            raise self.fail(name, f"at most {maximum}")
        return value

    def optional_positive(self, name: str) -> float | None:
        """Return a finite number above 0; None if it is missing."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST_NUMBER:
            raise self.fail(name, "a number above 0")
        return float(value)

    def positive(self, name: str, default: float | None = None) -> float:
        """Return a finite number above 0."""
        value = self.optional_positive(name)
        if value is None:
            value = default
        if value is None:
            raise self.fail(name, "a number above 0")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(name, "true or false")
        return value

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        """Return a list of ``length`` finite numbers above 0."""
        value = self.get(name)
        if (
            not isinstance(value, list)
            or len(value) != length
            or not all(type(item) in (int, float) and 0 < item <= LARGEST_NUMBER for item in value)
        ):
            raise self.fail(name, f"a list of {length} numbers above 0")
        return tuple(float(item) for item in value)

    def section(self, name: str) -> dict[str, Any]:
        """Return an object, empty if it is missing."""
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.fail(name, "an object")
        return value


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        CheckpointError: The file cannot be read, or holds something else.
    """
    try:
        content = parse_json(read_file(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"Cannot read {path}: {error}.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object.")
    return content
