"""Times of decode passes by their rows, which tell whether sharing one pays, and how many guesses do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

NEWEST: Final = 0.25
"""Weight of the latest pass in the usual time."""

TRY_AFTER: Final = 128
"""Passes after which a time no longer counts against passes of so many rows, so that one is tried again."""


class PassTimes:
    """Usual times of decode passes by the number of their rows.

    A pass of several rows has more launches than one, and may take longer than the rows one after the other
    where the model is tiny or the driver slow.
    """

    def __init__(self) -> None:
        self._usual_s: dict[int, float] = {}
        self._latest: dict[int, int] = {}
        self._passes = 0

    def learn(self, rows: int, seconds: float | None) -> None:
        """Take a pass and its time; None if the time is not usual."""
        self._passes += 1
        if seconds is None:
            return
        usual_s = self._usual_s[rows] if self.is_new(rows) else seconds
        self._usual_s[rows] = usual_s + NEWEST * (seconds - usual_s)
        self._latest[rows] = self._passes

    def usual_s(self, rows: int) -> float | None:
        """Return the usual time of a pass of some rows, or of the most like it; None before the first."""
        if not self._usual_s:
            return None
        return self._usual_s[min(self._usual_s, key=lambda known: abs(known - rows))]

    def expected_s(self, rows: int, like: Callable[[int], float]) -> float:
        """Return the expected time of a pass of some rows, if any pass ran lately.

        Args:
            rows: The rows.
            like: Times by rows; their factors to the usual times are interpolated between passes that ran.
        """
        known = sorted(filter(self.is_new, self._usual_s))
        return float(np.interp(rows, known, [self._usual_s[own] / like(own) for own in known])) * like(rows)

    def pays(self, rows: int) -> bool:
        """Return whether a pass of some rows takes no longer than one for each, as far as is known."""
        alone_s = self._usual_s.get(1)
        return alone_s is None or not self.is_new(rows) or self._usual_s[rows] <= rows * alone_s

    def is_new(self, rows: int) -> bool:
        """Return whether a pass of so many rows ran lately."""
        return rows in self._latest and self._passes - self._latest[rows] <= TRY_AFTER
