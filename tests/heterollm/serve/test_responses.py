"""OpenAI's Responses API with its own client: items, tools, streams, and responses that continue."""

import json
from collections.abc import Iterator
from typing import Any, get_type_hints

import jsonschema
import openai
import pytest
from chat_models import CHATS, chat_folder
from openai.types.responses import Response, response_create_params
from serve_http import ask, get, post

from heterollm.llm import LLM
from heterollm.serve import kept_responses
from heterollm.serve.kept_responses import KeptResponse, KeptResponses

SAY = "def add(a, b):"
CITY: Any = {"type": "object", "properties": {"city": {"enum": ["Köln", "Bonn"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
TOOLS: Any = [
    {"type": "function", "name": "weather", "description": "Of a city", "parameters": CITY, "strict": True},
    {"type": "function", "name": "clock", "parameters": None, "strict": None},
]
GREEDY: Any = {"model": "tiny", "temperature": 0, "max_output_tokens": 16}


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory, serving: Any) -> Iterator[openai.OpenAI]:
    """A client of a model with marks around its calls."""
    folder = chat_folder(tmp_path_factory.mktemp("chat") / "model", *CHATS["hermes"])
    with (
        LLM.load(folder, device="host", plan="gpu") as llm,
        serving(llm) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def thinking(thinking_address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinking_address}/v1", api_key="unused", max_retries=0) as made:
        yield made


def test_a_response_is_the_models_own_answer(client: openai.OpenAI, llm: LLM) -> None:
    dialogue: Any = [{"role": "system", "content": "Write code."}, {"role": "user", "content": SAY}]
    expected = llm.chat(dialogue, max_new_tokens=16, session=llm.session())
    answer = client.responses.create(input=SAY, instructions="Write code.", **GREEDY)
    assert answer.output_text == expected.text
    assert answer.status == "incomplete"
    assert answer.incomplete_details is not None
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens) == (expected.prompt_tokens, 16)
    parts = [{"type": "input_text", "text": SAY}]
    for items in (
        [{"role": "developer", "content": "Write code."}, {"role": "user", "content": parts}],
        [{"type": "message", "role": "system", "content": "Write code."}, {"role": "user", "content": SAY}],
    ):
        given: Any = items
        assert client.responses.create(input=given, **GREEDY).output_text == expected.text


def test_a_stream_has_the_items_of_the_whole(client: openai.OpenAI, address: str) -> None:
    whole = client.responses.create(input=SAY, **GREEDY)
    with client.responses.stream(input=SAY, **GREEDY) as stream:
        last = list(stream)[-1]
    # The client calls a response final only if it is complete.
    assert last.type == "response.incomplete"
    assert last.response.output_text == whole.output_text
    _, kind, text = ask(address, "POST", "/v1/responses", {**GREEDY, "input": SAY, "stream": True})
    assert kind == "text/event-stream"
    found = [json.loads(one.split("data: ", 1)[1]) for one in text.strip().split("\n\n")]
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    kinds = list(dict.fromkeys(event["type"].removeprefix("response.") for event in found))
    assert kinds == [
        *("created", "in_progress", "output_item.added", "content_part.added", "output_text.delta"),
        *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
    ]
    Response.model_validate(found[-1]["response"], strict=True)
    assert found[2]["item"]["content"] == []


@pytest.mark.parametrize("model", ["client", "hermes"])
def test_a_loop_of_a_tool_continues(request: pytest.FixtureRequest, model: str) -> None:
    own: openai.OpenAI = request.getfixturevalue(model)
    asked: Any = {**GREEDY, "max_output_tokens": 200, "tools": TOOLS, "parallel_tool_calls": False}
    asked["tool_choice"] = {"type": "function", "name": "weather"}
    whole = own.responses.create(input=SAY, **asked)
    with own.responses.stream(input=SAY, **asked) as stream:
        for _ in stream:
            pass
        last = stream.get_final_response()
    (call,) = [item for item in whole.output if item.type == "function_call"]
    (again,) = [item for item in last.output if item.type == "function_call"]
    assert again.arguments == call.arguments
    jsonschema.validate(json.loads(call.arguments), CITY)
    output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    asked["tool_choice"] = "none"
    continued = own.responses.create(input=[output], previous_response_id=whole.id, **asked)
    items: Any = [{"role": "user", "content": SAY}, *(item.to_dict() for item in whole.output), output]
    stateless = own.responses.create(input=items, store=False, **asked)
    assert continued.output_text == stateless.output_text
    assert continued.usage is not None
    assert stateless.usage is not None
    assert continued.usage.input_tokens == stateless.usage.input_tokens
    third = own.responses.create(input="And now?", previous_response_id=continued.id, **asked)
    assert third.previous_response_id == continued.id


def test_instructions_are_not_carried_over(client: openai.OpenAI, llm: LLM) -> None:
    first = client.responses.create(input=SAY, instructions="Be short.", **GREEDY)
    second = client.responses.create(input="More", previous_response_id=first.id, **GREEDY)
    dialogue: Any = [
        {"role": "user", "content": SAY},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "More"},
    ]
    assert second.output_text == llm.chat(dialogue, max_new_tokens=16, session=llm.session()).text


def test_reasoning_is_an_item_of_its_own(thinking: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "max_output_tokens": 30, "extra_body": {"seed": 5}}
    whole = thinking.responses.create(input=SAY, reasoning={"effort": "low"}, **asked)
    (item,) = [item for item in whole.output if item.type == "reasoning"]
    assert item.content
    assert whole.usage is not None
    assert whole.usage.output_tokens_details.reasoning_tokens > 0
    with thinking.responses.stream(input=SAY, reasoning={"effort": "low"}, **asked) as stream:
        kinds = [event.type for event in stream]
    assert "response.reasoning_text.delta" in kinds
    off = thinking.responses.create(input=SAY, reasoning={"effort": "none"}, **asked)
    assert all(item.type == "message" for item in off.output)
    again = thinking.responses.create(input="x", previous_response_id=whole.id, **asked)
    assert again.usage is not None


def test_a_text_follows_a_schema(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "city", "schema": CITY, "strict": True}}
    asked: Any = {**GREEDY, "max_output_tokens": 60, "text": form}
    jsonschema.validate(json.loads(client.responses.create(input=SAY, **asked).output_text), CITY)


def test_kept_responses_are_their_owners(llm: LLM, serving: Any) -> None:
    with serving(llm, api_keys=("anna", "bert")) as address:
        clients = [
            openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0) for key in ("anna", "bert")
        ]
        kept = clients[0].responses.create(input=SAY, **GREEDY)
        unkept = clients[0].responses.create(input=SAY, store=False, **GREEDY)
        assert clients[0].responses.retrieve(kept.id).output_text == kept.output_text
        for client, key in ((clients[1], kept.id), (clients[0], unkept.id)):
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(key)
            with pytest.raises(openai.NotFoundError) as caught:
                client.responses.create(input="x", previous_response_id=key, **GREEDY)
            assert caught.value.code == "previous_response_not_found"
        clients[0].responses.delete(kept.id)
        with pytest.raises(openai.NotFoundError):
            clients[0].responses.delete(kept.id)
        for client in clients:
            client.close()


