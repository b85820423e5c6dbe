"""Times of decode passes by their rows, which tell whether answers should share one."""

from __future__ import annotations

from typing import Final

NEWEST: Final = 0.25
"""Weight of the latest pass in the usual time."""

TRY_AFTER: Final = 64
"""Passes that did not pay and were not run, after which one is tried again."""


class PassTimes:
    """Usual times of decode passes by the number of their rows.

    A pass of several rows has more launches than one, and may take longer than the rows one after the other
    where the model is tiny or the driver slow.
    """

    def __init__(self) -> None:
        self._usual_s: dict[int, float] = {}
        self._skipped: dict[int, int] = {}

    def learn(self, rows: int, seconds: float) -> None:
        """Take the time of a pass."""
        usual_s = self._usual_s.setdefault(rows, seconds)
        self._usual_s[rows] = usual_s + NEWEST * (seconds - usual_s)

    def usual_s(self, rows: int) -> float | None:
        """Return the usual time of a pass of some rows, or of the most like it; None before the first."""
        if not self._usual_s:
            return None
        return self._usual_s[min(self._usual_s, key=lambda known: abs(known - rows))]

    def pays(self, rows: int) -> bool:
        """Return whether a pass of some rows takes no longer than one for each, as far as is known.

        Each refusal counts towards the next trial.
        """
        alone_s, shared_s = self._usual_s.get(1), self._usual_s.get(rows)
        if alone_s is None or shared_s is None or shared_s <= rows * alone_s:
            return True
        self._skipped[rows] = self._skipped.get(rows, 0) + 1
        if self._skipped[rows] < TRY_AFTER:
            return False
        del self._skipped[rows], self._usual_s[rows]
        return True
