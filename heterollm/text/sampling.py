"""Sampling of the next token from logits.

A bias comes first, then the penalties. The filters and their order are those of transformers' ``generate``:
repetition penalty, temperature, top-k (ties at the limit stay), top-p, min-p.
"""

from __future__ import annotations

import math
import threading
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from heterollm.base import EngineError
from heterollm.text.sampling_options import SamplingOptions

Logits = npt.NDArray[np.float32]
TokenIds = npt.NDArray[np.int64]
TopTokens: TypeAlias = tuple[tuple[int, float], ...]
"""The likeliest tokens with their log-probabilities, the likeliest first."""

_GROUP: Final = 256
"""Tokens whose weights are summed together, before a draw looks into one group."""

_LARGEST = float(np.finfo(np.float32).max)
_SMALLEST = float(np.finfo(np.float32).tiny)
"""Smallest temperature: a smaller one is 0 in float32, and this one leaves the likeliest tokens alone."""


class _Scratch(threading.local):
    """Arrays of a thread, for one call at a time: those of many answers would leave the caches."""

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[Logits, Logits, npt.NDArray[np.float64]]] = {}

    def of(self, size: int) -> tuple[Logits, Logits, npt.NDArray[np.float64]]:
        """Return scores, a copy of them and weights of so many tokens."""
        found = self._arrays.get(size)
        if found is None:
            kinds = np.empty(size, np.float32), np.empty(size, np.float32), np.empty(size, np.float64)
            found = self._arrays[size] = kinds
        return found


_SCRATCH: Final = _Scratch()


