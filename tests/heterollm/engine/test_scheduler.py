"""Turns of prompts and answers, with sessions that take time of a clock and compute nothing."""

from __future__ import annotations

import statistics
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from heterollm.base import GraphError
from heterollm.engine import USUAL_GAPS, PromptTask, Scheduler, Session
from heterollm.engine.row_limits import RowLimits
from heterollm.text import GuessOffer, GuessPace

PASS_S, LAYER_S = 0.02, 0.004
"""Time of a decode pass, and between two places at which a prompt may pause."""


LIMITS = RowLimits(16, 8)


@dataclass
class World:
    """The clock, and the turns so far: ``P`` and a prompt's name, or the names of the answers in a pass."""

    now_s: float = 0.0
    turns: list[str] = field(default_factory=list)
    fails: bool = False
    row_s: float = 0.0
    """Time of each further row of a pass."""

    def decode(self, answers: Sequence[Stub], ids: Sequence[Any]) -> list[np.ndarray]:
        names = [answer.name * np.size(own) for answer, own in zip(answers, ids, strict=True)]
        self.turns.append("".join(names))
        self.now_s += PASS_S + self.row_s * (len(self.turns[-1]) - 1)
        if self.fails:
            raise GraphError("the device is gone")
        for answer, own in zip(answers, ids, strict=True):
            answer.position += np.size(own)
        return [np.zeros(len(own)) for own in names]


class Stub:
    """An answer and its session; guesses, if it expects some to be right, are all right."""

    prepared_s = 0.0

    def __init__(self, world: World, name: str, tokens: int, layers: int, *, chance: float = 0.0) -> None:
        self.world, self.name, self.guesses = world, name, chance > 0
        self._offer = GuessOffer(GuessPace([1.0] * 16, (chance,)), 0, 15) if chance else None
        self.rest, self.position, self.held, self.last_logits = range(64 * layers), 0, 0, np.zeros(1)
        self.result: str | None = None
        self.times_s: list[float] = []
        self.breaks_at: int | None = None
        self._left, self._layers = tokens, layers

    def begin(self, _session: object) -> None:
        pass

    def end(self, reason: str) -> None:
        self.result = reason

    def offer(self) -> GuessOffer | None:
        return self._offer

    def next_input(self, guesses: int | None) -> Any:
        return np.full(1 + guesses, 7) if guesses else 7

    def accept(self, logits: np.ndarray) -> tuple[int, ...]:
        if len(self.times_s) == self.breaks_at:
            raise ValueError("no token is allowed")
        self.held += len(logits) if self.times_s else 0  # the session does not hold the last token
        self.times_s.append(self.world.now_s)
        self._left -= len(logits)
        self.result = None if self._left > 0 else "length"
        return (1,) * len(logits)

    def truncate(self, position: int) -> None:
        self.position = position

    def prefill_in_turns(
        self, _ids: object, wanted: Callable[[float], bool], _beside: None
    ) -> Iterator[None]:
        for layer in range(self._layers):
            self.world.now_s += LAYER_S
            if not self.world.turns or self.world.turns[-1] != f"P{self.name}":
                self.world.turns.append(f"P{self.name}")
            if wanted(layer / self._layers):
                yield

    def decode_in_place(self, ids: Any) -> np.ndarray:
        return self.world.decode([self], [ids])[0]


class Task(PromptTask):
    def __init__(self, *answers: Stub, reproducible: bool = False) -> None:
        super().__init__("default", answers, reproducible)  # type: ignore[arg-type]
        self.errors: list[str] = []
        self.slow = self.closed = False

    @property
    def is_slow(self) -> bool:
        return self.slow

    def take_session(self) -> Any:
        return self.answers[0]

    def copy_session(self) -> Any:
        return self.answers[len(self.sessions)]

    def fail(self, error: Exception, /) -> None:
        self.errors.append(str(error))

    def close(self) -> None:
        assert not self.closed
        self.closed = True

    read = put = lambda *_: None


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()

    monkeypatch.setattr(Session, "decode_together", staticmethod(made.decode))
    return made


@pytest.fixture
def run(world: World) -> Callable[..., Scheduler]:
    """Return a function that runs tasks to their ends, and calls a function before each turn."""

    def run_all(
        *tasks: Task,
        limits: RowLimits = LIMITS,
        before: Callable[[int], None] = lambda _: None,
        gaps: float = USUAL_GAPS,
    ) -> Scheduler:
        thread: Any = types.SimpleNamespace(background=[], submit=lambda call: call())
        scheduler = Scheduler(thread, lambda: world.now_s, limits, gaps=gaps)
        for task in tasks:
            scheduler.add(task)
        turn = 0
        before(turn)
        while scheduler.step():
            turn += 1
            before(turn)
        assert all(task.closed for task in tasks)
        return scheduler

    return run_all


def test_answers_join_a_pass_when_their_prompt_is_read_and_leave_it_at_their_end(
    world: World, run: Callable[..., Scheduler]
) -> None:
    a, b, c = (Stub(world, name, tokens, 1) for name, tokens in (("a", 3), ("b", 5), ("c", 4)))
    scheduler = run(Task(a), Task(b, c))
    assert world.turns == ["Pa", "a", "Pb", "abc", "bc", "bc", "b"]
    assert (scheduler.passes, scheduler.rows) == (5, 9)


def test_passes_are_as_long_as_their_limit_and_alike(world: World, run: Callable[..., Scheduler]) -> None:
    run(*(Task(Stub(world, name, 4, 1)) for name in "abcdefghi"))
    assert world.turns[-5:] == [*["abcd", "efghi"] * 2, "bcdefghi"]


