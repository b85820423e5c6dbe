"""Matches names of modules with an adapter's patterns, which may be written to match for ever."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from heterollm.base import MIB, LimitedChild

PLAIN: Final = re.compile(r"(?:\(\.\*\\\.\)\?\()?[\w.\\-]{1,200}\)?")
"""Names with escapes, or with dots for any character: a match takes time in proportion to a name."""

MATCHER: Final = LimitedChild(f"{__name__}:match", cpu_s=5, memory_bytes=256 * MIB)
"""The child of this process; published adapters' patterns take microseconds in it."""


def full_match(pattern: str, module: str) -> bool:
    """Return whether a regular expression of Python's syntax matches a whole name.

    Raises:
        re.error: It is no regular expression.
        LimitError: The match takes too long, or too much memory.
    """
    request = {"pattern": pattern, "module": module}
    found = match(request) if PLAIN.fullmatch(pattern) else MATCHER.ask(request)
    if found is None:
        raise re.error("not legal", pattern)
    matched: bool = found
    return matched


def match(request: Mapping[str, str]) -> bool | None:
    """Return whether a pattern matches a whole name; None if it is not legal."""
    try:
        return re.fullmatch(request["pattern"], request["module"]) is not None
    except (re.error, OverflowError, RecursionError):
        return None
