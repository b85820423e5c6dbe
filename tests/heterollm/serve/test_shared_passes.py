"""Concurrent requests share decode passes, and get the answers that they get alone."""

import contextlib
import re
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest

from heterollm.llm import LLM
from heterollm.solver import Plan

Serving = Callable[..., contextlib.AbstractContextManager[str]]

GRAMMAR = 'start: ("import os" | "import sys" | "x = 1" | "y = 22")'
REQUESTS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"seed": 3, "n": 3},
    {"seed": 4, "logprobs": 5},
    {"temperature": 0, "stop": ["return", "self"]},
    {"seed": 5, "extra_body": {"grammar": GRAMMAR}},
    {"seed": 6, "presence_penalty": 1.5, "logit_bias": {"17": -50}},
    {"temperature": 0, "max_tokens": 1},
)


@pytest.fixture(scope="module")
def llm(bundled_model: Path) -> Iterator[LLM]:
    with LLM.load(bundled_model, device="host", plan="gpu", context=512) as loaded:
        yield loaded


def counted(address: str) -> tuple[int, int]:
    """Return the decode passes of a server, and the rows in them."""
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        text = answer.read().decode()
    found = [
        re.search(rf"^heterollm_decode_{name} (\S+)$", text, re.MULTILINE) for name in ("passes", "rows")
    ]
    passes, rows = (int(float(one[1])) for one in found if one is not None)
    return passes, rows


def answer(client: openai.OpenAI, number: int) -> Any:
    """Return the choices of a request."""
    options = {"max_tokens": 40, **REQUESTS[number]}
    prompt = "def f(x):\n    return x\n" * (1 + 3 * number)
    return client.completions.create(model="tiny", prompt=prompt, **options).model_dump()["choices"]


def test_answers_are_those_of_requests_alone(llm: LLM, serving: Serving) -> None:
    numbers = range(len(REQUESTS))
    with serving(llm, places=12) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
        expected = [answer(client, number) for number in numbers]
        passes, rows = counted(address)
        with ThreadPoolExecutor(len(REQUESTS)) as pool:
            for _ in range(3):
                assert list(pool.map(lambda number: answer(client, number), numbers)) == expected
        all_passes, all_rows = counted(address)
    # Answers alone share nothing but with those to the same prompt.
    assert rows < 3 * passes
    assert all_rows - rows == 3 * rows
    assert all_passes - passes < 3 * passes


@pytest.mark.parametrize("exact", [True, False])
def test_only_inexact_answers_share_passes_of_both_processors(
    exact: bool, llm: LLM, bundled_model: Path, half_rows_plan: Callable[..., Plan], serving: Serving
) -> None:
    options: Any = {"max_tokens": 60, "temperature": 0, "extra_body": {"ignore_eos": True}}
    with (
        LLM.load(bundled_model, device="host", plan=half_rows_plan(llm)) as both,
        serving(both, exact=exact) as address,
        ThreadPoolExecutor(3) as pool,
    ):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
        ask = partial(client.completions.create, model="tiny", prompt="def f", **options)
        for one in [pool.submit(ask) for _ in range(3)]:
            assert one.result().usage.completion_tokens == 60
        passes, rows = counted(address)
    assert rows == 3 * 59
    assert (passes == rows) is exact


def test_many_answers_share_the_memory_of_a_long_prompt(bundled_model: Path, serving: Serving) -> None:
    """They are admitted where as many whole sessions are not, and displace the sessions that nobody uses."""
    body: dict[str, Any] = {"model": "tiny", "temperature": 0.8, "max_tokens": 30, "seed": 7}
    long = "def f(x):\n    return x\n" * 35
    with (
        LLM.load(bundled_model, device="host", plan="gpu", context=512) as llm,
        serving(llm, places=4) as address,
    ):
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
        alone = [
            client.completions.create(**{**body, "seed": 7 + number}, prompt=long).choices[0].text
            for number in range(8)
        ]
        for number in range(4):  # sessions that stay behind, of whole contexts
            client.completions.create(**{**body, "max_tokens": 1}, prompt=f"{number} {long}")
        for _ in range(2):
            choices = client.completions.create(**body, prompt=long, n=8).choices
            assert [choice.text for choice in choices] == alone
        pools = llm.on_engine_thread(lambda: llm._engine._compiler.states.pools)
        assert all(len(pool._holders) <= 5 * pool._each for pool in pools)
        with pytest.raises(openai.BadRequestError, match="memory of"):
            client.completions.create(**{**body, "max_tokens": 400}, prompt="def ", n=8)


def test_clients_that_leave_end_their_answers_alone(llm: LLM, serving: Serving) -> None:
    with serving(llm, places=8) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0)
        expected = answer(client, 0)

        def leave(seed: int) -> None:
            options: Any = {"seed": seed, "max_tokens": 300, "extra_body": {"ignore_eos": True}}
            with client.completions.create(model="tiny", prompt="import ", stream=True, **options) as stream:
                for _ in zip(range(seed), stream, strict=False):
                    pass

        with ThreadPoolExecutor(5) as pool:
            leaving = [pool.submit(leave, seed) for seed in (2, 5, 9)]
            staying = [pool.submit(answer, client, 0) for _ in range(2)]
            assert [one.result() for one in staying] == [expected] * 2
            for one in leaving:
                one.result()
