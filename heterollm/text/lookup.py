"""Guesses from the prompt and the answer: the tokens that followed the same tokens before."""

from __future__ import annotations

from typing import Final

from heterollm.text.sampling import TokenIds
from heterollm.text.speculation import GuessPace

LEAST_MATCH: Final = 2
"""Shortest sequence of tokens to look for."""

LONGEST_MATCH: Final = 16
"""Length from which a match is as good as any."""

MOST_CANDIDATES: Final = 32
"""Earlier places that are compared, the latest first."""

LOOKUP_PRIORS: Final = tuple(length / (length + 2) for length in range(LEAST_MATCH, 9))
"""Expected acceptance of guesses behind matches of 2 to 7 tokens, and of more: the kinds of guesses."""


class LookupProposer:
    """Guesses that what followed the longest earlier match of the last tokens follows again.

    An index of pairs of tokens grows with the history: two numbers and an entry of a dictionary for each
    token, so that its size is bounded by the context.

    Args:
        pace: Chooses numbers of guesses.
    """

    was_behind = runs_passes = False

    def __init__(self, pace: GuessPace) -> None:
        self.pace = pace
        self._tokens: list[int] = []
        self._latest: dict[int, int] = {}
        self._before = [0] * LEAST_MATCH
        """For each place, the place before it that follows the same pair of tokens; 0 for none."""
        self._kind, self._place = 0, 0

    def kind(self, history: TokenIds, end: int, /) -> int | None:
        """Look for a match; see :class:`heterollm.text.speculation.Proposer`."""
        if end != len(self._tokens):
            self._extend(history, end)
            length, self._place = self._longest_match(end)
            self._kind = min(length, LEAST_MATCH + len(LOOKUP_PRIORS) - 1) - LEAST_MATCH
        return self._kind if self._place else None

    def propose(self, history: TokenIds, end: int, count: int, /) -> int:
        """Write guesses behind the history; see :class:`heterollm.text.speculation.Proposer`."""
        # A match that reaches the end repeats with its period.
        period = end - self._place
        for index in range(count):
            history[end + index] = self._tokens[self._place + index % period]
        return count

    def drawn_from(self, _index: int, /) -> None:
        """Return None: the guesses are not drawn."""

    def learn(self, tried: int, right: int, /) -> None:
        """Take the guesses that were compared and that were right."""
        self.pace.learn(self._kind, tried, right)

    def _extend(self, history: TokenIds, end: int) -> None:
        """Take the new tokens, and index all places but the end."""
        tokens, latest, before = self._tokens, self._latest, self._before
        tokens += history[len(tokens) : end].tolist()
        for place in range(len(before), end):
            pair = _pair(tokens, place)
            before.append(latest.get(pair, 0))
            latest[pair] = place

    def _longest_match(self, end: int) -> tuple[int, int]:
        """Return the length and the end of the longest earlier match, the latest of several; 0 for none."""
        tokens = self._tokens
        if end < LEAST_MATCH:
            return 0, 0
        place = self._latest.get(_pair(tokens, end), 0)
        best = best_place = 0
        for _ in range(MOST_CANDIDATES):
            if not place or best == LONGEST_MATCH:
                break
            length, most = LEAST_MATCH, min(place, LONGEST_MATCH)
            while length < most and tokens[place - length - 1] == tokens[end - length - 1]:
                length += 1
            if length > best:
                best, best_place = length, place
            place = self._before[place]
        return best, best_place


def _pair(tokens: list[int], place: int) -> int:
    """Return the two tokens before a place as one number."""
    return (tokens[place - 2] << 32) | tokens[place - 1]
