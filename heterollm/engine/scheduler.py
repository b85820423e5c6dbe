"""Turns on the engine thread by urgency: prompts take turns, answers share passes, slow readers wait."""

from __future__ import annotations

import contextlib
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from heterollm.base import EngineError, InputError
from heterollm.engine.beside import Beside, PassBeside
from heterollm.engine.pass_times import PassTimes
from heterollm.engine.reading import QueuePace
from heterollm.engine.row_limits import RowLimits
from heterollm.engine.session import Session
from heterollm.engine.shared_guesses import choose_guesses
from heterollm.engine.tasks import TIERS, PromptTask, Row, ServiceTier, divided, is_ready
from heterollm.engine.thread import EngineThread
from heterollm.engine.turn_times import USUAL_GAPS, TurnTimes
from heterollm.kernels.gpu import GpuRuntime

T = TypeVar("T")


SHORT_TOKENS: Final = 64
"""Tokens of a prompt that no other prompt of its tier interrupts: it ends soon."""


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
        self.shares_exactly = limits.exact > 1
        """Whether reproducible answers share passes."""
        self._takes_guesses = limits.takes_guesses
        # All others then share these.
        self._most_rows = limits.exact if self.shares_exactly else limits.most
        self._added: queue.SimpleQueue[PromptTask] = queue.SimpleQueue()
        self._tasks: dict[ServiceTier, deque[PromptTask]] = {tier: deque() for tier in TIERS}
        self._turns = TurnTimes(clock, gaps)
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
            ready = [task for task in tasks if is_ready(task)]
            if not ready:
                continue
            cancelled = [task for task in ready if task.cancelled]
            reading = [task for task in ready if not task.running]
            writing = [task for task in ready if task.running]
            if cancelled:
                for task in cancelled:
                    self._end(task)
            elif writing and (not reading or self.is_due):
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
        self._turns.begin()
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
        self._turns.learn(self._clock() - begin_s - (session.prepared_s - prepared_s))
        self._turns.wait()

    def _passes(self, rows: Sequence[Row]) -> Iterator[Sequence[Row]]:
        """Yield the rows of the passes in which each of these answers gets a token."""
        alone = [row for row in rows if self._runs_alone(row)]
        shared = [row for row in rows if row not in alone]
        yield from ([row] for row in alone)
        for some in divided(shared, self._most_rows):
            yield from [some] if self._times.pays(len(some)) else [[row] for row in some]

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
                    self._accept(row, own, self._clock() - each_s)

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
        prompts_wait = any(not task.running and is_ready(task) for task in others)
        pays = took_s <= left_s and not (prompts_wait and self._turns.has_ended)
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
            ready = [Row(task, number) for task in tasks if is_ready(task) for number in task.running]
            if not ready:
                return ready
            self._round.extend(self._passes(ready))

    @property
    def is_due(self) -> bool:
        """Whether answers have waited so long that their pass takes no account of the prompt."""
        return self._turns.is_due()

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
            self._turns.wait()
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
            self._accept(Row(task, number), logits, begin_s)

    def _accept(self, row: Row, logits: NDArray[np.float32], begin_s: float) -> None:
        try:
            steps = row.answer.accept(logits) if row.answer.result is None else ()
        except Exception as error:
            if not np.isfinite(logits.max()):
                self.failure = error
            raise
        finally:
            row.forget_guesses()
        self.failure = None
        row.task.put(row.number, steps, self._clock() - begin_s)

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
            if any(map(is_ready, self._tasks[tier])):
                return True
        beside, others = self._beside, [other for other in self._tasks[task.tier] if other is not task]
        attends = beside is not None and beside.attends
        if not attends and any(other.running and is_ready(other) for other in others):
            ends_s = self._clock() if self._pace is None else self._pace.keep()
            if self._turns.is_due(ends_s):
                return True
        turn_ended = self._turns.has_ended
        runs = beside is not None and beside.runs
        if tokens <= SHORT_TOKENS or not turn_ended or runs:
            return False
        return any(not other.running and is_ready(other) for other in others)

    def _end(self, task: PromptTask) -> None:
        self._tasks[task.tier].remove(task)
        task.end_answers()
        try:
            task.close()
        except Exception as error:  # noqa: BLE001 - it must not end the engine thread
            self.failure = error

    def _end_all(self) -> None:
        for tasks in self._tasks.values():
            for task in tuple(tasks):
                self._end(task)