@pytest.mark.parametrize(("exact", "turn"), [(1, ["a", "c", "bd"]), (8, ["abcd"])])
def test_reproducible_answers_share_exact_passes_alone(
    exact: int, turn: list[str], world: World, run: Callable[..., Scheduler]
) -> None:
    tasks = [Task(Stub(world, name, 3 + (name == "a"), 1), reproducible=name in "ac") for name in "abcd"]
    run(*tasks, limits=RowLimits(16, exact))
    assert world.turns[-2 * len(turn) :] == turn * 2


def test_further_rows_check_the_likeliest_guesses(world: World, run: Callable[..., Scheduler]) -> None:
    """As long as they cost little."""
    chances = {"a": 0.0, "b": 0.9, "c": 0.7}

    def turns(row_s: float) -> str:
        """Return the most usual one of all three."""
        world.turns.clear()
        world.row_s = row_s
        run(*(Task(Stub(world, name, 100, 1, chance=chance)) for name, chance in chances.items()))
        return statistics.mode(turn for turn in world.turns if set(turn) == set("abc"))

    assert turns(0.0) == "abbbbbcc"
    assert turns(0.5 * PASS_S) == "abbc"
    assert turns(PASS_S) == "abc"


def test_answers_with_guesses_and_recurrent_state_run_alone(
    world: World, run: Callable[..., Scheduler]
) -> None:
    stubs = (Stub(world, name, 10 - (name != "a"), 1, chance=0.9 * (name == "b")) for name in "abc")
    run(*map(Task, stubs), limits=RowLimits(16, 8, takes_guesses=False))
    assert set(world.turns[-6:]) == {"b", "ac"}


def test_answers_share_no_pass_that_takes_longer_than_theirs_alone(
    world: World, run: Callable[..., Scheduler]
) -> None:
    """But they try one again, as times change."""
    world.row_s = 1.2 * PASS_S

    def change(turn: int) -> None:
        world.row_s = (1.2 if turn < 90 else 0.3) * PASS_S

    run(*(Task(Stub(world, name, 200, 1)) for name in "ab"), before=change)
    shared = [turn for turn, names in enumerate(world.turns) if names == "ab"]
    assert shared[0] < 5
    assert shared[1] - shared[0] > 100
    assert len(shared) > 60


@pytest.mark.parametrize("gaps", [USUAL_GAPS, 1.6, 8.0])
@pytest.mark.parametrize("chance", [0.0, 0.9])
def test_no_answer_waits_long_for_prompts(
    gaps: float, chance: float, world: World, run: Callable[..., Scheduler]
) -> None:
    """However long and many they are, and their answers' passes; and they read on in turns."""
    world.row_s = 0.05 * PASS_S
    pass_s = PASS_S + world.row_s * (7 if chance else 1)
    answers = [Stub(world, name, 40 if chance == 0.0 else 160, 1, chance=chance) for name in "ab"]
    prompts = [Stub(world, name, 1, 200) for name in "xyz"]
    run(*map(Task, (*answers, *prompts)), gaps=gaps)
    for answer in answers:
        found = np.diff(answer.times_s).max()
        assert (gaps - 1) * pass_s <= found <= gaps * pass_s + LAYER_S
    order = [turn for turn in world.turns if turn in ("Px", "Py", "Pz")]
    assert order.index("Pz") < len(order) - 1 - order[::-1].index("Px")
    # Between two passes prompts have the rest of the limit.
    assert 2.5 < prompts[-1].times_s[0] < 3.5


@pytest.mark.parametrize("chance", [0.0, 0.9])
def test_a_broken_answer_ends_its_task_alone(
    chance: float, world: World, run: Callable[..., Scheduler]
) -> None:
    a, b, c, d = (Stub(world, name, 5, 1, chance=chance * (name == "c")) for name in "abcd")
    b.breaks_at = 2
    broken, others = Task(b, c), (Task(a), Task(d))
    run(broken, *others)
    assert broken.errors == ["no token is allowed"]
    assert c.result == "cancelled"
    assert c.position == c.held  # without the tokens of the pass in which the other one broke
    assert [len(one.times_s) for one in (a, d)] == [5, 5]
    assert not any(task.errors for task in others)
    assert world.turns[-1] == "ad"


def test_a_failed_pass_is_the_error_of_all_its_answers(world: World, run: Callable[..., Scheduler]) -> None:
    tasks = [Task(Stub(world, name, 5, 1)) for name in "ab"]

    def fail(turn: int) -> None:
        world.fails = turn == 4

    scheduler = run(*tasks, before=fail)
    assert [task.errors for task in tasks] == [["the device is gone"]] * 2
    assert isinstance(scheduler.failure, GraphError)


def test_slow_readers_and_cancelled_tasks_leave_the_pass(world: World, run: Callable[..., Scheduler]) -> None:
    slow, cancelled, other = (Task(Stub(world, name, 9, 1)) for name in "abc")

    def change(turn: int) -> None:
        slow.slow = 5 < turn < 9
        cancelled.cancelled = turn >= 7

    run(slow, cancelled, other, before=change)
    assert world.turns == ["Pa", "a", "Pb", "Pc", "abc", "abc", "bc", "c", *["ac"] * 4, "a"]
    assert cancelled.answers[0].result == "cancelled"  # type: ignore[comparison-overlap]
    assert not cancelled.errors
