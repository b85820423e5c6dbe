"""All doors: equal answers, equal guards and limits, errors in each one's form, and clients that leave."""

import copy
import http.client
import json
import random
import time
from collections.abc import Callable
from typing import Any

import pytest
from serve_http import ask, get, post

from heterollm.llm import LLM
from heterollm.serve.admission import Admission
from heterollm.serve.replies import Reply

SAY: Any = [{"role": "user", "content": "def add(a, b):"}]
FREE: Any = {"num_predict": -1, "temperature": 0}


def openai_said(answer: Any) -> str:
    return str(answer["error"]["message"])


def ollama_said(answer: Any) -> str:
    assert list(answer) == ["error"]
    return str(answer["error"])


def anthropic_said(answer: Any) -> str:
    assert answer["type"] == "error"
    assert answer["error"]["type"].endswith("_error")
    return str(answer["error"]["message"])


# Body of a long answer, the limit of its tokens, its text in a whole answer, and the message of an error.
DOORS: dict[str, tuple[dict[str, Any], Callable[[int], dict[str, Any]], Callable[[Any], str], Any]] = {
    "/v1/chat/completions": (
        {"messages": SAY, "temperature": 0, "stream": True},
        lambda most: {"max_tokens": most, "stream": False},
        lambda answer: answer["choices"][0]["message"]["content"],
        openai_said,
    ),
    "/v1/responses": (
        {"input": SAY, "temperature": 0, "stream": True},
        lambda most: {"max_output_tokens": most, "stream": False},
        lambda answer: answer["output"][0]["content"][0]["text"],
        openai_said,
    ),
    "/v1/messages": (
        {"messages": SAY, "temperature": 0, "stream": True, "max_tokens": 10**6},
        lambda most: {"max_tokens": most, "stream": False},
        lambda answer: answer["content"][0]["text"],
        anthropic_said,
    ),
    "/api/chat": (
        {"messages": SAY, "options": FREE},
        lambda most: {"stream": False, "options": {**FREE, "num_predict": most}},
        lambda answer: answer["message"]["content"],
        ollama_said,
    ),
    "/api/generate": (
        {"prompt": SAY[0]["content"], "options": FREE},
        lambda most: {"stream": False, "options": {**FREE, "num_predict": most}},
        lambda answer: answer["response"],
        ollama_said,
    ),
}


@pytest.mark.parametrize("path", DOORS)
def test_all_doors_give_the_same_answer(address: str, llm: LLM, path: str) -> None:
    long, limited, text, _ = DOORS[path]
    status, answer = post(address, path, {"model": "tiny", **long, **limited(12)})
    assert status == 200
    assert text(answer) == llm.chat(SAY, max_new_tokens=12, session=llm.session()).text


@pytest.mark.parametrize("path", [*DOORS, "/v1/messages/count_tokens", "/api/embed", "/v1/embeddings"])
def test_all_doors_have_the_same_guard(llm: LLM, serving: Any, path: str) -> None:
    said = next((own[3] for door, own in DOORS.items() if path.startswith(door)), None)
    said = said or (ollama_said if path.startswith("/api") else openai_said)
    with serving(llm, api_keys=("secret",)) as address:
        for headers, expected in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"x_api_key": "secret", "Content_Type": "text/plain"}, 415),
            ({"x_api_key": "secret", "Host": "evil.example"}, 421),
            ({"x_api_key": "secret"}, 400),
        ):
            status, answer = post(address, path, {"model": "tiny"}, **headers)
            assert status == expected or (path, status) in (("/api/chat", 200), ("/api/generate", 200))
            assert status == 200 or said(answer)


