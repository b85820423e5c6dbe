"""No request ends another's: errors anywhere in one answer are its own, and health is the engine's."""

import contextlib
import gc
import json
import queue
import time
import urllib.error
import urllib.request
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import openai
import pytest

from heterollm.base import EngineError, GraphError, InputError
from heterollm.engine import Session
from heterollm.llm import LLM
from heterollm.serve import app
from heterollm.serve.doors.openai_replies import OpenAIReply
from heterollm.text import GrammarTokens, TokenSequence
from heterollm.text.grammar import Constraint
from heterollm.text.sampling import Sampler
from heterollm.text.stop_strings import StopStrings
from heterollm.text.stream_decoder import StreamDecoder

Serving = Callable[..., contextlib.AbstractContextManager[str]]


class PanicError(BaseException):
    """A panic of a library in another language: no ``Exception``."""


ERRORS: Any = (ValueError, MemoryError, RecursionError, EngineError, InputError)
NO_EXCEPTIONS: Any = (PanicError, KeyboardInterrupt, SystemExit)
PLACES: Any = {
    "sampling": (Sampler, "sample", {"temperature": 0.7}),
    "greedy sampling": (Sampler, "sample", {"temperature": 0}),
    "grammar": (GrammarTokens, "constraint", {"extra_body": {"grammar": "start: /[a-z]+/"}}),
    "tokens of a grammar": (Constraint, "allowed", {"extra_body": {"grammar": "start: /[a-z]+/"}}),
    "stop strings": (StopStrings, "push", {"stop": ["never"]}),
    "text": (StreamDecoder, "push", {}),
    "start": (TokenSequence, "begin", {}),
    "the form": (OpenAIReply, "_choice", {}),
    "the request": (LLM, "prepare", {}),
}


def health(address: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"{address}/health") as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_an_error_of_one_request_is_its_own(
    client: openai.OpenAI, address: str, monkeypatch: pytest.MonkeyPatch, place: str, stream: bool
) -> None:
    owner, name, options = PLACES[place]
    plain = {"model": "tiny", "prompt": "import ", "max_tokens": 4}
    right = client.completions.create(**plain, temperature=0).choices[0].text
    # The form is made on the loop, where a panic of the tokenizer has become an exception.
    for kind in ERRORS if place == "the form" else (*ERRORS, *NO_EXCEPTIONS):

        def fail(*_: object, **__: object) -> None:
            raise kind("injected")  # noqa: B023 - called in this round

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(openai.APIError) as caught:
                list(client.completions.create(**plain, **options, stream=stream))
        body: Any = caught.value.body
        assert body["message"]
        assert body["type"] in ("server_error", "invalid_request_error")
        status, state = health(address)
        assert (status, state["error"], state["status"]) == (200, None, "ok"), kind
        assert client.completions.create(**plain, temperature=0).choices[0].text == right
    deadline = time.monotonic() + 60
    while health(address)[1]["running"]:
        assert time.monotonic() < deadline


def test_the_engines_own_failure_shows_until_it_computes_again(
    client: openai.OpenAI, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: Any = {"model": "tiny", "prompt": "import ", "max_tokens": 4, "temperature": 0}

    def fails(*_: object, **__: object) -> None:
        raise GraphError("the device is gone")

    def is_nan(session: Session, _token: int) -> Any:
        return np.full(session.vocab_size, np.nan, np.float32)

    for name, call, says in (
        ("prefill_in_turns", lambda *_: iter(map(fails, [0])), "the device is gone"),
        ("decode_in_place", fails, "the device is gone"),
        ("decode_in_place", is_nan, "NaN"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(Session, name, call)
            with pytest.raises(openai.InternalServerError, match=says):
                client.completions.create(**plain)
            status, state = health(address)
            assert status == 503
            assert says in state["error"]
        client.completions.create(**plain)
        assert health(address)[0] == 200


def test_a_closed_engine_is_unhealthy(bundled_model: Any, serving: Serving) -> None:
    with LLM.load(bundled_model, device="host", plan="gpu") as llm, serving(llm) as address:
        with openai.OpenAI(base_url=f"{address}/v1", api_key="-", max_retries=0) as client:
            client.completions.create(model="tiny", prompt="import ", max_tokens=2)
            llm.close()
            with pytest.raises(openai.APIError):
                client.completions.create(model="tiny", prompt="import ", max_tokens=2)
        status, state = health(address)
        assert status == 503
        assert "closed" in state["error"]


def metric(address: str, name: str) -> float:
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def test_tokens_of_an_aborted_answer_count(llm: LLM, serving: Serving) -> None:
    with serving(llm) as address, openai.OpenAI(base_url=f"{address}/v1", api_key="-") as client:
        ask: Any = {
            "model": "tiny",
            "prompt": "import ",
            "max_tokens": 900,
            "extra_body": {"ignore_eos": True},
        }
        with client.completions.create(**ask, stream=True) as chunks:
            read = [next(iter(chunks)) for _ in range(8)]
        while metric(address, "heterollm_running"):
            time.sleep(0.01)
        assert len(read) <= metric(address, "heterollm_generated_tokens_total") < 900
        prompt = len(llm.tokenizer.encode("import "))
        assert metric(address, "heterollm_prompt_tokens_total") == prompt
        assert metric(address, "heterollm_decode_seconds_total") > 0
        assert metric(address, "heterollm_queued_seconds_count") == 1
        assert metric(address, "heterollm_aborted_total") == 1


def test_requests_of_another_owner_reuse_nothing(llm: LLM, serving: Serving) -> None:
    prompt = "The password of alice is tulip-4711, and nobody may know it."

    def reused(address: str, key: str, **options: Any) -> int:
        with openai.OpenAI(base_url=f"{address}/v1", api_key=key) as client:
            answer = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, **options)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    with serving(llm, places=16, api_keys=("alice", "bob")) as address:
        assert reused(address, "alice") == 0
        assert reused(address, "alice") > 10
        assert reused(address, "bob") == 0
        for name in ("user", "prompt_cache_key", "safety_identifier"):
            own: Any = {"extra_body": {name: "one"}}
            assert reused(address, "alice", **own) == 0
            assert reused(address, "alice", **own) > 10
            assert reused(address, "alice", extra_body={name: "two"}) == 0
            assert reused(address, "bob", **own) == 0
        assert reused(address, "alice", n=2) > 10


@contextlib.contextmanager
def no_collection() -> Iterator[None]:
    """Let Python collect no cycles of itself."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_server_at_rest_returns_freed_memory(
    llm: LLM, serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held:
        """A part of a request, in a cycle as an error's."""

        def __init__(self) -> None:
            self.own = self

    returned: queue.Queue[None] = queue.Queue()
    monkeypatch.setattr(app, "REST_S", 0.05)
    monkeypatch.setattr(app, "return_freed_memory", lambda: returned.put(None))
    with (
        serving(llm) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="unused") as client,
        no_collection(),
    ):
        for _ in range(2):
            assert health(address)[0] == 200
            with pytest.raises(queue.Empty):
                returned.get(timeout=0.5)  # no request freed any
            held = weakref.ref(Held())
            client.completions.create(model="tiny", prompt="def", max_tokens=4)
            returned.get(timeout=60)
            assert held() is None
