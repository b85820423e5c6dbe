"""The guesses that answers check in a decode pass which they share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from heterollm.engine.pass_times import PassTimes
from heterollm.text import CHOSEN_GUESSES, GuessOffer


def choose_guesses(offers: Sequence[GuessOffer | None], rows: int, times: PassTimes) -> list[int]:
    """Return the number of guesses of each answer in a pass that they share.

    Args:
        offers: The guesses that each answer has, if any; the paces of all know the same passes.
        rows: Most rows of the pass, at least one for each answer.
        times: Times of such passes.
    """
    pace = next((offer.pace for offer in offers if offer is not None), None)
    # The time without guesses, to compare with, must not be old.
    if pace is None or (pace.fixed is None and not times.is_new(len(offers))):
        return [0] * len(offers)

    def pass_s(count: int) -> float:
        guesses = count - len(offers)
        if pace.fixed is not None:
            return 1.0  # as many guesses as there is room for
        if guesses and count - 1 not in CHOSEN_GUESSES:
            return math.inf  # to compile and time few lengths
        return times.expected_s(count, pace.pass_s) + guesses * pace.guess_s

    chances = [0.0 if offer is None else offer.chance for offer in offers]
    most = [0 if offer is None else offer.most for offer in offers]
    return share_guesses(chances, most, rows, pass_s)


def share_guesses(
    chances: Sequence[float], most: Sequence[int], rows: int, pass_s: Callable[[int], float]
) -> list[int]:
    """Return the numbers of guesses with the most expected tokens a second.

    Each answer has a row for its latest token. Of any number of further rows the likeliest guesses give the
    most tokens, and a guess is never likelier than the one before it, so that one greedy order holds the best
    choice of every number.

    Args:
        chances: For each answer, the probability that a guess is right if those before it are.
        most: For each answer, the largest number of guesses.
        rows: Most rows of the pass, at least one for each answer.
        pass_s: Returns the expected time of a pass of some rows, more than 0.
    """
    counts, reached = [0] * len(chances), list(chances)
    best, tokens = counts.copy(), float(len(chances))
    best_rate = tokens / pass_s(len(chances))
    for number in range(len(chances) + 1, rows + 1):
        left = [answer for answer, count in enumerate(counts) if count < most[answer]]
        if not left:
            break
        likeliest = max(left, key=reached.__getitem__)
        tokens += reached[likeliest]
        reached[likeliest] *= chances[likeliest]
        counts[likeliest] += 1
        if (rate := tokens / pass_s(number)) > best_rate:
            best, best_rate = counts.copy(), rate
    return best
