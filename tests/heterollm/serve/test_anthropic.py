"""Anthropic's own client against a server: messages, tools, reasoning, streams and errors."""

import json
from collections.abc import Iterator
from typing import Any, get_type_hints

import anthropic
import jsonschema
import pytest
from anthropic.types import message_create_params
from chat_models import CHATS, chat_folder
from serve_http import ask, get, post

from heterollm.llm import LLM
from heterollm.serve import ServeOptions
from heterollm.serve.defaults import RequestDefaults
from heterollm.serve.doors.anthropic import messages_request

SAY: Any = [{"role": "user", "content": "def add(a, b):"}]
CITY: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "Bonn"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"name": "weather", "description": "Of a city", "input_schema": CITY},
    {"name": "clock", "type": "custom", "input_schema": {"type": "object", "maxProperties": 0}},
]
ASK: Any = {"model": "tiny", "messages": SAY, "max_tokens": 200}


def client_of(address: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=address, api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[anthropic.Anthropic]:
    with client_of(address) as made:
        yield made


@pytest.fixture(scope="module")
def thinking(thinking_address: str) -> Iterator[anthropic.Anthropic]:
    with client_of(thinking_address) as made:
        yield made


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory, serving: Any) -> Iterator[anthropic.Anthropic]:
    """A client of a model with marks around its calls."""
    folder = chat_folder(tmp_path_factory.mktemp("chat") / "model", *CHATS["hermes"])
    with (
        LLM.load(folder, device="host", plan="gpu") as llm,
        serving(llm) as address,
        client_of(address) as made,
    ):
        yield made


def test_a_message_is_the_models_own_answer(client: anthropic.Anthropic, llm: LLM) -> None:
    system: Any = [{"type": "text", "text": "Write code.", "cache_control": {"type": "ephemeral"}}]
    asked: Any = {**ASK, "system": system, "max_tokens": 16, "extra_body": {"temperature": 0}}
    answer = client.messages.create(**asked)
    dialogue: Any = [{"role": "system", "content": "Write code."}, *SAY]
    expected = llm.chat(dialogue, max_new_tokens=16, session=llm.session())
    (block,) = answer.content
    assert block.type == "text"
    assert block.text == expected.text
    assert (answer.role, answer.type, answer.stop_reason) == ("assistant", "message", "max_tokens")
    usage = answer.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == expected.prompt_tokens
    assert usage.output_tokens == 16
    count = client.messages.count_tokens(model="tiny", system=system, messages=SAY)
    assert count.input_tokens == expected.prompt_tokens
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == expected.text
        last = stream.get_final_message()
    assert (last.stop_reason, last.usage.output_tokens) == ("max_tokens", 16)
    assert last.content[0].text == expected.text  # type: ignore[union-attr]


def test_a_stop_sequence_ends_a_message_and_is_named(client: anthropic.Anthropic) -> None:
    asked: Any = {**ASK, "max_tokens": 24, "extra_body": {"temperature": 0}}
    text = client.messages.create(**asked).content[0].text  # type: ignore[union-attr]
    stop = text[9:12]
    answer = client.messages.create(**asked, stop_sequences=["never there", stop])
    assert answer.content[0].text == text[: text.index(stop)]  # type: ignore[union-attr]
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", stop)


@pytest.mark.parametrize("model", ["client", "hermes"])
@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_a_call_holds_to_its_schema_whole_and_streamed(
    request: pytest.FixtureRequest, model: str, choice: Any
) -> None:
    own: anthropic.Anthropic = request.getfixturevalue(model)
    asked: Any = {**ASK, "tools": TOOLS, "tool_choice": {**choice, "disable_parallel_tool_use": True}}
    asked["extra_body"] = {"temperature": 0}
    asked["thinking"] = {"type": "adaptive"}  # without effect: the templates have no reasoning
    whole = own.messages.create(**asked)
    with own.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        last = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    calls = [block for block in whole.content if block.type == "tool_use"]
    assert len(calls) == 1
    assert whole.stop_reason == last.stop_reason == "tool_use"
    jsonschema.validate(calls[0].input, TOOLS[0 if calls[0].name == "weather" else 1]["input_schema"])
    (again,) = [block for block in last.content if block.type == "tool_use"]
    assert (again.name, again.input) == (calls[0].name, calls[0].input)
    result = {"type": "tool_result", "tool_use_id": calls[0].id, "is_error": False}
    messages: Any = [
        *SAY,
        {"role": "assistant", "content": [block.model_dump() for block in whole.content]},
        {"role": "user", "content": [{**result, "content": [{"type": "text", "text": "sunny"}]}]},
    ]
    messages[-1]["content"].append({"type": "text", "text": "And now?"})
    after = own.messages.create(**{**asked, "messages": messages, "tool_choice": {"type": "none"}})
    assert after.stop_reason in ("end_turn", "max_tokens")
    assert not any(block.type == "tool_use" for block in after.content)


def test_reasoning_is_a_block_of_its_own(thinking: anthropic.Anthropic, thinker: LLM) -> None:
    asked: Any = {**ASK, "max_tokens": 40, "extra_body": {"temperature": 1}}
    found = False
    for _ in range(8):
        answer = thinking.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1024})
        kinds = [block.type for block in answer.content]
        assert kinds in (["thinking"], ["thinking", "text"], ["text"], [])
        found |= "thinking" in kinds
        history: Any = [*SAY, {"role": "assistant", "content": answer.content}, *SAY]
        if answer.content:
            assert thinking.messages.count_tokens(model="tiny", messages=history).input_tokens > 10
    assert found
    with thinking.messages.stream(**asked) as stream:
        kinds = [event.type for event in stream]
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") >= 1
    off = thinking.messages.create(**asked, thinking={"type": "disabled"})
    assert all(block.type == "text" for block in off.content)


