"""Turns on the engine thread: prompts and answers by urgency, in fair shares, without slow readers."""

from __future__ import annotations

import contextlib
import queue
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, TypeAlias, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from heterollm.base import EngineError, InputError
from heterollm.engine.session import Session
from heterollm.engine.thread import EngineThread
from heterollm.text import GenerationStep, TokenSequence

T = TypeVar("T")

ServiceTier: TypeAlias = Literal["priority", "default", "flex"]
TIERS: Final[tuple[ServiceTier, ...]] = get_args(ServiceTier)
"""From the most to the least urgent, named as OpenAI's service tiers."""

TURN_S: Final = 0.05
"""Time that a prompt may take before another task of its tier has a turn."""

SHORT_TOKENS: Final = 64
"""Tokens of a prompt that no task of its tier interrupts: it ends soon."""


@dataclass(eq=False)
class PromptTask(ABC):
    """A prompt and its answers; the engine thread calls the methods.

    Args:
        tier: Its urgency.
        answers: The answers, all to the same prompt.
        cancelled: Set by any thread to end the task at its next turn.
        sessions: Those of the answers, of the first one alone until the prompt is read.
        prompt: The work on the prompt, until it is read.
        read_fraction: Part of it whose kernels are enqueued.
        running: Numbers of the answers behind the prompt that have not ended.
    """

    tier: ServiceTier
    answers: Sequence[TokenSequence]
    cancelled: bool = field(default=False, init=False)
    sessions: list[Session] = field(default_factory=list, init=False)
    prompt: Iterator[None] | None = field(default=None, init=False)
    read_fraction: float = field(default=0.0, init=False)
    running: list[int] = field(default_factory=list, init=False)

    @property
    @abstractmethod
    def is_slow(self) -> bool:
        """Whether the reader is so slow that the task has to wait."""

    @abstractmethod
    def take_session(self) -> Session:
        """Return a session that holds a beginning of the prompt, and nothing else."""

    @abstractmethod
    def copy_session(self) -> Session:
        """Return a copy of it, which holds the whole prompt now."""

    @abstractmethod
    def read(self, seconds: float, /) -> None:
        """Count the time of a turn of the prompt, which may have ended."""

    @abstractmethod
    def put(self, number: int, steps: Sequence[GenerationStep], seconds: float, /) -> None:
        """Take new tokens of an answer, which may have ended, and the time of their pass."""

    @abstractmethod
    def fail(self, error: Exception, /) -> None:
        """Take the error that ends the task; any thread may call it."""

    @abstractmethod
    def close(self) -> None:
        """Give the sessions back: the task has ended, its answers too."""


