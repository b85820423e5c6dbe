"""Refuses unknown keyword arguments and suggests the nearest known one."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from heterollm.base.errors import OptionError


def check_keywords(given: Collection[str], known: Collection[str]) -> None:
    """Refuse the names of a call's arguments that the function does not take.

    Raises:
        OptionError: A name is not known; the message has the nearest known one.
    """
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, cutoff=0.5)
            fix = f"Did you mean {near[0]}?" if near else f"Choose among {', '.join(sorted(known))}."
            raise OptionError(f"There is no option {name!r:.80}.", fix=fix)
