"""Speculative decoding: guesses of the next tokens, checked together in one pass.

Each token is sampled as ever. As long as it is the guess, the logits after it are there already; then the
session forgets the wrong guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from heterollm.text.sampling import TokenIds
from heterollm.text.sampling_options import SamplingOptions

MOST_GUESSES: Final = 15
"""Most guesses of a pass: plans have entries of their own for decode passes of up to 16 tokens."""

CHOSEN_GUESSES: Final = (1, 2, 3, 5, 7, 11, 15)
"""Numbers of guesses to choose from: each length of a pass is compiled for each range of positions, and its
time is learnt. Kernels compute tokens by fours, so that a choice among few lengths loses little."""

PRIOR_TRIES: Final = 2.0
"""Weight of the acceptance that is assumed before guesses were tried."""

FORGET_TRIED: Final = 0.95
FORGET_SKIPPED: Final = 0.98
"""Factors on earlier counts of a kind of guesses, when it was tried and when it did not pay: after a while it
is tried again."""

NEWEST: Final = 0.2
FIRST: Final = 0.5
"""Weight of the latest pass in the mean time of passes of its length, and of the first one against the other
lengths."""

OUTLIER: Final = 1.6
"""A pass that takes longer than expected by this factor was compiled, or another program ran: its time counts
only if the one before of its length took as long."""

LONGEST_GUESS: Final = 3.0
"""Largest factor on the expected time of a guess that counts."""

PLAIN_EVERY: Final = 32
"""Passes after which one has no guesses, so that the time to compare with is never old."""

GUESS_EVERY: Final = 64
LIKELY: Final = 0.5
"""Passes without guesses after which some are tried although they seem not to pay, as times may have changed;
only if more than this fraction of them is expected to be right. The number doubles until they pay."""


class Proposer(Protocol):
    """Guesses the next tokens of one answer."""

    @property
    def pace(self) -> GuessPace:
        """Learns the times of passes."""

    @property
    def was_behind(self) -> bool:
        """Whether the latest guesses took longer than usual, as the proposer had to read tokens first."""

    @property
    def runs_passes(self) -> bool:
        """Whether guesses take passes of another model."""

    def kind(self, history: TokenIds, end: int, /) -> int | None:
        """Return the kind of its guesses of the tokens after ``history[:end]``; None if it has none."""

    def propose(self, history: TokenIds, end: int, count: int, /) -> int:
        """Write guesses of the tokens after ``history[:end]`` behind them, whose kind was the latest.

        Args:
            history: Prompt and answer, with room for ``count`` tokens from ``end`` on.
            end: Number of tokens that are known.
            count: Number of guesses, 1 to :data:`MOST_GUESSES`.

        Returns:
            The number of guesses, which may be fewer.
        """

    def drawn_from(self, index: int, /) -> npt.NDArray[np.float64] | None:
        """Return the probabilities ``[vocab]`` that the guess was drawn from; None if it was not drawn."""

    def learn(self, tried: int, right: int, /) -> None:
        """Take the number of guesses of the latest proposal that were compared, and that were right.

        The call is left out where an answer ends before a guess is wrong.
        """


Speculator: TypeAlias = Callable[[Any, SamplingOptions], Proposer]
"""Makes the proposer of an answer, given its session and sampling."""


class GuessPace:
    """Chooses numbers of guesses for passes of one answer, by their times and the acceptance so far.

    Args:
        pass_s: Expected seconds of decode passes of 1, 2, … tokens; passes that run correct them.
        priors: Expected acceptance of each kind of guesses.
        guess_s: Expected seconds to make one guess.
        fixed: Number of guesses wherever there are as many; None to choose.
    """

    def __init__(
        self,
        pass_s: Sequence[float],
        priors: Sequence[float],
        *,
        guess_s: float = 0.0,
        fixed: int | None = None,
    ) -> None:
        self._expected_s = list(pass_s)
        self._ratios = [0.0] * len(self._expected_s)
        self._ratio = 1.0
        self._follows_plain = True
        self._was_slow = [False] * len(self._expected_s)
        self._tried = [PRIOR_TRIES] * len(priors)
        self._right = [PRIOR_TRIES * prior for prior in priors]
        self._priors = tuple(priors)
        self.guess_s = guess_s
        """Expected seconds to make one guess, corrected by those that were made."""
        self.fixed = fixed
        """Number of guesses wherever there are as many; None to choose."""
        # The first pass has none.
        self._since_plain, self._since_guess = PLAIN_EVERY, 0
        self._try_after = GUESS_EVERY

    def pass_s(self, tokens: int) -> float:
        """Return the expected seconds of a pass: by passes of its length, or else by the other ones."""
        place = min(tokens, len(self._expected_s)) - 1
        return self._expected_s[place] * (self._ratios[place] or self._ratio)

    @property
    def plain_pass_s(self) -> float | None:
        """The seconds of a pass of one token; None if none ran yet."""
        return self.pass_s(1) if self._ratios[0] else None

    def acceptance(self, kind: int) -> float:
        """Return the fraction of right guesses among those behind right ones."""
        return self._right[kind] / self._tried[kind]

    def most(self, most: int) -> int:
        """Return the largest number of guesses of those, as passes that no time is known of do not run."""
        known = len(self._expected_s) - 1
        return min(most, known if self.fixed is None else min(self.fixed, known))

    def guesses(self, kind: int, most: int) -> int:
        """Return the number of guesses with the most expected tokens a second in a pass of one answer.

        Args:
            kind: The kind of the guesses.
            most: Largest number.
        """
        most = self.most(most)
        if most <= 0:
            return 0
        if self.fixed is not None:
            return most
        if self._since_plain >= PLAIN_EVERY:
            return 0
        acceptance = self.acceptance(kind)
        best, best_rate, reach, tokens = 0, 0.0, 1.0, 1.0
        for count in range(1, most + 1):
            reach *= acceptance
            tokens += reach
            if count not in CHOSEN_GUESSES:
                continue
            rate = tokens / (self.pass_s(count + 1) + count * self.guess_s)
            if rate > best_rate:
                best, best_rate = count, rate
        if best_rate * self.pass_s(1) > 1.0:
            self._try_after = GUESS_EVERY
            return best
        if self._since_guess >= self._try_after and acceptance > LIKELY:
            self._try_after *= 2
            return best
        self.skip(kind)
        return 0

    def skip(self, kind: int) -> None:
        """Note that guesses of a kind did not pay."""
        self._forget(kind, FORGET_SKIPPED)

    def learn(self, kind: int, tried: int, right: int) -> None:
        """Count guesses that were compared, and that were right."""
        self._forget(kind, FORGET_TRIED)
        self._tried[kind] += tried
        self._right[kind] += right

    def learn_pass(self, tokens: int, seconds: float) -> None:
        """Take the time of a pass."""
        if tokens > len(self._expected_s) or seconds <= 0.0:
            return
        if tokens == 1:
            self._since_plain, self._since_guess = 0, self._since_guess + 1
        else:
            self._since_plain, self._since_guess = self._since_plain + 1, 0
        place, own = tokens - 1, self._ratios[tokens - 1]
        ratio, old = seconds / self._expected_s[place], own or self._ratio
        is_slow = ratio > OUTLIER * old
        if is_slow and not self._was_slow[place]:
            self._was_slow[place] = True
            if tokens == 1 and not own:
                self._since_plain = PLAIN_EVERY
            return
        self._was_slow[place] = is_slow
        self._ratios[place] = old + (NEWEST if own else FIRST) * (ratio - old)
        # Passes of one token use other kernels than those of several.
        if tokens > 1:
            known = [one for one in self._ratios[1:] if one]
            self._ratio, self._follows_plain = sum(known) / len(known), False
        elif self._follows_plain:
            self._ratio = self._ratios[0]

    def learn_guesses(self, count: int, seconds: float) -> None:
        """Take the time that a proposer computed for some guesses."""
        each_s = seconds / count
        each_s = min(each_s, LONGEST_GUESS * self.guess_s) if self.guess_s else each_s
        self.guess_s += NEWEST * (each_s - self.guess_s)

    def _forget(self, kind: int, factor: float) -> None:
        """Move the acceptance of a kind towards the one that was assumed first."""
        kept, prior = factor, self._priors[kind]
        self._tried[kind] = kept * self._tried[kind] + (1.0 - kept) * PRIOR_TRIES
        self._right[kind] = kept * self._right[kind] + (1.0 - kept) * PRIOR_TRIES * prior


class GuessOffer(NamedTuple):
    """Guesses that the next pass of an answer may check.

    Args:
        pace: Knows times of passes and guesses.
        kind: Kind of the guesses.
        most: Their largest number.
        runs_passes: Whether they take passes of another model.
    """

    pace: GuessPace
    kind: int
    most: int
    runs_passes: bool = False

    @property
    def chance(self) -> float:
        """Probability that a guess is right if those before it are; 1 for a fixed number of guesses."""
        return self.pace.acceptance(self.kind) if self.pace.fixed is None else 1.0


@dataclass(frozen=True, slots=True)
class SpeculationResult:
    """The guesses of one answer.

    Args:
        passes: Decode passes; each gave one token, and one more for each right guess.
        guesses: Guesses that the passes checked.
        accepted: Right guesses.
        seconds: Time of the passes and guesses.
        estimated_gain: Time of as many passes of one token, as long as such passes took lately, over
            ``seconds``; None if no pass had one token, or other answers shared passes.
    """

    passes: int
    guesses: int
    accepted: int
    seconds: float
    estimated_gain: float | None

    @property
    def tokens_per_pass(self) -> float:
        """Mean tokens of a pass; 0 without passes."""
        return 1.0 + self.accepted / self.passes if self.passes else 0.0

    def __add__(self, other: SpeculationResult) -> SpeculationResult:
        """Return the guesses of two answers."""
        both, gain = [one for one in (self, other) if one.passes], None
        seconds = self.seconds + other.seconds
        gains = [one.estimated_gain for one in both]
        if seconds and None not in gains:
            gain = sum(one.seconds * (one.estimated_gain or 0.0) for one in both) / seconds
        return SpeculationResult(
            self.passes + other.passes,
            self.guesses + other.guesses,
            self.accepted + other.accepted,
            seconds,
            gain,
        )