def test_few_responses_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_responses, "MOST_RESPONSES", 3)
    monkeypatch.setattr(kept_responses, "MOST_RESPONSES_BYTES", 100)
    kept = KeptResponses()
    for key in "abc":
        kept.put(key, KeptResponse("anna", (), 10, {}))
    assert kept.get("a", "anna") is not None  # used last
    kept.put("d", KeptResponse("anna", (), 10, {}))
    assert kept.get("b", "anna") is None
    kept.put("e", KeptResponse("anna", (), 85, {}))
    assert [kept.get(key, "anna") is None for key in "acde"] == [True, True, False, False]
    kept.put("f", KeptResponse("anna", (), 101, {}))
    assert kept.get("f", "anna") is None
    assert not kept.remove("e", "anna")


def item(kind: str, **fields: Any) -> dict[str, Any]:
    return {"input": [{"type": kind, **fields}]}


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "no input": ({"input": None}, 400, "input"),
    "no items": ({"input": []}, 400, "input"),
    "an image": (item("message", role="user", content=[{"type": "input_image"}]), 400, "input[0].content[0]"),
    "a reference": (item("item_reference", id="x"), 400, "input[0]"),
    "arguments": (item("function_call", call_id="1", name="f", arguments="["), 400, "input[0].arguments"),
    "an output of nothing": (item("function_call_output", call_id="1", output="x"), 400, "input"),
    "a hosted tool": ({"tools": [{"type": "web_search"}]}, 400, "tools[0]"),
    "no such tool": ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, 400, "tool_choice"),
    "no tools": ({"tool_choice": "required"}, 400, "tool_choice"),
    "schema": (
        {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "?"}}}},
        400,
        "text.format",
    ),
    "heat": ({"temperature": 101}, 400, "temperature"),
    "background": ({"background": True}, 400, "background"),
    "conversation": ({"conversation": "x"}, 400, "conversation"),
    "logprobs": ({"include": ["message.output_text.logprobs"]}, 400, "include"),
    "unknown": ({"tempreature": 1}, 400, "tempreature"),
    "another model": ({"model": "gpt-5"}, 404, "model"),
    "no such response": ({"previous_response_id": "resp_x"}, 404, "previous_response_id"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_server_refuses_with_the_field(address: str, name: str) -> None:
    changed, expected, param = REFUSED[name]
    status, answer = post(address, "/v1/responses", {**GREEDY, "input": SAY, **changed})
    assert status == expected
    assert (answer["error"]["param"] or "").startswith(param), answer
    assert "Traceback" not in json.dumps(answer)


def test_other_failures_have_openais_form(address: str) -> None:
    for status, answer in (
        post(address, "/v1/responses", b"{"),
        post(address, "/v1/responses", {**GREEDY, "input": "x " * 5000}),
        get(address, "/v1/responses/resp_x"),
    ):
        assert status in (400, 404)
        assert answer["error"]["type"] == "invalid_request_error"


# Fields of the official client with a value that the server takes.
TAKEN: dict[str, Any] = {
    "background": False,
    "context_management": [],
    "conversation": None,
    "include": ["reasoning.encrypted_content"],
    "input": SAY,
    "instructions": "x",
    "max_output_tokens": 1,
    "max_tool_calls": 5,
    "metadata": {"a": "b"},
    "model": "tiny",
    "moderation": None,
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt": None,
    "prompt_cache_key": "a",
    "prompt_cache_options": {},
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "high", "summary": "auto"},
    "safety_identifier": "b",
    "service_tier": "flex",
    "store": False,
    "stream": False,
    "stream_options": {"include_obfuscation": False},
    "temperature": 0.5,
    "text": {"verbosity": "low"},
    "tool_choice": "auto",
    "tools": TOOLS,
    "top_logprobs": 0,
    "top_p": 0.9,
    "truncation": "auto",
    "user": "c",
}
UNKNOWN = {"access_programs", "background_options", "image"}


def test_every_field_of_the_client_is_taken_or_unknown(address: str) -> None:
    fields = {*get_type_hints(response_create_params.ResponseCreateParamsBase), "stream"}
    assert fields - UNKNOWN <= TAKEN.keys()
    status, answer = post(address, "/v1/responses", TAKEN)
    assert status == 200, answer
    for name in ("metadata", "instructions", "temperature", "top_p", "tools", "user"):
        assert answer[name] == TAKEN[name] or name == "tools"