class Sampler:
    """Samples the tokens of one answer; not thread-safe.

    Args:
        options: Sampling parameters.
        vocab_size: Length of the logits.
        random: Source of random numbers; by default one of the options' seed.
        prompt_tokens: Tokens at the beginning of the history that are not the answer's.
    """

    def __init__(
        self,
        options: SamplingOptions,
        vocab_size: int,
        random: np.random.Generator | None = None,
        *,
        prompt_tokens: int = 0,
    ) -> None:
        self._options = options
        self._random = random or np.random.default_rng(options.seed)
        self._greedy = options.temperature == 0
        self._prompt_tokens = prompt_tokens
        biases = {token: value for token, value in options.logit_bias.items() if token < vocab_size}
        self._biased = np.array(list(biases), np.int64)
        self._bias = np.array(list(biases.values()), np.float64)
        self._changed = options.is_penalized or bool(biases)
        self._vocab_size = vocab_size
        self._wanted: npt.NDArray[np.float64] | None = None

    @property
    def uses_history(self) -> bool:
        """Whether :meth:`sample` reads the history."""
        return self._options.is_penalized

    def sample(self, logits: Logits, history: TokenIds) -> int:
        """Return the next token.

        Args:
            logits: ``[vocab]``, not modified; −∞ excludes a token.
            history: ``[n]``, the tokens so far, prompt included.

        Raises:
            EngineError: A logit is NaN or +∞, or all are −∞.
        """
        if self._greedy:
            scores = logits
            if self._changed:
                self._take_arrays()
                scores = self._change(logits, history)
            token = int(scores.argmax())
            _check_top(float(scores[token]))
            return token
        ids, weights = self._candidates(logits, history)
        chosen = self._drawn(weights)
        return chosen if ids is None else int(ids[chosen])

    def distribution(
        self, logits: Logits, history: TokenIds, out: npt.NDArray[np.float64] | None = None
    ) -> npt.NDArray[np.float64]:
        """Return the probabilities ``[vocab]`` from which :meth:`sample` draws; it raises the same errors.

        Args:
            logits: As for :meth:`sample`.
            history: As for :meth:`sample`.
            out: Array for the result; by default a new one.
        """
        result = np.empty(len(logits), np.float64) if out is None else out
        result.fill(0)
        if self._greedy:
            result[self.sample(logits, history)] = 1
            return result
        ids, weights = self._candidates(logits, history)
        result[slice(None) if ids is None else ids] = weights
        result /= result.sum()
        return result

    def accept(
        self, logits: Logits, history: TokenIds, guess: int, drawn_from: npt.NDArray[np.float64]
    ) -> int:
        """Return the guess or another token, which has the distribution of :meth:`sample` either way.

        The guess stays with the probability p / q, and at most 1; in its place comes a token drawn from
        max(p - q, 0), normalised (Leviathan and others, "Fast inference from transformers via speculative
        decoding", 2023).

        Args:
            logits: As for :meth:`sample`.
            history: As for :meth:`sample`.
            guess: A token.
            drawn_from: The probabilities q, ``[vocab]``, from which the guess was drawn, independently of
                this sampler.

        Raises:
            EngineError: As for :meth:`sample`.
        """
        wanted = self._wanted = self.distribution(logits, history, self._wanted)
        if self._random.random() * drawn_from[guess] < wanted[guess]:
            return guess
        np.subtract(wanted, drawn_from, out=wanted)
        np.maximum(wanted, 0.0, out=wanted)
        # p may equal q but for rounding.
        return self._drawn(wanted) if wanted.any() else guess

    def draw(self, logits: Logits, history: TokenIds, probabilities: npt.NDArray[np.float64]) -> int:
        """Return the next token as :meth:`sample` does, and write the probabilities of all tokens."""
        return self._drawn(self.distribution(logits, history, probabilities))

    def _drawn(self, weights: npt.NDArray[np.floating[Any]]) -> int:
        """Return a place, drawn by its weight."""
        # A sum of every prefix adds one weight after the other: seven times the time of sums of groups.
        sums = np.add.reduceat(weights, np.arange(0, len(weights), _GROUP)).cumsum(dtype=np.float64)
        wanted = min(self._random.random() * sums[-1], math.nextafter(sums[-1], 0))
        group = int(sums.searchsorted(wanted, side="right"))
        begin = group * _GROUP
        own = weights[begin : begin + _GROUP]
        rest = wanted - (sums[group - 1] if group else 0.0)
        place = int(own.cumsum(dtype=np.float64).searchsorted(rest, side="right"))
        # Rounding may lead behind the last weight.
        return begin + (place if place < len(own) else int(own.nonzero()[0][-1]))

    def _take_arrays(self) -> None:
        """Use the arrays of this thread until the end of the call."""
        self._scores, self._work, self._weights = _SCRATCH.of(self._vocab_size)

    def _change(self, logits: Logits, history: TokenIds) -> Logits:
        """Return the logits with bias and penalties; finite ones stay finite, and excluded ones excluded."""
        options, scores = self._options, self._scores
        np.copyto(scores, logits)
        if len(self._biased):
            self._set(self._biased, scores[self._biased] + self._bias)
        if options.repetition_penalty != 1 and len(history):
            # A repeated token gets the same value twice, so that it is penalised once.
            seen = scores[history].astype(np.float64)
            penalty = options.repetition_penalty
            self._set(history, np.where(seen < 0, seen * penalty, seen / penalty))
        if options.presence_penalty or options.frequency_penalty:
            own, counts = np.unique(history[self._prompt_tokens :], return_counts=True)
            self._set(own, scores[own] - options.presence_penalty - options.frequency_penalty * counts)
        return scores

    def _set(self, ids: TokenIds, values: npt.NDArray[np.float64]) -> None:
        finite = np.isfinite(values)
        self._scores[ids] = np.where(finite, values.clip(-_LARGEST, _LARGEST), values)

    def _candidates(
        self, logits: Logits, history: TokenIds
    ) -> tuple[TokenIds | None, npt.NDArray[np.floating[Any]]]:
        """Return the ids that pass the filters (None for all) and their unnormalised probabilities."""
        options = self._options
        self._take_arrays()
        changed = self._change(logits, history) if self._changed else logits
        top = float(changed.max())
        _check_top(top)
        # Relative to the likeliest token, so that small temperatures cannot overflow.
        with np.errstate(over="ignore"):
            np.subtract(changed, np.float32(top), out=self._scores)
            if options.temperature != 1:
                np.divide(self._scores, max(options.temperature, _SMALLEST), out=self._scores)
        floor = math.log(options.min_p) if options.min_p > 0 else -math.inf
        ids: TokenIds | None = None
        if 0 < options.top_k < len(logits):
            ids = self._likeliest(options.top_k)
        if options.top_p < 1:
            ids = self._nucleus(ids, options.top_p)
        elif ids is None and floor > -math.inf:
            ids = np.flatnonzero(self._scores >= floor)
        if ids is None:
            return None, np.exp(self._scores, out=self._scores)
        chosen = self._scores[ids].astype(np.float64)
        keep = chosen >= floor
        return ids[keep], np.exp(chosen[keep])

    def _likeliest(self, count: int) -> TokenIds:
        """Return the ids of the ``count`` likeliest tokens and of ties with the last one."""
        np.copyto(self._work, self._scores)
        place = len(self._work) - count
        self._work.partition(place)
        return np.flatnonzero(self._scores >= self._work[place])

    def _nucleus(self, ids: TokenIds | None, top_p: float) -> TokenIds:
        """Return the fewest of ``ids`` (None for all) that reach ``top_p`` of their probability."""
        scores = self._scores if ids is None else self._scores[ids]
        ordered, weights = self._work[: len(scores)], self._weights[: len(scores)]
        np.copyto(ordered, scores)
        ordered.sort()
        cumulative = np.exp(ordered, out=weights)[::-1]
        np.cumsum(cumulative, out=cumulative)
        count = min(int(cumulative.searchsorted(top_p * cumulative[-1])) + 1, len(scores))
        least = ordered[-count]
        above = np.flatnonzero(scores > least)
        found = np.concatenate([above, np.flatnonzero(scores == least)[: count - len(above)]])
        return found if ids is None else ids[found]


