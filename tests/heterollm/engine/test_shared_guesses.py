"""Guesses in passes that answers share: their numbers, and the answers."""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.engine import PromptTask, Scheduler, Session
from heterollm.engine.pass_times import TRY_AFTER, PassTimes
from heterollm.engine.shared_guesses import choose_guesses, share_guesses
from heterollm.llm import LLM
from heterollm.text import GuessOffer, GuessPace

ANSWER = st.tuples(st.floats(0, 1), st.integers(0, 3))


@given(st.lists(ANSWER, min_size=1, max_size=3), st.integers(0, 6), st.data())
@settings(max_examples=150, deadline=None)
def test_no_other_numbers_give_more_tokens_a_second(
    answers: list[tuple[float, int]], further: int, data: st.DataObject
) -> None:
    chances, most = zip(*answers, strict=True)
    rows = len(answers) + further
    times_s = data.draw(st.lists(st.floats(0.5, 4.0), min_size=rows, max_size=rows))

    def rate(counts: Sequence[int]) -> float:
        """Return the expected tokens a second, summed guess by guess."""
        tokens = sum(sum(chance**n for n in range(count + 1)) for chance, count in zip(chances, counts))  # noqa: B905
        return tokens / times_s[len(answers) + sum(counts) - 1]

    found = share_guesses(chances, most, rows, lambda count: times_s[count - 1])
    every = itertools.product(*(range(limit + 1) for limit in most))
    allowed = [counts for counts in every if sum(counts) <= further]
    assert tuple(found) in allowed
    assert rate(found) >= max(map(rate, allowed)) * (1 - 1e-9)


def offer(chance: float = 0.8, most: int = 15, **options: Any) -> GuessOffer:
    return GuessOffer(GuessPace([1.0, *[1.2] * 7, *[9.0] * 8], (chance,), **options), 0, most)


def test_guesses_follow_the_times_of_shared_passes() -> None:
    times = PassTimes()
    assert choose_guesses([None, None], 16, times) == [0, 0]
    assert choose_guesses([offer(), offer()], 16, times) == [0, 0]  # the first pass tells their time
    for rows in (2, 3):
        times.learn(rows, 1.0)
    # Other times are in proportion to those that are expected; lengths are few.
    assert choose_guesses([offer(), offer()], 16, times) == [3, 3]
    assert choose_guesses([offer(), None, offer(0.7)], 16, times) == [3, 0, 2]
    assert choose_guesses([offer(most=1), offer()], 16, times) == [1, 5]
    assert choose_guesses([offer(guess_s=0.5), offer()], 16, times) == [0, 0]
    times.learn(8, 3.0)
    assert choose_guesses([offer(), offer()], 16, times) == [1, 0]
    for _ in range(8):
        times.learn(3, 2.5)
    assert choose_guesses([offer(), offer()], 16, times) == [0, 0]
    # Times may have changed after a while.
    for _ in range(TRY_AFTER + 1):
        times.learn(2, 1.0)
    assert choose_guesses([offer(), offer()], 16, times) == [3, 3]


def test_a_fixed_number_fills_the_room() -> None:
    times = PassTimes()
    times.learn(2, 1.0)
    times.learn(8, 9.0)
    assert choose_guesses([offer(0.1, 3, fixed=3), offer(0.1, 3, fixed=3)], 16, times) == [3, 3]
    assert choose_guesses([offer(0.1, 3, fixed=3), offer(0.1, 3, fixed=3)], 7, times) == [3, 2]


class Task(PromptTask):
    """An answer of a scheduler."""

    is_slow = False

    def __init__(self, answer: Any, session: Session) -> None:
        super().__init__("default", [answer], reproducible=True)
        self._session, self.errors = session, []  # type: ignore[var-annotated]

    def take_session(self) -> Session:
        return self._session

    def copy_session(self) -> Session:
        raise AssertionError

    def fail(self, error: Exception, /) -> None:
        self.errors.append(error)

    put = read = close = lambda *_: None  # type: ignore[assignment]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0, "ignore_eos": True},
        {"temperature": 0, "ignore_eos": True, "log_probabilities": True},
        {"temperature": 0.5, "seed": 5, "repetition_penalty": 1.05, "ignore_eos": True},
        {"temperature": 0, "grammar": "start: /[a-z_ ()=,:0-9\\[\\]\\n.]{100,120}/"},
    ],
    ids=str,
)
@pytest.mark.parametrize("speculative", ["lookup", "draft", "as many as pay"])
def test_answers_that_share_passes_with_guesses(
    speculative: str, options: dict[str, Any], bundled_model: Path, guessing: Callable[[str], LLM]
) -> None:
    """They are those of plain decoding, from fewer passes."""
    if "grammar" in options:
        pytest.importorskip("llguidance")
    if speculative == "draft" and options["temperature"]:
        pytest.skip("A draft's random numbers give other samples of the same distribution.")
    llm = guessing(speculative)
    texts = ("x = [1, 2, 3, 4]\ny = [1, 2, 3, 4]\n" * 4, "def add(a, b):\n" * 6, "import os\n")
    keywords: dict[str, Any] = {"max_new_tokens": 48, **options}
    plain = [llm.generate(text, session=llm.session(), speculate=False, **keywords) for text in texts]

    def work() -> tuple[Scheduler, list[Task]]:
        thread: Any = type("Thread", (), {"background": [], "submit": lambda _, call: call()})()
        # With a clock that advances at each look all passes take as long.
        scheduler = Scheduler(thread, itertools.count(0.0).__next__, llm._engine.rows)
        tasks = [Task(llm.prepare(llm.tokenizer.encode(text), **keywords), llm.session()) for text in texts]
        for task in tasks:
            scheduler.add(task)
        while scheduler.step():
            pass
        return scheduler, tasks

    scheduler, tasks = llm.on_engine_thread(work)
    found = [task.answers[0].result for task in tasks]
    assert [one.token_ids for one in found] == [one.token_ids for one in plain]
    assert [one.text for one in found] == [one.text for one in plain]
    if "log_probabilities" in options:
        for one, other in zip(found, plain, strict=True):
            # More than eight rows add up in another order, and keys and values are rounded to 16 bits.
            np.testing.assert_allclose(one.log_probabilities, other.log_probabilities, atol=1e-3)
    guessed = [one.speculation for one in found]
    if speculative == "as many as pay":
        return  # which depends on times
    assert sum(one.accepted for one in guessed) > 10
    assert all(one.passes < own.generated_tokens - 1 for one, own in zip(guessed, found, strict=True))
    assert scheduler.passes < 0.5 * sum(one.generated_tokens for one in found)


@pytest.fixture(scope="module")
def guessing(bundled_model: Path) -> Any:
    """Return a function that loads the model with a speculator, each once."""
    loaded: dict[str, LLM] = {}

    def load(speculative: str) -> LLM:
        if speculative not in loaded:
            asked = bundled_model if speculative == "draft" else "lookup"
            guesses = None if speculative == "as many as pay" else 2
            loaded[speculative] = LLM.load(
                bundled_model, device="host", plan="gpu", speculative=asked, guesses=guesses
            )
        return loaded[speculative]

    yield load
    for llm in loaded.values():
        llm.close()