class Scheduler:
    """Runs tasks in turns between the calls of an engine thread.

    A task runs while no task of a more urgent tier can. Tasks of one tier take turns: a pass for each answer,
    or some time of a prompt.

    Args:
        thread: The engine thread.
        clock: Returns the seconds of the device.
    """

    def __init__(self, thread: EngineThread, clock: Callable[[], float]) -> None:
        self._thread = thread
        self._clock = clock
        self._added: queue.SimpleQueue[PromptTask] = queue.SimpleQueue()
        self._tasks: dict[ServiceTier, deque[PromptTask]] = {tier: deque() for tier in TIERS}
        self._turn_ends_s = 0.0
        self.failure: BaseException | None = None
        """The error of the engine, until it computes a token; errors of one answer alone are its own."""
        thread.background.append(self)

    # -- any thread ----------------------------------------------------------------------------------

    def add(self, task: PromptTask) -> None:
        """Run a task.

        Raises:
            EngineError: The model is closed.
        """
        self._added.put(task)
        self._thread.submit(self._take_added)

    def wake(self) -> None:
        """Look again for tasks that are ready or cancelled."""
        self._thread.wake()

    def close(self) -> None:
        """End all tasks early, and run no others."""

        def end() -> None:
            if self in self._thread.background:
                self._thread.background.remove(self)
            self._end_all()

        with contextlib.suppress(EngineError):  # a closed model has ended them
            self._thread.run(end)

    # -- the engine thread ---------------------------------------------------------------------------

    def step(self) -> bool:
        """Run the turn of a task; return whether one was ready."""
        task = self._next()
        if task is None:
            return False
        self._turn_ends_s = time.monotonic() + TURN_S
        try:
            if not task.cancelled and self._turn(task):
                return True
        except Exception as error:  # noqa: BLE001 - the reader gets it
            task.fail(error)
        except BaseException as error:  # noqa: BLE001 - a library's panic would end the reader's loop
            task.fail(RuntimeError(f"{type(error).__name__}: {error}"))
        self._end(task)
        return True

    def stop(self, error: EngineError) -> None:
        """End all tasks with an error."""
        self.failure = error
        for tasks in self._tasks.values():
            for task in tasks:
                task.fail(error)
        self._end_all()

    def _take_added(self) -> None:
        while not self._added.empty():
            task = self._added.get()
            self._tasks[task.tier].append(task)

    def _next(self) -> PromptTask | None:
        """Return the task whose turn it is, and put it behind the others of its tier."""
        for tasks in self._tasks.values():
            for _ in range(len(tasks)):
                tasks.rotate(-1)
                if _is_ready(tasks[-1]):
                    return tasks[-1]
        return None

    def _turn(self, task: PromptTask) -> bool:
        """Go on with the prompt, or run a pass of each answer; return whether there is more to do."""
        if not task.sessions:
            session = self._engine(task.take_session)
            task.sessions.append(session)
            task.answers[0].begin(session)
            rest = task.answers[0].rest
            task.prompt = session.prefill_in_turns(rest, partial(self._wanted, task, len(rest)))
        if task.prompt is not None:
            begin_s = self._clock()
            if self._engine(next, task.prompt, self) is not None:  # its end
                task.prompt, task.read_fraction = None, 1.0
            task.read(self._clock() - begin_s)
            if task.prompt is not None:
                return True
            self._first_tokens(task)
        else:
            for number in task.running:
                begin_s = self._clock()
                ids = self._engine(task.answers[number].next_input)
                logits = self._engine(task.sessions[number].decode_in_place, ids)
                self._accept(task, number, logits, begin_s)
        task.running = [number for number in task.running if task.answers[number].result is None]
        return bool(task.running)

    def _first_tokens(self, task: PromptTask) -> None:
        """Begin the answers behind their prompt, whose logits the next pass overwrites."""
        logits = task.sessions[0].last_logits
        task.sessions += [self._engine(task.copy_session) for _ in task.answers[1:]]
        for number, answer in enumerate(task.answers):
            begin_s = self._clock()
            if number:
                answer.begin(task.sessions[number])
            task.running.append(number)
            self._accept(task, number, logits, begin_s)

    def _accept(self, task: PromptTask, number: int, logits: NDArray[np.float32], begin_s: float) -> None:
        sequence, session = task.answers[number], task.sessions[number]
        try:
            steps = sequence.accept(logits) if sequence.result is None else ()
        except Exception as error:
            if not np.isfinite(logits.max()):
                self.failure = error
            raise
        finally:
            if session.position > sequence.held:
                session.truncate(sequence.held)
        self.failure = None
        task.put(number, steps, self._clock() - begin_s)

    def _engine(self, call: Callable[..., T], *arguments: object) -> T:
        """Run a part of the engine's work, and note its error."""
        try:
            return call(*arguments)
        except InputError:
            raise
        except BaseException as error:
            self.failure = error
            raise

    def _wanted(self, task: PromptTask, tokens: int, part: float) -> bool:
        """Whether a task in a prompt of so many tokens, of which it has computed a part, lets others run."""
        task.read_fraction = part
        if task.cancelled:
            return True
        self._take_added()
        for tier in TIERS[: TIERS.index(task.tier)]:
            if any(map(_is_ready, self._tasks[tier])):
                return True
        if tokens <= SHORT_TOKENS or time.monotonic() < self._turn_ends_s:
            return False
        return any(_is_ready(other) for other in self._tasks[task.tier] if other is not task)

    def _end(self, task: PromptTask) -> None:
        self._tasks[task.tier].remove(task)
        task.prompt = None
        for number in task.running:
            if task.answers[number].result is None:
                task.answers[number].end("cancelled")
        try:
            task.close()
        except Exception as error:  # noqa: BLE001 - it must not end the engine thread
            self.failure = error

    def _end_all(self) -> None:
        for tasks in self._tasks.values():
            for task in tuple(tasks):
                self._end(task)


def _is_ready(task: PromptTask) -> bool:
    return task.cancelled or not task.is_slow
