"""No order of the steps of a reader and of the engine, with its scheduler, lets them wait for one another.

An explorer runs the real code again and again, each time in another order of its lines. Its threads are
real, but only one has the turn: it gives it away before each line of the watched functions, and where it
would block. All orders with few preemptions are tried (Musuvathi and Qadeer, "Iterative context bounding for
systematic testing of multithreaded programs", 2007).
"""

from __future__ import annotations

import queue
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

import pytest

from heterollm.engine import EngineThread, PromptTask, Scheduler
from heterollm.engine import thread as thread_room
from heterollm.engine.row_limits import RowLimits
from heterollm.serve import channel as channel_room
from heterollm.serve.channel import Channel

EVENTS = 3
"""More than a full channel."""

PREEMPTIONS = 2

HANG_S = 60.0


class StuckError(AssertionError):
    """All threads wait for one another, for ever."""


class _EndedError(BaseException):
    """Ends a thread of a run that is over."""


class Actor:
    """A thread of the explored program; it runs while it has the turn."""

    def __init__(self, name: str, call: Callable[[], None], run: Run) -> None:
        self.name, self.ready, self.done = name, lambda: True, False
        self._call, self._run = call, run
        self.turn = threading.Semaphore(0)
        self.thread = threading.Thread(target=self._main, daemon=True)
        self.error: BaseException | None = None

    def _main(self) -> None:
        self.turn.acquire()
        try:
            sys.settrace(self._trace)
            self._call()
        except _EndedError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised by the explorer
            self.error = error
        finally:
            sys.settrace(None)
            self.done = True
            self._run.main.release()

    def _trace(self, frame: FrameType, event: str, _value: Any) -> Any:
        if frame.f_code not in self._run.watched:
            return None
        if event == "line":
            self.pause()
        return self._trace

    def pause(self, ready: Callable[[], bool] = lambda: True) -> None:
        """Give the turn away until the schedule returns it, which needs the condition."""
        if self._run.over:
            raise _EndedError
        self.ready = ready
        self._run.main.release()
        self.turn.acquire()
        if self._run.over:
            raise _EndedError


class Run:
    """One run of a program.

    Args:
        watched: The code whose lines are steps.
        choices: Indices of the actors at the first steps; later steps stay with the actor, or take the first.
    """

    def __init__(self, watched: set[CodeType], choices: Sequence[int]) -> None:
        self.watched, self.over = watched, False
        self.main = threading.Semaphore(0)
        self.actors: list[Actor] = []
        self.current: Actor | None = None
        self._choices = choices
        self.steps: list[tuple[int, list[int], int]] = []
        """Of each step: the chosen actor, the ready ones, and the one before, or -1 if it is not ready."""

    def start(self, name: str, call: Callable[[], None]) -> Actor:
        """Add an actor."""
        actor = Actor(name, call, self)
        self.actors.append(actor)
        return actor

    def wait(self, ready: Callable[[], bool]) -> None:
        """Block the running actor until a condition holds."""
        assert self.current is not None
        self.current.pause(ready)

    def finish(self, done: Callable[[], bool]) -> None:
        """Run to the end.

        Raises:
            StuckError: No actor can go on, and the program is not done.
        """
        try:
            last = -1
            while True:
                ready = [i for i, one in enumerate(self.actors) if not one.done and one.ready()]
                for one in self.actors:
                    if one.error is not None:
                        raise one.error
                if not ready:
                    if not done():
                        names = [one.name for one in self.actors if not one.done]
                        raise StuckError(f"{' and '.join(names)} wait for ever")
                    return
                number = len(self.steps)
                before = last if last in ready else -1
                wanted = self._choices[number] if number < len(self._choices) else max(before, -1)
                chosen = wanted if wanted in ready else ready[0]
                self.steps.append((chosen, ready, before))
                last = chosen
                actor = self.current = self.actors[chosen]
                if not actor.thread.is_alive():
                    actor.thread.start()
                actor.turn.release()
                assert self.main.acquire(timeout=HANG_S)
        finally:
            self.over = True
            for one in self.actors:
                if one.thread.is_alive():
                    one.turn.release()
                    one.thread.join(HANG_S)


