"""Sessions take the pages of their state from pools, share them, and give them back."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from heterollm.base import KernelError
from heterollm.engine import Session
from heterollm.llm import LLM
from heterollm.serve.sessions import SessionCache

CONTEXT, PAGE = 512, 64
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "phi": {"kv_bits": 8}, "qwen3_5_text": {}, "gemma2": {}}

Load = Callable[..., LLM]


@pytest.fixture(params=FAMILIES)
def llm(request: pytest.FixtureRequest, checkpoint: Callable[..., Path], host_llm: Load) -> LLM:
    """A model with no session, whose pools are as large as at first."""
    gc.collect()
    return host_llm(checkpoint(request.param), plan="gpu", context=CONTEXT, **FAMILIES[request.param])


def held(llm: LLM) -> list[int]:
    """Return how many blocks of each pool sessions hold."""
    return llm.on_engine_thread(lambda: [pool.held for pool in llm._engine._compiler.states.pools])


def begun(llm: LLM, length: int, seed: int = 1) -> Session:
    session = llm.session()
    session.prefill(np.random.default_rng(seed).integers(1, 2048, length))
    return session


def test_a_fork_takes_no_page_until_it_differs(llm: LLM) -> None:
    session, alone = begun(llm, 150), begun(llm, 150)
    before = held(llm)
    forks = [session.fork() for _ in range(3)]
    assert held(llm) == before
    # The first session to write takes a page in place of the last one; whole pages before stay shared.
    for fork, token in zip(forks, (5, 6, 7), strict=True):
        fork.decode(token)
    assert held(llm)[0] == before[0] + 3
    session.decode(8)
    assert held(llm)[0] == before[0] + 3
    for one, token in ((session, 8), (forks[1], 6)):
        alone.truncate(150)
        expected = [alone.decode(token), alone.decode(9)]
        assert np.array_equal(one.decode(9), expected[1])
    del forks, fork, one
    gc.collect()
    assert held(llm)[0] == before[0]


def test_a_session_writes_no_page_of_another(llm: LLM) -> None:
    """Also behind a truncation to the middle of a whole page that both hold."""
    other = begun(llm, 200)
    expected = begun(llm, 200).decode(5)
    found = []
    for _ in range(2):
        fork = other.fork()
        fork.truncate(100)
        found.append(fork.prefill(list(range(7, 40))))
    assert np.array_equal(*found)
    assert np.array_equal(other.decode(5), expected)


def test_pages_are_given_back(llm: LLM) -> None:
    before = held(llm)
    session = begun(llm, 300)
    grown = held(llm)[0] - before[0]
    session.truncate(64)
    assert held(llm)[0] - before[0] == 1 < grown
    session.reset()
    assert held(llm)[0] == before[0]
    del session
    gc.collect()
    assert held(llm) == before


def test_the_memory_grows_under_a_prompt_that_waits(llm: LLM) -> None:
    alone = [begun(llm, 40 + seed, seed) for seed in range(2)]
    expected = [one.decode(7) for one in alone]
    ids = np.random.default_rng(9).integers(1, 2048, 400).astype(np.int32)
    prompt = llm.session()
    whole = prompt.prefill(ids)
    prompt.reset()
    sizes = [memory.size_bytes for memory in llm._engine._compiler.states.memory.memories]
    others: list[Session] = []

    def read() -> np.ndarray:
        for _ in prompt.prefill_in_turns(ids, lambda _: True):
            if len(others) < 6:
                others.append(begun(llm, 40 + len(others) % 2, len(others) % 2))
                others[-1].prefill(np.arange(1, 420))
                others[-1].truncate(40 + (len(others) - 1) % 2)
        return prompt.last_logits.copy()

    assert np.array_equal(llm.on_engine_thread(read), whole)
    assert [memory.size_bytes for memory in llm._engine._compiler.states.memory.memories] != sizes
    for number, one in enumerate(others):
        one.reset()
        one.prefill(alone[number % 2].ids[:-1])
        assert np.array_equal(one.decode(7), expected[number % 2])


@pytest.mark.parametrize("llm", ["llama"], indirect=True)
def test_a_pool_without_room_is_an_error_and_harms_nobody(llm: LLM) -> None:
    sessions: list[Session] = []
    llm.limit_sessions(3)
    with pytest.raises(KernelError, match="may take no more") as caught:
        sessions.extend(begun(llm, 300) for _ in range(100))
    assert "smaller context" in caught.value.fix
    llm.limit_sessions(None)
    # Three sessions of eight pages are at least four of five.
    assert len(sessions) >= 4
    alone = begun(llm, 300)
    for one in sessions:
        assert np.array_equal(one.decode(4), alone.fork().decode(4))


def test_answers_to_a_prompt_take_no_more_than_the_sessions_that_they_count_as(llm: LLM) -> None:
    random = np.random.default_rng(4)
    pools = llm._engine._compiler.states.pools
    for prompt, tokens, count in ((200, 40, 3), (63, 3, 4), (320, 130, 2)):
        answers = [llm.prepare(list(range(1, prompt + 1)), max_new_tokens=tokens) for _ in range(count)]
        allowed, before = llm.sessions_taken(answers), held(llm)
        first = begun(llm, prompt)
        sessions = [first, *(first.fork() for _ in answers[1:])]
        turns = random.permutation(np.repeat(np.arange(count), tokens - 1))
        most = held(llm)
        for turn in turns:
            sessions[turn].decode(5)
            most = [max(pair) for pair in zip(most, held(llm), strict=True)]
        for pool, own, others in zip(pools, most, before, strict=True):
            assert own - others <= allowed * pool._each
        assert allowed < count or llm.config.family.startswith("Qwen3.5")
        del sessions, first
        gc.collect()
    assert llm.sessions_taken(answers[:1]) == 1


@pytest.mark.parametrize("llm", ["llama", "phi"], indirect=True)
def test_requests_share_the_pages_of_their_prompts(llm: LLM) -> None:
    cache = SessionCache(llm.session, most=4, chunk=PAGE, failures=lambda: ())
    prompt = np.random.default_rng(2).integers(1, 2048, 300).astype(np.int32)

    def ask(tail: int) -> int:
        ids = np.concatenate([prompt, np.arange(tail, tail + 40, dtype=np.int32)])
        own = cache.take(ids, reproducible=False)
        begin = own.session.position
        own.session.prefill_in_place(ids[begin:])
        cache.give_back(own)
        return begin

    counts = []
    for tail in (5, 900, 1800):
        begin = llm.on_engine_thread(lambda tail=tail: ask(tail))
        assert begin == (300 if counts else 0)
        counts.append(held(llm)[0])
    # Each further request takes the page in which its own end begins, and the one behind it.
    assert np.diff(counts).tolist() == [2, 2]
