"""The work of a prompt on the engine thread: prefill, and the tokens of all its answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from heterollm.base import DeviceError, FenceError
from heterollm.engine import PreparedAnswer, Session, SessionSource
from heterollm.serve.sessions import CachedSession, SessionCache
from heterollm.serve.status import Activity, Health
from heterollm.serve.turns import PromptJob, ServiceTier, Sink
from heterollm.text import Generation, GenerationResult, GenerationStep, SpeculationResult


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
    """The source of an answer whose prompt a session holds already.

    Args:
        session: The session.
        begin: Tokens that it held before the prompt.
        logits: Those after the prompt.
        health: Learns of errors of the engine.
    """

    __slots__ = ("_begin", "_health", "latest")

    def __init__(self, session: Session, begin: int, logits: NDArray[np.float32], health: Health) -> None:
        super().__init__(session)
        self._begin: int | None = begin
        self._health = health
        self.latest = logits

    @property
    def position(self) -> int:
        return super().position if self._begin is None else self._begin

    def prefill(self, _ids: Sequence[int], /) -> NDArray[np.float32]:
        self._begin = None
        return self.latest

    def decode(self, token_id: int, /) -> NDArray[np.float32]:
        with self._health:
            self.latest = super().decode(token_id)
        return self.latest

    def decode_several(self, token_ids: NDArray[np.int64], /) -> NDArray[np.float32]:
        with self._health:
            self.latest = super().decode_several(token_ids)
        return self.latest


@dataclass(slots=True)
class _Running:
    """An answer that is computed: its number in the request, its source, and its token loop."""

    choice: int
    source: _Prefilled
    generation: Generation
    tokens: int = 0


@dataclass
class PromptWork:
    """One prompt and its answers.

    Args:
        answers: The prepared answers to the same prompt.
        first: Number of the first of them in the request.
        reproducible: Whether they must not depend on other requests.
        owner: Whose sessions they may reuse.
        cache: Gives sessions.
        sink: Takes :class:`StepOf` and :class:`Ended`.
        wanted: Whether others want the engine, in a prompt of so many tokens.
        clock: Seconds of the device.
        activity: Counts the work of all prompts.
        health: Learns whether the engine works.
        report: Takes the tokens and times once, also of work that ended early.
    """

    answers: Sequence[PreparedAnswer]
    first: int
    reproducible: bool
    owner: str
    cache: SessionCache
    sink: Sink
    wanted: Callable[[int], bool]
    clock: Callable[[], float]
    activity: Activity
    health: Health
    report: Callable[[Spent], None]
    spent: Spent = field(default_factory=Spent)
    _running: list[_Running] = field(default_factory=list)
    _reported: bool = False

    def job(self, tier: ServiceTier) -> PromptJob:
        """Return the job that does the work."""
        self._job = PromptJob(tier, len(self.answers), self.run, self.sink)
        return self._job

    def run(self) -> Iterator[None]:
        """Compute the answers, a turn at each step; for the engine thread."""
        self.spent.queued_s = time.monotonic() - self._job.submitted_s
        held: list[CachedSession] = []
        try:
            yield from self._prompt(held)
            while self._running:
                self._running = [one for one in self._running if self._token(one)]
                yield
        except (DeviceError, FenceError) as error:  # also of a draft, or while memory is allocated
            self.health.failed(error)
            raise
        finally:
            try:
                self._end_answers()
            finally:
                for session in held:
                    self.cache.give_back(session)
                self._report()

    def _prompt(self, held: list[CachedSession]) -> Iterator[None]:
        """Compute the prompt and begin its answers, whose sessions are added to ``held``."""
        ids, spent = self.answers[0].prompt_ids, self.spent
        held.append(self.cache.take(ids, reproducible=self.reproducible, owner=self.owner))
        session, reused = held[0].session, held[0].session.position
        spent.prompt_tokens = spent.cached_tokens = reused
        rest = np.asarray(ids[reused:], np.int32)

        def wanted(part: float) -> bool:
            spent.prompt_tokens = reused + int(part * len(rest))
            return self.wanted(len(rest))

        turns = session.prefill_in_turns(rest, wanted)
        while self._timed(turns):
            yield
        spent.prompt_tokens = len(ids)
        self.cache.prefilled(held[0])
        self.activity.prefill_tokens += len(rest)
        # The next pass overwrites the logits.
        logits = session.last_logits if len(self.answers) == 1 else session.last_logits.copy()
        for _ in self.answers[1:]:
            held.append(self.cache.copy(held[0]))
        self._left = len(self.answers)
        for number, (answer, own) in enumerate(zip(self.answers, held, strict=True)):
            source = _Prefilled(own.session, reused, logits, self.health)
            generation = answer.start(source, reused, self._job.cancelled)
            self._running.append(_Running(self.first + number, source, generation))

    def _timed(self, turns: Iterator[None]) -> bool:
        """Go on with the prompt; return whether it has paused."""
        begin_s = self.clock()
        try:
            with self.health:
                return next(turns, self) is None
        finally:
            took_s = self.clock() - begin_s
            self.spent.prefill_s += took_s
            self.activity.prefill_s += took_s

    def _token(self, one: _Running) -> bool:
        """Compute a token; return whether others follow."""
        begin_s = self.clock()
        try:
            step = next(one.generation, None)
        except Exception as error:
            if not np.isfinite(one.source.latest.max()):
                self.health.failed(error)
            raise
        took_s = self.clock() - begin_s
        self.activity.decode_s += took_s
        if step is not None:
            self.health.worked()
            self.activity.decode_tokens += 1
            self.spent.answer_tokens += 1
            one.tokens += 1
            if one.tokens > 1:
                self.spent.decoded += 1
                self.spent.decode_s += took_s
            self.sink.put(StepOf(one.choice, step))
        if not one.generation.finished:
            return True
        result = one.generation.result
        self.spent.guessed(result.speculation)
        self._left -= 1
        if not self._left:
            self._report()
        self.sink.put(Ended(one.choice, result, None if self._left else self.spent))
        return False

    def _end_answers(self) -> None:
        """End answers early, and count their guesses."""
        for one in self._running:
            if not one.generation.finished:
                one.generation.close()
                self.spent.guessed(one.generation.result.speculation)

    def _report(self) -> None:
        if not self._reported:
            self._reported = True
            self.report(self.spent)