@pytest.mark.parametrize("path", DOORS)
def test_a_full_server_says_so_in_the_doors_form(
    address: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from heterollm.serve.admission import BusyError

    def full(*_: Any) -> None:
        raise BusyError("64 requests wait, and no more may.", retry_s=3)

    monkeypatch.setattr(Admission, "submit", full)
    status, answer = post(address, path, {"model": "tiny", **DOORS[path][0]})
    assert status == (529 if path == "/v1/messages" else 503)
    assert "no more may" in DOORS[path][3](answer)


@pytest.mark.parametrize("path", DOORS)
def test_an_error_in_a_stream_has_the_doors_form(
    address: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, calls = Reply._part, iter(range(10**6))

    def fail(self: Reply, event: Any) -> Any:
        if next(calls) > 2:
            raise RuntimeError("secret")
        return step(self, event)

    monkeypatch.setattr(Reply, "_part", fail)
    status, _, text = ask(address, "POST", path, {"model": "tiny", **DOORS[path][0]})
    assert status == 200
    assert "secret" not in text
    last = json.loads(text.strip().splitlines()[-1].removeprefix("data: "))
    if path == "/v1/responses":
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        last = last["response"]
    assert "log says why" in (last["error"] if path.startswith("/api") else last["error"]["message"])


@pytest.mark.parametrize("path", DOORS)
def test_a_client_that_leaves_ends_its_request(address: str, path: str) -> None:
    def aborted() -> float:
        metrics = ask(address, "GET", "/metrics")[2]
        return float(metrics.split("\nheterollm_aborted_total ")[1].split()[0])

    before = aborted()
    connection = http.client.HTTPConnection(address.removeprefix("http://"))
    body = json.dumps({"model": "tiny", **DOORS[path][0]})
    connection.request("POST", path, body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    answer.read(10)
    answer.close()
    connection.close()
    ends = time.monotonic() + 30
    while get(address, "/health")[1]["running"]:
        assert time.monotonic() < ends
        time.sleep(0.01)
    # A short answer may have ended before its client left.
    assert aborted() - before in (0, 1)
    assert not any(slot["is_processing"] for slot in get(address, "/slots")[1])


CALLED: Any = {"name": "f", "arguments": {"a": [1, "x"]}}
TOOL: Any = {"name": "f", "description": "x", "parameters": {"type": "object", "properties": {"a": {}}}}
RICH: dict[str, Any] = {
    "/v1/messages": {
        "max_tokens": 5,
        "system": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            *SAY,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "x", "signature": ""},
                    {"type": "text", "text": "x"},
                    {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x"}]}
                ],
            },
        ],
        "tools": [{"name": "f", "input_schema": TOOL["parameters"]}],
        "tool_choice": {"type": "tool", "name": "f"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "stop_sequences": ["x"],
        "metadata": {"user_id": "x"},
        "output_config": {"effort": "low"},
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {
                "type": "reasoning",
                "id": "r",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "x"}],
            },
            {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": [{"type": "input_text", "text": "x"}]},
        ],
        "instructions": "x",
        "tools": [{"type": "function", "strict": True, **TOOL}],
        "tool_choice": {
            "type": "allowed_tools",
            "mode": "auto",
            "tools": [{"type": "function", "name": "f"}],
        },
        "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "null"}}},
        "reasoning": {"effort": "low"},
        "metadata": {"a": "b"},
    },
    "/api/chat": {
        "messages": [
            *SAY,
            {"role": "assistant", "thinking": "x", "tool_calls": [{"function": CALLED}]},
            {"role": "tool", "content": "x", "tool_name": "f"},
        ],
        "tools": [{"type": "function", "function": TOOL}],
        "options": {"temperature": 0.5, "seed": 1, "stop": ["x"], "num_ctx": 5},
        "format": {"type": "null"},
        "keep_alive": "5m",
        "think": False,
    },
    "/api/generate": {"prompt": "x", "system": "y", "options": {"top_k": 5}, "format": "json", "raw": False},
    "/api/embed": {"input": ["x"], "truncate": True, "dimensions": 5, "options": {}},
    "/v1/embeddings": {"input": [[5]], "encoding_format": "base64", "dimensions": 5},
    "/tokenize": {"content": "x", "with_pieces": True},
    "/detokenize": {"tokens": [5]},
    "/api/show": {"verbose": True},
}
ODD: list[Any] = [None, True, 5, -1, 1.5, 1e300, 2**70, "", "x", "\x00", [], [None], [[]], {}, {"type": "x"}]


def mutated(body: Any, chosen: random.Random) -> Any:
    """The body with one of its parts replaced by an odd value, left out, or there twice."""
    if not isinstance(body, dict | list) or not body or chosen.random() < 0.15:
        return chosen.choice(ODD)
    made: Any = copy.copy(body)
    place = chosen.choice(list(body) if isinstance(body, dict) else range(len(body)))
    if chosen.random() < 0.1:
        del made[place]
    elif isinstance(made, list) and chosen.random() < 0.1:
        made.append(made[place])
    else:
        made[place] = mutated(made[place], chosen)
    return made


@pytest.mark.parametrize("path", RICH)
def test_odd_bodies_are_answered_or_refused(address: str, path: str) -> None:
    chosen, whole = random.Random(path), {"model": "tiny", **RICH[path]}
    if path.endswith("tokenize"):
        del whole["model"]
    status, _, text = ask(address, "POST", path, whole)
    assert status == (400 if "embed" in path else 200), text
    for _ in range(60):
        body = mutated(whole, chosen)
        if isinstance(body, dict):
            body = {**body, "stream": False} if path in DOORS else body
            if isinstance(body.get("options", {}), dict) and path in ("/api/chat", "/api/generate"):
                body["options"] = {**body.get("options", {}), "num_predict": 2}
            if path == "/v1/responses":
                body["max_output_tokens"] = 2
        status, answer = post(address, path, body)
        assert status in (200, 400, 404), (status, body, answer)
