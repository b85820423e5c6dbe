"""The task of a prompt: sessions from the cache, tokens to the reader, counts of its work."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from heterollm.engine import PromptTask, Session
from heterollm.serve.channel import Channel
from heterollm.serve.sessions import CachedSession, SessionCache
from heterollm.serve.status import Activity
from heterollm.text import GenerationResult, GenerationStep, SpeculationResult


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


@dataclass(eq=False, kw_only=True)
class ServedPrompt(PromptTask):
    """The answers to one prompt of a request.

    Args:
        tier: Its urgency.
        answers: The prepared answers to the same prompt.
        reproducible: Whether they must not depend on other requests.
        first: Number of the first of them in the request.
        owner: Whose sessions they may reuse.
        cache: Gives sessions.
        channel: Takes :class:`StepOf` and :class:`Ended`, and the error that ends the task.
        activity: Counts the work of all prompts.
        report: Takes the tokens and times once, also of work that ended early.
        ended: Called once when nothing more is computed.
    """

    first: int
    owner: str
    cache: SessionCache
    channel: Channel
    activity: Activity
    report: Callable[[Spent], None]
    ended: Callable[[PromptTask], None]
    spent: Spent = field(default_factory=Spent, init=False)
    _held: list[CachedSession] = field(default_factory=list, init=False)
    _reported: bool = field(default=False, init=False)
    _submitted_s: float = field(default_factory=time.monotonic, init=False)

    @property
    def is_slow(self) -> bool:
        """Whether the reader is so slow that the task has to wait."""
        return self.channel.full

    def take_session(self) -> Session:
        """Return a session that holds a beginning of the prompt, and nothing else."""
        self.spent.queued_s = time.monotonic() - self._submitted_s
        ids = self.answers[0].prompt_ids
        held = self.cache.take(ids, reproducible=self.reproducible, owner=self.owner)
        self._held.append(held)
        self.spent.cached_tokens = held.begin
        return held.session

    def copy_session(self) -> Session:
        """Return a copy of it, which holds the whole prompt now."""
        self._held.append(self.cache.copy(self._held[0]))
        return self._held[-1].session

    def read(self, seconds: float, /) -> None:
        """Count the time of a turn of the prompt, which may have ended."""
        self.spent.prefill_s += seconds
        self.activity.prefill_s += seconds
        if self.prompt is None:
            self.cache.prefilled(self._held[0])
            self.activity.prefill_tokens += self._held[0].session.position - self.spent.cached_tokens

    def put(self, number: int, steps: Sequence[GenerationStep], seconds: float, /) -> None:
        """Send new tokens of an answer, and its end."""
        self.activity.decode_s += seconds
        self.activity.decode_tokens += len(steps)
        for step in steps:
            self.channel.put(StepOf(self.first + number, step), urgent=False)
        result = self.answers[number].result
        if result is not None:
            is_last = all(answer.result is not None for answer in self.answers)
            if is_last:
                self._sum_up()
            self.channel.put(Ended(self.first + number, result, self.spent if is_last else None))

    def fail(self, error: Exception, /) -> None:
        """Send the error that ends the task."""
        self.channel.put(error)

    def close(self) -> None:
        """Keep the sessions for other requests."""
        self._sum_up()
        for held in self._held:
            self.cache.give_back(held)
        self.ended(self)

    def _sum_up(self) -> None:
        """Report the tokens and times, once."""
        if self._reported:
            return
        self._reported = True
        spent, rest = self.spent, len(self.answers[0].prompt_ids) - self.spent.cached_tokens
        spent.prompt_tokens = spent.cached_tokens + int(self.read_fraction * rest)
        for answer in self.answers:
            if (result := answer.result) is not None:
                spent.answer_tokens += result.generated_tokens
                spent.decoded += max(0, result.generated_tokens - 1)
                spent.decode_s += result.decode_s
                spent.guessed(result.speculation)
        self.report(spent)