class LogProbabilities:
    """Natural logarithms of the model's probabilities after one token, before any filter; not thread-safe.

    Args:
        vocab_size: Length of the logits.
        most: Largest number of tokens that :meth:`likeliest` returns.
    """

    def __init__(self, vocab_size: int, most: int = 0) -> None:
        self._most = min(most, vocab_size)
        self._exponents = np.empty(vocab_size, np.float64)
        self._work = np.empty(vocab_size if most else 0, np.float32)
        self._reach = np.empty(vocab_size if most else 0, np.bool_)
        self._logits: Logits = self._work
        self._top = self._log_sum = 0.0

    def read(self, logits: Logits) -> None:
        """Take the logits ``[vocab]``, which must stay unchanged until the next call.

        Raises:
            EngineError: A logit is NaN or +∞, or all are −∞.
        """
        self._logits = logits
        self._top = float(logits.max())
        _check_top(self._top)
        np.subtract(logits, self._top, out=self._exponents, dtype=np.float64)
        np.exp(self._exponents, out=self._exponents)
        self._log_sum = math.log(float(self._exponents.sum()))

    def of(self, token: int) -> float:
        """Return the log-probability of a token."""
        return float(self._logits[token]) - self._top - self._log_sum

    def likeliest(self) -> TopTokens:
        """Return the likeliest tokens, the smaller id first among equals, without those of probability 0."""
        if not self._most:
            return ()
        place = len(self._work) - self._most
        np.copyto(self._work, self._logits)
        self._work.partition(place)
        np.greater_equal(self._logits, self._work[place], out=self._reach)
        ids = np.flatnonzero(self._reach)
        order = np.argsort(-self._logits[ids], kind="stable")[: self._most]
        found = ((token, self.of(token)) for token in ids[order].tolist())
        return tuple((token, value) for token, value in found if value > -math.inf)


def _check_top(top: float) -> None:
    """Refuse logits whose largest value is infinite or NaN, which ``max`` propagates."""
    if not math.isfinite(top):
        what = "all -inf" if top == -math.inf else "NaN or +inf"
        raise EngineError(
            f"The model's logits are {what}.",
            fix="Run `heterollm doctor`: a kernel or the checkpoint's weights are not sound.",
        )
