"""Durations such as ``90s``, ``5m`` or ``1h30m``, and moments, as people read and write them."""

from __future__ import annotations

import re
import time
from typing import Final

from heterollm.base.errors import OptionError

UNITS: Final = {"h": 3600.0, "m": 60.0, "s": 1.0}
NUMBER: Final = r"(\d{1,6}(?:\.\d{1,6})?)"
DURATION: Final = re.compile(rf"(?:{NUMBER}h)?(?:{NUMBER}m)?(?:{NUMBER}s)?", re.ASCII)
LONGEST_S: Final = 7 * 24 * 3600.0


def parse_duration(text: str, option: str) -> float | None:
    """Return seconds; None for ``none``.

    Args:
        text: A duration such as ``90s``, ``5m``, ``1h30m`` or ``2.5m``, or ``none``.
        option: Name of the option in errors.

    Raises:
        OptionError: The text is no duration, or one of zero or more than a week.
    """
    plain = text.strip().lower()
    if plain == "none":
        return None
    match = DURATION.fullmatch(plain)
    parts = match.groups() if match else ()
    seconds = sum(float(part) * unit for part, unit in zip(parts, UNITS.values(), strict=False) if part)
    if not 0 < seconds <= LONGEST_S:
        raise OptionError(f"{option} is {text!r:.80}.", fix="Give a time such as 90s or 5m, or `none`.")
    return seconds


def format_duration(seconds: float) -> str:
    """Return a readable duration: ``45 s``, ``3 min 20 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s" if whole % 60 else f"{whole // 60} min"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def format_moment(seconds: float) -> str:
    """Return a moment in local time, from seconds since 1970."""
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (OverflowError, ValueError, OSError):  # an edited file may name the year 10 million
        return "at no date"