def test_an_answer_follows_a_schema(client: anthropic.Anthropic) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": CITY}}
    answer = client.messages.create(**ASK, output_config=form)
    jsonschema.validate(json.loads(answer.content[0].text), CITY)  # type: ignore[union-attr]


def test_events_have_anthropics_order(address: str) -> None:
    _, kind, text = ask(address, "POST", "/v1/messages", {**ASK, "max_tokens": 3, "stream": True})
    assert kind == "text/event-stream"
    events = [dict(line.split(": ", 1) for line in one.splitlines()) for one in text.strip().split("\n\n")]
    assert all(json.loads(event["data"])["type"] == event["event"] for event in events)
    kinds = [event["event"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_keys_of_both_headers_open_the_door(llm: LLM, serving: Any) -> None:
    with serving(llm, api_keys=("secret",)) as address:
        for headers, expected in (
            ({}, 401),
            ({"x_api_key": "wrong"}, 401),
            ({"x_api_key": "secret"}, 200),
            ({"Authorization": "Bearer secret"}, 200),
        ):
            status, answer = post(address, "/v1/messages", {**ASK, "max_tokens": 1}, **headers)
            assert status == expected
            assert expected == 200 or answer["error"]["type"] == "authentication_error"


def test_models_have_anthropics_form_for_its_client(client: anthropic.Anthropic, address: str) -> None:
    (model,) = client.models.list()
    assert (model.id, model.type) == ("tiny", "model")
    assert client.models.retrieve("tiny").created_at == model.created_at
    assert isinstance(get(address, "/v1/models")[1]["data"][0]["created"], int)


def block(kind: str, role: str = "user", **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [{"type": kind, **fields}]}, *SAY]}


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "another model": ({"model": "claude-opus-5"}, 404, "not_found_error"),
    "no limit": ({"max_tokens": None}, 400, "max_tokens"),
    "limit of 0": ({"max_tokens": 0}, 400, "max_tokens"),
    "heat": ({"temperature": 1.5}, 400, "temperature"),
    "no messages": ({"messages": []}, 400, "messages"),
    "prefill": ({"messages": [*SAY, {"role": "assistant", "content": "x"}]}, 400, "continues none"),
    "an image": (block("image", source={}), 400, "image"),
    "a call of the user": (block("tool_use", id="1", name="f", input={}), 400, "tool_use"),
    "a result of the assistant": (block("tool_result", "assistant", tool_use_id="1"), 400, "tool_result"),
    "a result of nothing": (block("tool_result", tool_use_id="1"), 400, "result"),
    "no content": ({"messages": [{"role": "user", "content": []}]}, 400, "content"),
    "a tool of Anthropic's": ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "tools[0]"),
    "no such tool": ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, 400, "tool_choice"),
    "no tools": ({"tool_choice": {"type": "any"}}, 400, "tool_choice"),
    "a bad schema": ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, 400, "f"),
    "servers": ({"mcp_servers": [{}]}, 400, "mcp_servers"),
    "unknown": ({"tempreature": 1}, 400, "tempreature"),
    "too long": ({"messages": [{"role": "user", "content": "x " * 5000}]}, 400, "prompt is too long"),
}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
@pytest.mark.parametrize("name", REFUSED)
def test_errors_have_anthropics_form(address: str, name: str, path: str) -> None:
    changed, expected, said = REFUSED[name]
    status, answer = post(address, path, {**ASK, **changed})
    if path.endswith("count_tokens") and name in ("no limit", "too long"):
        assert status == 200
        return
    assert (status, answer["type"]) == (expected, "error")
    kind = answer["error"]["type"]
    assert kind == ("not_found_error" if expected == 404 else "invalid_request_error")
    assert expected == 404 or said in answer["error"]["message"], answer


def test_other_failures_have_anthropics_form(address: str) -> None:
    status, answer = post(address, "/v1/messages", b"{")
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    status, _, text = ask(address, "GET", "/v1/messages")
    assert (status, json.loads(text)["type"]) == (405, "error")
    status, answer = post(address, "/v1/messages", b"x" * (9 << 20))
    assert (status, answer["error"]["type"]) == (413, "request_too_large")


# Fields of the official client that the server takes, and those that it refuses with every value.
TAKEN: dict[str, Any] = {
    "max_tokens": 1,
    "messages": SAY,
    "model": "tiny",
    "cache_control": {"type": "ephemeral"},
    "container": None,
    "diagnostics": {},
    "inference_geo": "eu",
    "metadata": {"user_id": "anna"},
    "output_config": {"effort": "low"},
    "service_tier": "auto",
    "speed": "standard",
    "stop_sequences": ["x"],
    "stream": True,
    "system": "x",
    "thinking": {"type": "adaptive"},
    "tool_choice": {"type": "auto"},
    "tools": TOOLS,
}
UNKNOWN = {"prefill", "message", "user_profile_id", "workspace_id"}


def test_every_field_of_the_client_is_taken_or_refused(llm: LLM) -> None:
    fields = {*get_type_hints(message_create_params.MessageCreateParamsBase), "stream"}
    assert fields <= TAKEN.keys() | UNKNOWN
    defaults = RequestDefaults.of(llm, ServeOptions(name="tiny"))
    asked = messages_request(llm, defaults, json.dumps(TAKEN).encode())
    assert asked.stream
    assert asked.owner == ("anna",)
