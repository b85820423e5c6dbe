"""Turns on the engine thread by urgency: prompts take turns, answers share passes, slow readers wait."""

from __future__ import annotations

import contextlib
import queue
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import numpy as np
from numpy.typing import NDArray

from heterollm.base import EngineError, InputError
from heterollm.engine.beside import Beside, PassBeside
from heterollm.engine.pass_times import NEWEST, PassTimes
from heterollm.engine.reading import QueuePace
from heterollm.engine.row_limits import RowLimits
from heterollm.engine.session import Session
from heterollm.engine.shared_guesses import choose_guesses
from heterollm.engine.thread import EngineThread
from heterollm.kernels.gpu import GpuRuntime
from heterollm.text import GenerationStep, TokenSequence

T = TypeVar("T")

ServiceTier: TypeAlias = Literal["priority", "default", "flex"]
TIERS: Final[tuple[ServiceTier, ...]] = get_args(ServiceTier)
"""From the most to the least urgent, named as OpenAI's service tiers."""

TURN_S: Final = 0.05
"""Time that a prompt may take before another prompt of its tier has a turn."""

SHORT_TOKENS: Final = 64
"""Tokens of a prompt that no other prompt of its tier interrupts: it ends soon."""

USUAL_GAPS: Final = 4.0
"""Usual times between two tokens for which prompts of its tier may keep an answer waiting by default."""

LEAST_PROMPT_S: Final = 0.01
"""Time that prompts have between two passes at least: a pause copies what later layers read."""


@dataclass(eq=False)
class PromptTask(ABC):
    """A prompt and its answers; the engine thread calls the methods.

    Args:
        tier: Its urgency.
        answers: The answers, all to the same prompt.
        reproducible: Whether they must not depend on other tasks.
        cancelled: Set by any thread to end the task at its next turn.
        sessions: Those of the answers, of the first one alone until the prompt is read.
        prompt: The work on the prompt, until it is read.
        read_fraction: Part of it whose kernels are enqueued.
        running: Numbers of the answers behind the prompt that have not ended.
    """

    tier: ServiceTier
    answers: Sequence[TokenSequence]
    reproducible: bool
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


class Row(NamedTuple):
    """An answer whose next token a pass computes, as its number in a task."""

    task: PromptTask
    number: int

    @property
    def answer(self) -> TokenSequence:
        """The answer."""
        return self.task.answers[self.number]

    @property
    def session(self) -> Session:
        """Its session."""
        return self.task.sessions[self.number]

    @property
    def runs(self) -> bool:
        """Whether neither the answer nor its task has ended."""
        return self.number in self.task.running


