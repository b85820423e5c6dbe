"""The state of one answer, from its prompt to its result, without a loop, an engine or a thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from heterollm.base import ContextError, InputError
from heterollm.text.generation import (
    GenerationOptions,
    GenerationResult,
    GenerationStep,
    StopReason,
    decode_rate,
    prefill_rate,
)
from heterollm.text.grammar import Constraint
from heterollm.text.sampling import Logits, LogProbabilities, Sampler, TokenIds, TopTokens
from heterollm.text.speculation import MOST_GUESSES, GuessOffer, Proposer, SpeculationResult, Speculator
from heterollm.text.stop_strings import StopStrings
from heterollm.text.tokenizer import NoTokenizer, Tokenizer


class TokenSource(Protocol):
    """Computes logits in float32, valid until the next call, as a session does on the engine thread."""

    @property
    def position(self) -> int:
        """Tokens that the source holds."""

    @property
    def prepared_s(self) -> float:
        """Time in which passes were compiled."""

    def prefill_in_place(self, ids: npt.NDArray[Any], /) -> Logits | None:
        """Append tokens and return the logits ``[vocab]`` after the last one; None if that was cancelled."""

    def decode_in_place(self, ids: int | TokenIds, /) -> Logits:
        """Append one token and return the logits ``[vocab]`` after it, or n tokens and ``[n, vocab]``."""

    def truncate(self, position: int, /) -> None:
        """Forget the tokens from a position on."""


class TokenSequence:
    """The state of one answer: prompt, sampler, constraint, stop strings, guesses, counts and times.

    A driver gives the tokens of :meth:`next_input` to a model and the logits after them to :meth:`accept`,
    until there is a :attr:`result`. Prompt and answer together fill at most the context.

    Args:
        tokenizer: Decodes tokens and names the end tokens.
        prompt_ids: The whole prompt, as ids of the model's tokens.
        options: Limits, sampling and stop conditions.
        context: Tokens that a session can hold.
        constraint: Allows the tokens of the options' schema or grammar, and no others.
        speculator: Guesses tokens, which one pass checks together; None to decode one token at a time.
        clock: Returns seconds from any fixed moment.

    Raises:
        InputError: The prompt is empty, or longer than the context.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | NoTokenizer,
        prompt_ids: Sequence[int] | npt.NDArray[np.int32],
        options: GenerationOptions,
        *,
        context: int,
        constraint: Constraint | None = None,
        speculator: Speculator | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if len(prompt_ids) == 0:
            raise InputError("The prompt has no tokens.", fix="Give at least one word.")
        if len(prompt_ids) > context:
            raise ContextError(
                f"The prompt has {len(prompt_ids)} tokens, but the context holds {context}.",
                fix="Shorten the prompt or load the model with a larger context.",
            )
        self.prompt_ids = np.asarray(prompt_ids, np.int32)
        self.options = options
        self.result: GenerationResult | None = None
        self._tokenizer = tokenizer
        self._constraint = constraint
        self._speculator = speculator
        self._clock = clock
        room, wanted = context - len(prompt_ids), options.max_new_tokens
        self._at_limit: StopReason = "length" if wanted is not None and wanted <= room else "context"
        self._limit = room if wanted is None else min(wanted, room)
        self._end: StopReason | None = None if self._limit else self._at_limit

    def begin(self, session: TokenSource) -> None:
        """Begin the answer in a session that holds a beginning of the prompt, and nothing else."""
        prompt, options, tokenizer = len(self.prompt_ids), self.options, self._tokenizer
        self._reused = session.position
        self._proposer: Proposer | None = None
        if self._speculator is not None:
            self._proposer = self._speculator(session, options.sampling)
        self._eos_ids = frozenset() if options.ignore_eos else tokenizer.eos_ids
        self._decoder = tokenizer.stream_decoder()
        self._stops = StopStrings(options.stop)
        special = tokenizer.special_tokens if options.stop else {}
        self._stop_names = {
            token: name for token, name in special.items() if any(name in stop for stop in options.stop)
        }
        self._sampler: Sampler
        self._probabilities: LogProbabilities | None = None
        # Prompt and answer, allocated once.
        self._history: TokenIds = np.empty(prompt + self._limit, np.int64)
        self._history[:prompt] = self.prompt_ids
        self._log_probabilities = np.empty(self._limit if options.wants_log_probabilities else 0)
        self._top_log_probabilities: list[TopTokens] = []
        self._texts: list[str] = []
        self._count = self._guesses = 0
        self._shares = self._has_shared = False
        self._passes = self._guessed = self._accepted = 0
        self._begin_s = self._proposed_s = self._clock()
        self._prefill_s = self._ttft_s = self._decode_s = self._prepared_s = self._guessing_s = 0.0
        self._rate_s, self._rate_tokens, self._prefill_prepared = 0.0, 0, False
        if self._end is not None:
            self.end(self._end)

    @property
    def rest(self) -> npt.NDArray[np.int32]:
        """The tokens of the prompt that the session does not hold."""
        return self.prompt_ids[self._reused :]

    @property
    def longest(self) -> int:
        """Tokens of the prompt and of the longest answer."""
        return len(self.prompt_ids) + self._limit

    @property
    def guesses(self) -> bool:
        """Whether passes may check guesses of this answer."""
        return self._speculator is not None

    @property
    def held(self) -> int:
        """Tokens that the session keeps between passes: all but the last one, and no wrong guess."""
        return len(self.prompt_ids) + max(0, self._count - 1)

    def offer(self) -> GuessOffer | None:
        """Return the guesses that the next pass may check; None if there are none."""
        proposer = self._proposer
        if proposer is None:
            return None
        most = proposer.pace.most(min(self._limit - self._count - 1, MOST_GUESSES))
        if most <= 0:
            return None
        kind = proposer.kind(self._history, len(self.prompt_ids) + self._count)
        return None if kind is None else GuessOffer(proposer.pace, kind, most, proposer.runs_passes)

    def next_input(self, guesses: int | None = None) -> int | npt.NDArray[Any]:
        """Return the tokens of the next pass: the last one alone, or with guesses behind it.

        First comes the rest of the prompt. Guesses of a draft model run passes of their own, on the engine
        thread.

        Args:
            guesses: Number of guesses of those that are offered in a pass that answers share; None to choose
                it for a pass of this answer alone.
        """
        self._begin_s = self._clock()
        if not self._count:
            return self.rest
        end, count = len(self.prompt_ids) + self._count, 0
        self._shares = guesses is not None
        if self._proposer is not None and (offer := self.offer()) is not None:
            count = offer.pace.guesses(offer.kind, offer.most) if guesses is None else guesses
            if count:
                count = self._proposer.propose(self._history, end, count)
            elif self._shares:
                offer.pace.skip(offer.kind)
        self._guesses, self._proposed_s = count, self._clock()
        return self._history[end - 1 : end + count] if count else int(self._history[end - 1])

    def accept(self, logits: Logits, prepared_s: float = 0.0) -> tuple[GenerationStep, ...]:
        """Sample the tokens after the latest input, and return a step for each.

        Args:
            logits: float32 ``[vocab]`` after a prompt or one token, ``[n, vocab]`` after each of n tokens.
            prepared_s: Time in which the pass was compiled.

        Raises:
            EngineError: The logits are not sound.
        """
        is_first = not self._count
        if is_first:
            self._prefill_s = self._clock() - self._begin_s
            options, vocab = self.options, len(logits)
            self._sampler = Sampler(options.sampling, vocab, prompt_tokens=len(self.prompt_ids))
            if options.wants_log_probabilities:
                self._probabilities = LogProbabilities(vocab, options.top_log_probabilities)
        elif self._proposer is not None:
            self._learn_pass(self._proposer)
        if self._proposer is None or not self._guesses:
            steps: tuple[GenerationStep, ...] = (self._step(logits),)
        else:
            steps = tuple(self._checked(self._proposer, logits))
        took_s = self._clock() - self._begin_s
        self._prepared_s += prepared_s
        if is_first:
            self._ttft_s, self._prefill_prepared = took_s, prepared_s > 0
        else:
            self._decode_s += took_s
            if not prepared_s:
                self._rate_s, self._rate_tokens = self._rate_s + took_s, self._rate_tokens + len(steps)
        if self._end is not None:
            self.end(self._end)
        return steps

    def end(self, reason: StopReason) -> None:
        """End the answer; text that is held back is lost."""
        prompt, options, count = len(self.prompt_ids), self.options, self._count
        values, tops = self._log_probabilities[:count], tuple(self._top_log_probabilities)
        prefilled = prompt - self._reused
        self.result = GenerationResult(
            text="".join(self._texts),
            token_ids=tuple(self._history[prompt : prompt + count].tolist()),
            prompt_tokens=prompt,
            generated_tokens=count,
            stop_reason=reason,
            ttft_s=self._ttft_s if count else None,
            prefill_tokens_per_s=None if self._prefill_prepared else prefill_rate(prefilled, self._prefill_s),
            decode_tokens_per_s=decode_rate(self._rate_tokens, self._rate_s),
            log_probabilities=tuple(values.tolist()) if options.wants_log_probabilities else None,
            top_log_probabilities=tops if options.top_log_probabilities else None,
            speculation=None if self._proposer is None else self._speculation(self._proposer),
            prepared_s=self._prepared_s,
            decode_s=self._decode_s,
        )

    def _learn_pass(self, proposer: Proposer) -> None:
        """Count a pass and its guesses, and learn their times."""
        pace, count, now_s = proposer.pace, self._guesses, self._clock()
        self._has_shared |= self._shares
        if not self._shares:
            pace.learn_pass(count + 1, now_s - self._proposed_s)
        if count and not proposer.was_behind:
            pace.learn_guesses(count, self._proposed_s - self._begin_s)
        self._passes += 1
        self._guessed += count
        self._guessing_s += now_s - self._begin_s

    def _checked(self, proposer: Proposer, rows: Logits) -> Iterator[GenerationStep]:
        """Yield the steps of right guesses, and of the token behind them."""
        for row, logits in enumerate(rows):
            guess, drawn_from = -1, None
            if is_guess := row < self._guesses:
                guess = int(self._history[len(self.prompt_ids) + self._count])
                drawn_from = proposer.drawn_from(row)
            step = self._step(logits, guess, drawn_from)
            is_right = step.token_id == guess
            self._accepted += is_right
            if is_guess and (not is_right or row + 1 == self._guesses):
                proposer.learn(row + 1, row + is_right)
            yield step
            if not is_right or self._end is not None:
                return

    def _step(
        self, logits: Logits, guess: int = -1, drawn_from: npt.NDArray[np.float64] | None = None
    ) -> GenerationStep:
        """Return the step of a sampled token; no drawn guess changes its distribution."""
        end, sampler, constraint = len(self.prompt_ids) + self._count, self._sampler, self._constraint
        history = self._history[:end] if sampler.uses_history else self._history
        allowed = logits if constraint is None else constraint.allowed(logits)
        if drawn_from is None:
            token = sampler.sample(allowed, history)
        else:
            token = sampler.accept(allowed, history, guess, drawn_from)
        log_probability = top = None
        if self._probabilities is not None:
            self._probabilities.read(logits)
            log_probability = self._log_probabilities[self._count] = self._probabilities.of(token)
            if self.options.top_log_probabilities:
                top = self._probabilities.likeliest()
                self._top_log_probabilities.append(top)
        self._history[end] = token
        self._count += 1
        is_mark = token in self.options.marks
        text, stopped = self._stops.push(self._decoder.finish() if is_mark else self._decoder.push(token))
        if is_mark and not stopped:
            text += self._stops.finish()
        if not stopped and (name := self._stop_names.get(token)) is not None:
            text, stopped = self._push_special(text, name)
        if stopped:
            self._end = "stop"
        elif constraint is not None and constraint.accept(token):
            self._end = "complete"
        elif token in self._eos_ids:
            self._end = "eos"
        elif self._count == self._limit:
            self._end = self._at_limit
        if self._end is not None and not stopped:
            rest, stopped = self._stops.push(self._decoder.finish())
            text += rest + self._stops.finish()
            self._end = "stop" if stopped else self._end
        self._texts.append(text)
        return GenerationStep(text, token, log_probability, top)

    def _push_special(self, text: str, name: str) -> tuple[str, bool]:
        """Return the text behind a special token that stop strings name, and whether one is complete."""
        rest, stopped = self._stops.push(self._decoder.flush())
        text += rest
        if not stopped:
            rest, stopped = self._stops.push(name, hidden=True)
            text += rest
        return text, stopped

    def _speculation(self, proposer: Proposer) -> SpeculationResult:
        plain_s, seconds, tokens = proposer.pace.plain_pass_s, self._guessing_s, self._passes + self._accepted
        gain = None
        if plain_s is not None and seconds > 0 and not self._has_shared:
            gain = tokens * plain_s / seconds
        return SpeculationResult(self._passes, self._guessed, self._accepted, seconds, gain)
