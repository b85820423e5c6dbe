"""A server whose model guesses with a draft: answers, statistics, and the memory of its sessions."""

import contextlib
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from heterollm.llm import LLM
from heterollm.serve import ServeOptions, session_places

ASK: Any = {"model": "tiny", "prompt": "def add(a, b):\n", "max_tokens": 32, "temperature": 0}


@pytest.fixture(scope="module")
def llm(bundled_model: Path) -> Iterator[LLM]:
    with LLM.load(bundled_model, device="host", plan="gpu", speculative=bundled_model, guesses=3) as loaded:
        yield loaded


def test_answers_with_guesses_are_those_without(
    llm: LLM, serving: Callable[..., contextlib.AbstractContextManager[str]]
) -> None:
    with serving(llm) as address, openai.OpenAI(base_url=f"{address}/v1", api_key="-") as client:
        plain = llm.generate(ASK["prompt"], max_new_tokens=32, speculate=False, session=llm.session())
        # A client leaves in the middle of a pass's guesses; the session is used again.
        with client.completions.create(**ASK, stream=True) as chunks:
            next(iter(chunks))
        chunks = list(client.completions.create(**ASK, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == plain.text
        stop = plain.text[20:24]
        answer = client.completions.create(**ASK, n=2, logprobs=2, stop=[stop])
        for choice in answer.choices:
            assert choice.text == plain.text[: plain.text.index(stop)]
            assert choice.logprobs.tokens
        counts = answer.model_extra["timings"]["speculation"]
        assert counts["accepted"] > 0
        assert counts["tokens_per_pass"] == 1 + counts["accepted"] / counts["passes"]
        # A seed repeats an answer, whatever passes take.
        seeded = client.completions.create(**{**ASK, "temperature": 1}, seed=1)
        assert seeded.model_extra["timings"]["speculation"] is None
        with urllib.request.urlopen(f"{address}/metrics") as response:
            metrics = dict(line.rsplit(" ", 1) for line in response.read().decode().splitlines())
    assert float(metrics["heterollm_accepted_guesses_total"]) >= counts["accepted"]


def test_penalties_biases_and_grammars_agree_with_guesses(llm: LLM) -> None:
    for options in (
        {"frequency_penalty": 1.5, "presence_penalty": -0.5},
        {"logit_bias": {200: -100, 300: 3.5}, "repetition_penalty": 1.2},
        {"grammar": 'start: /[a-z_ ()=,]{4,30}/ "\U0001f600"', "top_log_probabilities": 2},
    ):
        keywords: Any = {"max_new_tokens": 40, **options}
        plain = llm.generate(ASK["prompt"], speculate=False, session=llm.session(), **keywords)
        guessed = llm.generate(ASK["prompt"], session=llm.session(), **keywords)
        assert guessed.token_ids == plain.token_ids
        assert guessed.text == plain.text
        assert guessed.speculation is not None


def test_the_sessions_of_the_draft_count_in_the_memory(llm: LLM) -> None:
    own = llm.session().memory_bytes
    assert llm.session_bytes == 2 * own
    options = ServeOptions(sessions_gib=4.5 * own / 2**30)
    assert (session_places(options, own), session_places(options, llm.session_bytes)) == (4, 2)