class Scheduler:
    """Runs tasks between the calls of an engine thread.

    A task runs while no task of a more urgent tier can. All answers of a tier that are behind their prompts
    get their tokens in passes of several sessions, whose other rows check guesses. Its prompts take turns in
    between, so long that no answer waits for more than some usual times between two passes.

    Args:
        thread: The engine thread.
        clock: Returns the seconds of the device.
        limits: Rows of a pass. A reproducible answer shares only passes that change no bit of it.
        gaps: Those usual times, at least 1.
        gpu: The GPU, whose progress with a prompt tells the time; None for a clock that goes on by itself.
        beside: Whether its passes run beside prompts, as far as the NPU reads these; else all have turns.
    """

    def __init__(
        self,
        thread: EngineThread,
        clock: Callable[[], float],
        limits: RowLimits,
        *,
        gaps: float = USUAL_GAPS,
        gpu: GpuRuntime | None = None,
        beside: bool = True,
    ) -> None:
        self._thread = thread
        self._clock = clock
        self._gaps = gaps
        self.shares_exactly = limits.exact > 1
        """Whether reproducible answers share passes."""
        self._takes_guesses = limits.takes_guesses
        # All others then share these.
        self._most_rows = limits.exact if self.shares_exactly else limits.most
        self._added: queue.SimpleQueue[PromptTask] = queue.SimpleQueue()
        self._tasks: dict[ServiceTier, deque[PromptTask]] = {tier: deque() for tier in TIERS}
        self._turn_ends_s = self._due_s = 0.0
        self._gap_s = 0.0
        self._beside = Beside(gpu, self) if beside and gpu is not None else None
        self._pace = None if gpu is None else QueuePace(gpu, clock)
        self._reading: PromptTask | None = None
        # What the answers beside a prompt still need until each has a token more; the first pass may run.
        self._round: deque[Sequence[Row]] = deque()
        self._enqueued: Mapping[Row, Any] = {}
        self._began_s = 0.0
        self._times = PassTimes()
        self.passes = 0
        """Decode passes so far."""
        self.rows = 0
        """Answers of these passes: as many as passes if no answers shared one."""
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
        """Run a turn of the most urgent tier; return whether one of its tasks was ready."""
        for tasks in self._tasks.values():
            ready = [task for task in tasks if _is_ready(task)]
            if not ready:
                continue
            cancelled = [task for task in ready if task.cancelled]
            reading = [task for task in ready if not task.running]
            writing = [task for task in ready if task.running]
            if cancelled:
                for task in cancelled:
                    self._end(task)
            elif writing and not (reading and self._clock() < self._due_s):
                self._write(writing)
            else:
                tasks.remove(reading[0])
                tasks.append(reading[0])
                self._read(reading[0])
            return True
        return False

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

    @contextlib.contextmanager
    def _ending(self, tasks: Iterable[PromptTask]) -> Iterator[None]:
        """End tasks with the error that is raised in the context."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - the readers get it
            # A library's panic would end a reader's loop.
            own = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
            for task in dict.fromkeys(tasks):
                task.fail(own)
                self._end(task)

    def _read(self, task: PromptTask) -> None:
        """Go on with a prompt; behind its end begin the answers."""
        self._turn_ends_s = self._clock() + TURN_S
        with self._ending([task]):
            if not task.sessions:
                session = self._engine(task.take_session)
                task.sessions.append(session)
                task.answers[0].begin(session)
                rest = task.answers[0].rest
                wanted = partial(self._wanted, task, len(rest))
                task.prompt = session.prefill_in_turns(rest, wanted, self._beside)
            assert task.prompt is not None  # the task would be writing
            begin_s = self._clock()
            self._reading = task
            if self._pace is not None:
                self._pace.begin()
            if self._engine(next, task.prompt, self) is not None:  # its end
                task.prompt, task.read_fraction = None, 1.0
            task.read(self._clock() - begin_s)
            if task.prompt is None:
                self._first_tokens(task)
                self._end_if_done(task)

    def _write(self, tasks: Sequence[PromptTask]) -> None:
        """Compute a token of each answer of these tasks, and one more for each right guess."""
        rows = [Row(task, number) for task in tasks for number in task.running]
        session, begin_s = rows[0].session, self._clock()
        prepared_s = session.prepared_s
        self._round.clear()
        for some in self._passes(rows):
            self._pass([row for row in some if row.runs])
        for task in tasks:
            if task.running:
                self._end_if_done(task)
        took_s = self._clock() - begin_s - (session.prepared_s - prepared_s)
        self._gap_s += (took_s - self._gap_s) * (NEWEST if self._gap_s else 1.0)
        self._wait()

    def _passes(self, rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
        """Yield the rows of the passes in which each of these answers gets a token."""
        alone = [row for row in rows if self._runs_alone(row)]
        shared = [row for row in rows if row not in alone]
        yield from ([row] for row in alone)
        for some in _divided(shared, self._most_rows):
            yield from [some] if self._times.pays(len(some)) else [[row] for row in some]

    def _wait(self) -> None:
        """Let prompts run until the answers, each of which has a new token, are due."""
        self._due_s = self._clock() + max(LEAST_PROMPT_S, (self._gaps - 1) * self._gap_s)

    def _runs_alone(self, row: Row) -> bool:
        if row.answer.guesses and not self._takes_guesses:
            return True
        return row.task.reproducible and not self.shares_exactly

    def _pass(self, rows: Sequence[Row]) -> None:
        """Run a pass of some answers; an error of one of them ends its task alone."""
        begin_s = self._clock()
        ids = self._inputs(rows, self._guesses(rows) if len(rows) > 1 else [None])
        rows = list(ids)
        if not rows:
            return
        prepared_s, guessed_s = rows[0].session.prepared_s, self._clock()
        with self._ending([row.task for row in rows]):
            if len(rows) == 1:
                logits = [self._engine(rows[0].session.decode_in_place, ids[rows[0]])]
            else:
                sessions = [row.session for row in rows]
                logits = self._engine(Session.decode_together, sessions, list(ids.values()))
            ended_s, count = self._clock(), sum(map(np.size, ids.values()))
            # Alone, guesses have other kernels, and recurrent state runs right ones again.
            alone = len(rows) == 1 and rows[0].answer.guesses and (count > 1 or not self._takes_guesses)
            is_usual = not alone and rows[0].session.prepared_s == prepared_s
            self._times.learn(count, ended_s - guessed_s if is_usual else None)
            self._accept_rows(rows, logits, ended_s - begin_s)

    def _guesses(self, rows: Sequence[Row], *, beside: bool = False) -> Sequence[int]:
        """Return the number of guesses of each answer in a pass that they share, maybe beside a prompt."""
        offers = [row.answer.offer() for row in rows]
        if beside:  # where a draft's passes would wait for the chunk
            offers = [None if offer is None or offer.runs_passes else offer for offer in offers]
        return choose_guesses(offers, self._most_rows, self._times)

    def _inputs(self, rows: Iterable[Row], guesses: Iterable[int | None]) -> dict[Row, Any]:
        """Return the answers that a pass computes, with their inputs; those that have none end."""
        ids: dict[Row, Any] = {}
        for row, count in zip(rows, guesses, strict=True):
            with self._ending([row.task]):
                ids[row] = self._engine(row.answer.next_input, count)
        return {row: token for row, token in ids.items() if row.runs}

    def _accept_rows(self, rows: Sequence[Row], logits: Iterable[NDArray[np.float32]], took_s: float) -> None:
        """Take the logits of a pass; an error of one answer ends its task alone."""
        self.passes += 1
        self.rows += len(rows)
        each_s = took_s / len(rows)
        for row, own in zip(rows, logits, strict=True):
            with self._ending([row.task]):
                if row.runs:
                    self._accept(row.task, row.number, own, self._clock() - each_s)

    # -- passes beside a prompt ----------------------------------------------------------------------

    def begin_beside(self, left_s: float) -> PassBeside | None:
        """Begin the next pass of the answers of the prompt's tier; see :class:`PassSource`."""
        assert self._beside is not None  # as it asks
        assert self._reading is not None
        others = [task for task in self._tasks[self._reading.tier] if task is not self._reading]
        for task in others:
            if task.running and task.cancelled:
                self._end(task)
        rows = self._next_round(others)
        took_s = self._times.usual_s(len(rows))
        is_usual = self._takes_guesses or not any(row.answer.guesses for row in rows)
        self._beside.attends = took_s is not None and is_usual
        if not rows or took_s is None or not self._beside.attends:
            return None
        prompts_wait = any(not task.running and _is_ready(task) for task in others)
        pays = took_s <= left_s and not (prompts_wait and self._clock() >= self._turn_ends_s)
        if not (pays or self.is_due):
            return None
        with self._ending([row.task for row in rows]):
            ids = self._inputs(rows, self._guesses(rows, beside=True))
            sessions = [row.session for row in ids]
            begun = self._engine(Session.begin_beside, sessions, list(ids.values())) if ids else None
            self._beside.attends = begun is not None or not ids
            if begun is not None:
                begun.seconds = self._times.usual_s(sum(map(np.size, ids.values()))) or took_s
                self._enqueued, self._began_s = ids, self._clock()
            return begun
        return None

    def _next_round(self, tasks: Sequence[PromptTask]) -> Sequence[Row]:
        """Return the rows of the next pass beside a prompt; none if no answer runs."""
        while True:
            while self._round:
                if rows := [row for row in self._round[0] if row.runs]:
                    return rows
                self._round.popleft()
            ready = [Row(task, number) for task in tasks if _is_ready(task) for number in task.running]
            if not ready:
                return ready
            self._round.extend(self._passes(ready))

    @property
    def is_due(self) -> bool:
        """Whether answers have waited so long that their pass takes no account of the prompt."""
        return self._clock() >= self._due_s

    def accept_beside(self, logits: NDArray[np.float32]) -> None:
        """Take the logits of the pass."""
        rows = self._end_beside()
        own = Session.append_beside([row.session for row in rows], list(self._enqueued.values()), logits)
        self._accept_rows(rows, own, self._clock() - self._began_s)
        for task in dict.fromkeys(row.task for row in rows):
            if task.running:
                self._end_if_done(task)

    def fail_beside(self, error: BaseException) -> None:
        """Take the error of the pass, which ends its tasks."""
        self.failure = error
        with self._ending([row.task for row in self._end_beside()]):
            raise error

    def _end_beside(self) -> Sequence[Row]:
        """Return the rows of the pass, behind which the next one may begin."""
        self._round.popleft()
        if not self._round:
            self._wait()
        return list(self._enqueued)

    def _end_if_done(self, task: PromptTask) -> None:
        """End a task whose answers have all ended."""
        task.running = [number for number in task.running if task.answers[number].result is None]
        if not task.running:
            self._end(task)

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
        beside, others = self._beside, [other for other in self._tasks[task.tier] if other is not task]
        attends = beside is not None and beside.attends
        if not attends and any(other.running and _is_ready(other) for other in others):
            ends_s = self._clock() if self._pace is None else self._pace.keep()
            if ends_s >= self._due_s:
                return True
        now_s = self._clock()
        runs = beside is not None and beside.runs
        if tokens <= SHORT_TOKENS or now_s < self._turn_ends_s or runs:
            return False
        return any(not other.running and _is_ready(other) for other in others)

    def _end(self, task: PromptTask) -> None:
        self._tasks[task.tier].remove(task)
        task.prompt = None
        for row in [Row(task, number) for number in task.running]:
            if row.answer.result is None:
                row.answer.end("cancelled")
            if row.session.position > row.answer.held:
                # Guesses of a pass in which another answer of the task failed.
                row.session.truncate(row.answer.held)
        task.running = []
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


def _divided(rows: Sequence[Row], most: int) -> Iterator[Sequence[Row]]:
    """Yield the rows of passes that are alike long, and have at most so many rows."""
    passes = -(-len(rows) // most)
    for number in range(passes):
        yield rows[len(rows) * number // passes : len(rows) * (number + 1) // passes]