def explore(program: Callable[[Run], Callable[[], bool]], watched: set[CodeType], preemptions: int) -> int:
    """Run a program in every order of its steps with some preemptions at most; return the number of runs.

    Args:
        program: Adds the actors to a run, and returns a function that says whether all work is done.
        watched: The code whose lines are steps.
        preemptions: Times at most that an actor loses its turn although it could go on.

    Raises:
        StuckError: In some order the actors wait for ever.
    """
    waiting: list[list[int]] = [[]]
    runs = 0
    while waiting:
        choices = waiting.pop()
        run = Run(watched, choices)
        done = program(run)
        run.finish(done)
        runs += 1
        waiting += _others(run, choices, preemptions)
    return runs


def _others(run: Run, choices: Sequence[int], preemptions: int) -> Iterator[list[int]]:
    """Yield the beginnings of runs that differ from this one, first behind its own beginning."""
    made = [chosen for chosen, _, _ in run.steps]
    lost = 0
    for number, (chosen, ready, before) in enumerate(run.steps):
        if number >= len(choices):
            for other in ready:
                if other != chosen and lost + (before not in (-1, other)) <= preemptions:
                    yield [*made[:number], other]
        lost += before not in (-1, chosen)


class ComparesBeforeItDrains(Channel):
    """Wakes the engine if the channel was full before the reader took its events."""

    async def read(self) -> list[Any] | None:
        await self._filled.wait()
        self._filled.clear()
        self._signalled = False
        was_full = self.full
        events = [self._events.popleft() for _ in range(len(self._events))]
        if was_full:
            self._wake()
        return events


class CountsWhatItDrains(Channel):
    """Wakes the engine if the reader took a whole channel, though the engine may have filled it meanwhile."""

    async def read(self) -> list[Any] | None:
        await self._filled.wait()
        self._filled.clear()
        self._signalled = False
        count = len(self._events)
        events = [self._events.popleft() for _ in range(count)]
        if len(events) >= channel_room.MOST_EVENTS:
            self._wake()
        return events


class ForgetsToSignal(Channel):
    """Allows the next signal after it has drained, so that an event in between has none."""

    async def read(self) -> list[Any] | None:
        await self._filled.wait()
        self._filled.clear()
        events = [self._events.popleft() for _ in range(len(self._events))]
        self._signalled = False
        self._wake()
        return events


class Calls:
    """The queue of the engine thread, whose waits are steps of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._calls: list[Any] = []

    def put(self, call: Any) -> None:
        self._calls.append(call)

    def empty(self) -> bool:
        return not self._calls

    def get(self, timeout: None = None) -> Any:
        self._run.wait(lambda: bool(self._calls))
        return self._calls.pop(0)


class Loop:
    """The part of asyncio that a channel uses, on the reader's actor: events, and calls of other threads."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._calls: list[Callable[[], None]] = []

    def get_running_loop(self) -> Loop:
        return self

    def call_soon_threadsafe(self, call: Callable[[], None]) -> None:
        self._calls.append(call)

    def Event(self) -> Event:
        return Event()

    def run_until_complete(self, work: Any) -> Any:
        try:
            while True:
                event = work.send(None)
                while not event.is_set:
                    self._run.wait(lambda: bool(self._calls))
                    while self._calls:
                        self._calls.pop(0)()
        except StopIteration as end:
            return end.value


class Event:
    is_set = False

    def set(self) -> None:
        self.is_set = True

    def clear(self) -> None:
        self.is_set = False

    @types.coroutine
    def wait(self) -> Iterator[Event]:
        if not self.is_set:
            yield self


