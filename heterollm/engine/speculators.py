"""Speculative decoding with an engine: guesses of a draft model, and times of passes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.engine.session import Session
from heterollm.text import MOST_GUESSES, GuessPace, Proposer, Sampler, SamplingOptions

if TYPE_CHECKING:
    from heterollm.engine.runner import Engine

DRAFT_PRIOR: Final = 0.7
"""Expected acceptance of a draft model's guesses before any was tried."""

STEADY: Final = 2
"""Most tokens that a draft reads before its guesses if it guessed before the last pass, too: the sampled one,
and the last guess if all were right."""

TIMED_LENGTHS: Final = (1, 2, 4, 8, 16)
"""Tokens of the decode passes that are timed; others lie between them."""

FEWEST_TURNS, MOST_TURNS = 3, 20
"""Turns of passes of all these lengths, after one that compiles: no more once they took :data:`LONGEST_S`."""

LONGEST_S: Final = 0.5

RANDOM_STREAM: Final = 1
"""Second number of a draft's seed: its draws must not depend on those that judge them."""


class DraftSpeculator:
    """Guesses by a second, smaller model on the same device and engine thread.

    Each session of the model has one of the draft, so that later answers reuse it.

    Args:
        pass_s: Expected seconds of the model's decode passes of 1, 2, … tokens.
        guess_s: Expected seconds of the draft's decode passes of one token.
        guesses: Fixed number of guesses; None to choose.
        new_session: Returns a new session of the draft.
    """

    def __init__(
        self, pass_s: list[float], guess_s: float, guesses: int | None, new_session: Callable[[], Session]
    ) -> None:
        self._pace = GuessPace(pass_s, (DRAFT_PRIOR,), guess_s=guess_s, fixed=guesses)
        self._new_session = new_session
        self._sessions: weakref.WeakKeyDictionary[Session, Session] = weakref.WeakKeyDictionary()

    def __call__(self, session: Session, sampling: SamplingOptions, /) -> Proposer:
        """Return the proposer of an answer in a session; called on the engine thread."""
        draft = self._sessions.get(session)
        if draft is None:
            draft = self._sessions[session] = self._new_session()
        return DraftProposer(draft, session.vocab_size, sampling, self._pace)


class DraftProposer:
    """Guesses the tokens that a draft model samples.

    Args:
        session: The draft's; it may hold any tokens.
        vocab_size: Length of the model's logits. What one model has more of pads its vocabulary.
        sampling: The answer's; the draft uses the same.
        pace: Chooses numbers of guesses.
    """

    def __init__(self, session: Session, vocab_size: int, sampling: SamplingOptions, pace: GuessPace) -> None:
        seed = None if sampling.seed is None else (sampling.seed, RANDOM_STREAM)
        self._session = session
        self._vocab_size = min(vocab_size, session.vocab_size)
        self._sampler = Sampler(sampling, self._vocab_size, np.random.default_rng(seed))
        self.pace = pace
        self._read = 0
        # Tokens that the draft does not know have no probability.
        drawn = sampling.temperature > 0
        self._probabilities = np.zeros((MOST_GUESSES, vocab_size), np.float64) if drawn else None

    runs_passes = True

    @property
    def was_behind(self) -> bool:
        """Whether the draft read more than the tokens since the last pass."""
        return self._read > STEADY

    def kind(self, history: NDArray[np.int64], end: int, /) -> int | None:
        """Return 0; None where the draft does not know a token, or holds fewer than the model."""
        return 0 if end < self._session.context and int(history[:end].max()) < self._vocab_size else None

    def propose(self, history: NDArray[np.int64], end: int, count: int, /) -> int:
        """Write guesses behind the history; see :class:`heterollm.text.speculation.Proposer`."""
        session, sampler, drawn = self._session, self._sampler, self._probabilities
        count, size = min(count, session.context - end), self._vocab_size
        session.keep_common(history[: end - 1])
        self._read = end - session.position
        logits = session.append_in_place(history[session.position : end].astype(np.int32))
        for index in range(count):
            known = history[: end + index]
            if drawn is None:
                token = sampler.sample(logits[:size], known)
            else:
                token = sampler.draw(logits[:size], known, drawn[index, :size])
            history[end + index] = token
            if index + 1 < count:
                logits = session.decode_in_place(token)
        return count

    def drawn_from(self, index: int, /) -> NDArray[np.float64] | None:
        """Return the probabilities ``[vocab]`` of a guess; None if the likeliest token was taken."""
        return None if self._probabilities is None else self._probabilities[index]

    def learn(self, tried: int, right: int, /) -> None:
        """Take the guesses that were compared and that were right."""
        self.pace.learn(0, tried, right)


def longest_guessed_pass(engine: Engine) -> int:
    """Return the tokens of the longest pass that checks guesses."""
    return min(MOST_GUESSES + 1, engine.plan.chunk_length, engine.context)


def measured_pass_s(engine: Engine, longest: int) -> list[float]:
    """Return the seconds of decode passes of 1 to ``longest`` tokens, measured in an empty session.

    Called on the engine thread.
    """
    cache, now_s = engine.new_cache(), engine.device.now_s
    lengths = [length for length in TIMED_LENGTHS if length < longest] + [longest]
    best, total_s = [math.inf] * len(lengths), 0.0
    for turn in range(1 + MOST_TURNS):
        for place, length in enumerate(lengths):
            ids = np.zeros(length, np.int32)
            begin = now_s()
            engine.decode_several(cache, 0, ids)
            taken_s = now_s() - begin
            if turn:
                best[place], total_s = min(best[place], taken_s), total_s + taken_s
        if turn >= FEWEST_TURNS and total_s > LONGEST_S:
            break
    # A mistaken time must not promise that more tokens take less.
    rising = np.maximum.accumulate(best)
    return np.interp(np.arange(1, longest + 1), lengths, rising).tolist()
