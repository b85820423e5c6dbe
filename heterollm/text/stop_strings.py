"""Stop strings: texts that end an answer and are not part of it."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Finds non-empty stop strings in text that arrives in pieces.

    The stop string that completes first ends the text, and the longest of those that complete at the same
    character. The division into pieces does not matter.

    Args:
        stops: The stop strings.
    """

    __slots__ = ("_held", "_hidden", "_longest", "_stops")

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        # Whether each character of it is of a special token, which has no text.
        self._hidden: list[bool] = []

    def push(self, piece: str, *, hidden: bool = False) -> tuple[str, bool]:
        """Return the text that cannot belong to a stop string, and whether one is complete.

        Args:
            piece: The next piece of the text.
            hidden: Whether it is the spelling of a special token, which is never returned.
        """
        text = self._held + piece
        self._hidden += [hidden] * len(piece)
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            shown = self._shown(text, min(found)[1])
            self._held, self._hidden = "", []
            return shown, True
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return self._shown(text, len(text) - length), False
        return self._shown(text, len(text)), False

    def finish(self) -> str:
        """Return the text that was held back."""
        return self._shown(self._held, len(self._held))

    def _shown(self, text: str, count: int) -> str:
        """Return the visible ones of the first characters, and hold the others back."""
        shown = "".join(text[i] for i in range(count) if not self._hidden[i])
        self._held = text[count:]
        del self._hidden[:count]
        return shown