class Answer:
    """An answer of some tokens, and its session."""

    rest, held, position, last_logits = (), 0, 0, None
    guesses, prepared_s = False, 0.0

    def __init__(self) -> None:
        self.result: str | None = None
        self._count = 0

    def begin(self, _session: object) -> None:
        pass

    def next_input(self, _guesses: int | None) -> int:
        return 0

    def accept(self, _logits: object) -> tuple[int]:
        self._count += 1
        self.result = "ended" if self._count == EVENTS else None
        return (self._count - 1,)

    def prefill_in_turns(self, *_: object) -> Iterator[None]:
        return iter(())

    def decode_in_place(self, _token: int) -> None:
        pass


class ChannelTask(PromptTask):
    """The answer for a reader."""

    def __init__(self, channel: Channel) -> None:
        self.answer: Any = Answer()
        super().__init__("default", [self.answer], reproducible=True)
        self.channel = channel

    @property
    def is_slow(self) -> bool:
        return self.channel.full

    def take_session(self) -> Any:
        return self.answer

    def put(self, _number: int, steps: Sequence[Any], _seconds: float) -> None:
        for step in steps:
            self.channel.put(step, urgent=step == EVENTS - 1)

    copy_session: Any = None
    read = fail = close = lambda *_: None


def program_of(
    kind: type[Channel], monkeypatch: pytest.MonkeyPatch, batch: int = 1
) -> Callable[[Run], Callable[[], bool]]:
    """Return a program with one task: a reader, and the engine thread."""

    def program(run: Run) -> Callable[[], bool]:
        got: list[int] = []
        loop = Loop(run)

        class Thread:
            """The engine's."""

            def __init__(self, *, target: Callable[..., None], args: Any, **_options: object) -> None:
                run.watched.add(target.__code__)
                run.start("the engine", lambda: target(*args))

            def start(self) -> None:
                pass

        threads = types.SimpleNamespace(Thread=Thread, Lock=threading.Lock)
        queues = types.SimpleNamespace(SimpleQueue=lambda: Calls(run), Empty=queue.Empty)
        with monkeypatch.context() as patch:
            patch.setattr(thread_room, "threading", threads)
            patch.setattr(thread_room, "queue", queues)
            patch.setattr(channel_room, "asyncio", loop)
            scheduler = Scheduler(EngineThread(), lambda: 0.0, RowLimits(1, 1))
            channel = kind(scheduler.wake, batch)
        scheduler.add(ChannelTask(channel))

        async def read() -> None:
            while len(got) < EVENTS:
                events = await channel.read()
                assert events or kind is not Channel  # at least one
                got.extend(events or ())

        def reader() -> None:
            loop.run_until_complete(read())
            assert got == list(range(EVENTS))

        run.start("the reader", reader)
        return lambda: len(got) == EVENTS

    return program


def watched(kind: type[Channel]) -> set[CodeType]:
    """Return the code of a channel, with its comprehensions."""
    full: Any = Channel.full
    codes = [kind.read.__code__, Channel.put.__code__, full.fget.__code__, EngineThread.wake.__code__]
    inner = (constant for code in codes for constant in code.co_consts if isinstance(constant, CodeType))
    return {*codes, *inner}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A channel of two events."""
    monkeypatch.setattr(channel_room, "MOST_EVENTS", 2)


@pytest.mark.parametrize("batch", [1, 2])
def test_no_order_of_reader_and_engine_waits_for_ever(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = explore(program_of(Channel, monkeypatch, batch), watched(Channel), PREEMPTIONS)
    assert runs > 200


@pytest.mark.parametrize("kind", [ComparesBeforeItDrains, CountsWhatItDrains])
def test_the_explorer_finds_lost_wake_ups(kind: type[Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StuckError, match="the engine and the reader"):
        explore(program_of(kind, monkeypatch), watched(kind), PREEMPTIONS)


def test_the_explorer_finds_an_event_without_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StuckError):
        explore(program_of(ForgetsToSignal, monkeypatch), watched(ForgetsToSignal), PREEMPTIONS)
