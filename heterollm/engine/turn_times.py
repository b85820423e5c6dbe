"""Times of turns: when a prompt lets another go on, and when answers need their next tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from heterollm.engine.pass_times import NEWEST

TURN_S: Final = 0.05
"""Time that a prompt may take before another prompt of its tier has a turn."""

USUAL_GAPS: Final = 4.0
"""Usual times between two tokens for which prompts of its tier may keep an answer waiting by default."""

LEAST_PROMPT_S: Final = 0.01
"""Time that prompts have between two passes at least: a pause copies what later layers read."""


class TurnTimes:
    """The end of a prompt's turn, and the time at which the answers of its tier are due.

    Args:
        clock: Returns the seconds of the device.
        gaps: Usual times between two tokens for which prompts may keep an answer waiting, at least 1.
    """

    def __init__(self, clock: Callable[[], float], gaps: float) -> None:
        self._clock, self._gaps = clock, gaps
        self._ends_s = self._due_s = self._gap_s = 0.0

    def begin(self) -> None:
        """Begin the turn of a prompt."""
        self._ends_s = self._clock() + TURN_S

    @property
    def has_ended(self) -> bool:
        """Whether another prompt of the tier has its turn."""
        return self._clock() >= self._ends_s

    def learn(self, took_s: float) -> None:
        """Take the time in which each answer got a token."""
        self._gap_s += (took_s - self._gap_s) * (NEWEST if self._gap_s else 1.0)

    def wait(self) -> None:
        """Let prompts run until the answers, each of which has a new token, are due."""
        self._due_s = self._clock() + max(LEAST_PROMPT_S, (self._gaps - 1) * self._gap_s)

    def is_due(self, at_s: float | None = None) -> bool:
        """Return whether the answers are due, now or at another time."""
        return (self._clock() if at_s is None else at_s) >= self._due_s
