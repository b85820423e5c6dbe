"""The work of a prompt on the engine thread: prefill, and the tokens of all its answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from heterollm.engine import PreparedAnswer, Session, SessionSource
from heterollm.serve.sessions import SessionCache
from heterollm.serve.status import Activity
from heterollm.serve.turns import PromptJob, ServiceTier, Sink
from heterollm.text import Generation, GenerationResult, GenerationStep, SpeculationResult

__all__ = ["Ended", "PromptWork", "Spent", "StepOf"]


@dataclass(frozen=True, slots=True)
class StepOf:
    """A token of an answer.

    Args:
        choice: Number of the answer in the request.
        step: The token.
    """

    choice: int
    step: GenerationStep


@dataclass(slots=True)
class Spent:
    """Tokens and times of a prompt and its answers.

    Args:
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Those that a session held already.
        answer_tokens: Tokens of all answers.
        queued_s: Time until the first turn.
        prefill_s: Time of the prompt's own turns.
        decode_s: Time of the turns of all tokens but the first of each answer.
        decoded: Number of these tokens.
        speculation: The guesses of all answers; None if nothing guessed.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    answer_tokens: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decoded: int = 0
    speculation: SpeculationResult | None = None

    def __iadd__(self, other: Spent) -> Spent:
        """Add the tokens and times of another prompt of the request, which waited at the same time."""
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        self.answer_tokens += other.answer_tokens
        self.queued_s = max(self.queued_s, other.queued_s)
        self.prefill_s += other.prefill_s
        self.decode_s += other.decode_s
        self.decoded += other.decoded
        self.guessed(other.speculation)
        return self

    def guessed(self, counts: SpeculationResult | None) -> None:
        """Add the guesses of an answer, if there were any to make."""
        if counts is not None:
            self.speculation = counts if self.speculation is None else self.speculation + counts


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of an answer.

    Args:
        choice: Number of the answer in the request.
        result: The answer.
        spent: Of the whole prompt, at the end of its last answer.
    """

    choice: int
    result: GenerationResult
    spent: Spent | None


class _Prefilled(SessionSource):
    """The source of an answer whose prompt a session holds already."""

    __slots__ = ("_begin", "_logits")

    def __init__(self, session: Session, begin: int, logits: NDArray[np.float32]) -> None:
        super().__init__(session)
        self._begin: int | None = begin
        self._logits: NDArray[np.float32] | None = logits

    @property
    def position(self) -> int:
        return super().position if self._begin is None else self._begin

    def prefill(self, _ids: Sequence[int], /) -> NDArray[np.float32]:
        assert self._logits is not None  # an answer prefills once
        logits, self._begin, self._logits = self._logits, None, None
        return logits


@dataclass
class PromptWork:
    """One prompt and its answers.

    Args:
        answers: The prepared answers to the same prompt.
        first: Number of the first of them in the request.
        reproducible: Whether they must not depend on other requests.
        cache: Gives sessions.
        sink: Takes :class:`StepOf` and :class:`Ended`.
        wanted: Whether others want the engine, in a prompt of so many tokens.
        clock: Seconds of the device.
        activity: Counts the work of all prompts.
    """

    answers: Sequence[PreparedAnswer]
    first: int
    reproducible: bool
    cache: SessionCache
    sink: Sink
    wanted: Callable[[int], bool]
    clock: Callable[[], float]
    activity: Activity
    spent: Spent = field(default_factory=Spent)

    def job(self, tier: ServiceTier) -> PromptJob:
        """Return the job that does the work."""
        self._job = PromptJob(tier, len(self.answers), self.run, self.sink)
        return self._job

    def run(self) -> Iterator[None]:
        """Compute the answers, a turn at each step; for the engine thread."""
        job, ids, spent = self._job, self.answers[0].prompt_ids, self.spent
        spent.queued_s = time.monotonic() - job.submitted_s
        held = [self.cache.take(ids, reproducible=self.reproducible)]
        session, reused = held[0].session, held[0].session.position
        spent.prompt_tokens, spent.cached_tokens = len(ids), reused
        try:
            rest = np.asarray(ids[reused:], np.int32)
            turns = session.prefill_in_turns(rest, lambda _: self.wanted(len(rest)))
            while self._timed(turns):
                yield
            self.cache.prefilled(held[0])
            self.activity.prefill_tokens += len(ids) - reused
            # The next pass overwrites the logits.
            logits = session.last_logits if len(self.answers) == 1 else session.last_logits.copy()
            for _ in self.answers[1:]:
                held.append(self.cache.copy(held[0]))
            self._left = len(self.answers)
            running = [
                (
                    self.first + number,
                    answer.start(_Prefilled(own.session, reused, logits), reused, job.cancelled),
                )
                for number, (answer, own) in enumerate(zip(self.answers, held, strict=True))
            ]
            while running:
                running = [one for one in running if self._token(*one)]
                yield
        finally:
            for one in held:
                self.cache.give_back(one)

    def _timed(self, turns: Iterator[None]) -> bool:
        """Go on with the prompt; return whether it has paused."""
        begin_s = self.clock()
        try:
            return next(turns, self) is None
        finally:
            took_s = self.clock() - begin_s
            self.spent.prefill_s += took_s
            self.activity.prefill_s += took_s

    def _token(self, choice: int, generation: Generation) -> bool:
        """Compute a token; return whether others follow."""
        begin_s = self.clock()
        step = next(generation, None)
        self.activity.decode_s += self.clock() - begin_s
        if step is not None:
            self.activity.decode_tokens += 1
            self.sink.put(StepOf(choice, step))
        if not generation.finished:
            return True
        result = generation.result
        self.spent.answer_tokens += result.generated_tokens
        self.spent.guessed(result.speculation)
        if result.decode_tokens_per_s:
            self.spent.decoded += result.generated_tokens - 1
            self.spent.decode_s += (result.generated_tokens - 1) / result.decode_tokens_per_s
        self._left -= 1
        self.sink.put(Ended(choice, result, None if self._left else self.spent))
        return False
