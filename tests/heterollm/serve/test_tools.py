"""Tools of chats, with OpenAI's own client: requests, answers and streams."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import openai
import pytest
from chat_models import CHATS, chat_folder

from heterollm.llm import LLM

SAY: Any = [{"role": "user", "content": "What is the weather?"}]
WEATHER: Any = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "Bonn"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
SEARCH: Any = {"type": "object", "properties": {"text": {"type": "string", "maxLength": 5}}}
SCHEMAS: dict[str, Any] = {"weather": WEATHER, "clock": {"maxProperties": 0}, "search": SEARCH}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "description": "Of a city", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "clock", "strict": True}},
    {"type": "function", "function": {"name": "search", "parameters": SEARCH}},
]
ASK: Any = {"model": "tiny", "messages": SAY, "tools": TOOLS, "max_tokens": 300}


def loaded(name: str, factory: pytest.TempPathFactory) -> LLM:
    folder = chat_folder(factory.mktemp("chat") / "model", *CHATS[name])
    return LLM.load(folder, device="host", plan="gpu")


@contextlib.contextmanager
def client_of(
    llm: LLM, serving: Callable[..., contextlib.AbstractContextManager[str]]
) -> Iterator[openai.OpenAI]:
    with (
        serving(llm) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, serving: Any) -> Iterator[openai.OpenAI]:
    """A client of a model without a template: its calls are JSON."""
    with loaded("plain", tmp_path_factory) as llm, client_of(llm, serving) as made:
        yield made


@pytest.fixture(scope="module")
def thinking(thinking_address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{thinking_address}/v1", api_key="unused", max_retries=0) as made:
        yield made


def check(calls: Any) -> None:
    assert calls
    for call in calls:
        assert (call.type, len(call.id)) == ("function", 9)
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def test_a_required_call_has_openais_form(client: openai.OpenAI) -> None:
    for seed in range(4):
        (choice,) = client.chat.completions.create(**ASK, tool_choice="required", seed=seed).choices
        if choice.finish_reason == "length":
            continue
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content is None
        check(choice.message.tool_calls)
        return
    pytest.fail("no call came to its end")


def test_a_choice_may_name_tools(client: openai.OpenAI) -> None:
    one: Any = {"type": "function", "function": {"name": "weather"}}
    allowed: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [one]}}
    for choice in (one, allowed):
        (answer,) = client.chat.completions.create(
            **ASK, tool_choice=choice, parallel_tool_calls=False, seed=3
        ).choices
        (call,) = answer.message.tool_calls or ()
        assert call.function.name == "weather"
        check([call])
    (answer,) = client.chat.completions.create(**ASK, tool_choice="none", seed=3).choices
    assert answer.message.tool_calls is None
    assert answer.message.content


def test_a_stream_has_the_calls_of_the_whole_answer(client: openai.OpenAI) -> None:
    options: Any = {**ASK, "seed": 2, "tool_choice": "required", "n": 2, "max_tokens": 120}
    whole = client.chat.completions.create(**options).choices
    chunks = list(client.chat.completions.create(**options, stream=True))
    for choice in whole:
        own = [one for chunk in chunks for one in chunk.choices if one.index == choice.index]
        deltas = [one for each in own for one in each.delta.tool_calls or ()]
        assert own[0].delta.role == "assistant"
        assert own[-1].finish_reason == choice.finish_reason
        for index, call in enumerate(choice.message.tool_calls or ()):
            first, *others = [delta for delta in deltas if delta.index == index]
            # Clients join all names and ids that come.
            assert first.function.name == call.function.name
            assert all(one.id is None and one.function.name is None for one in others)
            pieces = (one.function.arguments for one in (first, *others))
            assert "".join(pieces) == call.function.arguments


def test_the_python_api_divides_an_answer_as_the_server_does(thinking: openai.OpenAI, thinker: LLM) -> None:
    ends = thinker.tokenizer.added_tokens["</think>"]
    reasons = set()
    for bias in (0, 4, 40):
        chosen: Any = {"logit_bias": {ends: bias}, "seed": 1, "temperature": 1.0, "top_p": 1.0}
        asked: Any = {"model": "tiny", "messages": SAY, "max_tokens": 40, **chosen}
        (choice,) = thinking.chat.completions.create(**asked, extra_body={"top_k": 0, "min_p": 0}).choices
        answer = thinker.chat(SAY, max_new_tokens=40, **chosen, session=thinker.session())
        extra: Any = choice.message.model_extra
        assert answer.text == choice.message.content
        assert answer.reasoning == (extra.get("reasoning_content") or "")
        assert answer.raw_text == thinker.tokenizer.decode(answer.token_ids, controls=True)
        reasons.add((bool(answer.text), bool(answer.reasoning)))
        stream = thinker.stream_chat(SAY, max_new_tokens=40, **chosen, session=thinker.session())
        steps = list(stream)
        assert "".join(step.text for step in steps) == answer.text == stream.result.text
        assert "".join(step.reasoning for step in steps) == answer.reasoning
        assert tuple(step.token_id for step in steps) == answer.token_ids
    assert (False, True) in reasons
    assert {text for text, _ in reasons} == {True, False}


def test_the_python_api_holds_an_answer_behind_its_reasoning_to_a_schema(thinker: LLM) -> None:
    """The prompt opens the reasoning, so that the schema must not begin with the first token."""
    bias = {thinker.tokenizer.added_tokens["</think>"]: 40}
    answer = thinker.chat(SAY, json_schema=WEATHER, max_new_tokens=300, seed=1, logit_bias=bias)
    assert answer.stop_reason in ("complete", "eos")
    jsonschema.validate(json.loads(answer.text), WEATHER)
    plain = thinker.generate("x", max_new_tokens=2)
    assert (plain.reasoning, plain.raw_text) == ("", None)


def test_the_clients_own_reader_of_streams_reads_them(thinking: openai.OpenAI, thinker: LLM) -> None:
    bias = {str(thinker.tokenizer.added_tokens["</think>"]): 40}
    one: Any = {"type": "function", "function": {"name": "weather"}}
    with thinking.chat.completions.stream(**ASK, tool_choice=one, logit_bias=bias, seed=1) as stream:
        (choice,) = stream.get_final_completion().choices
    check(choice.message.tool_calls)
    assert choice.finish_reason == "tool_calls"


@pytest.mark.parametrize("content", [None, "", "absent", [{"type": "text", "text": "Let me see."}]])
def test_the_turn_after_a_call_is_answered(client: openai.OpenAI, content: Any) -> None:
    calls = [
        {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate((("weather", '{"city": "K\\u00f6ln"}'), ("clock", "")))
    ]
    spoken: Any = {"role": "assistant", "content": content, "tool_calls": calls, "annotations": []}
    if content == "absent":
        del spoken["content"]
    results: Any = [
        {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "12:34"}]},
        {"role": "tool", "tool_call_id": "call_0", "content": "sunny"},
    ]
    answer = client.chat.completions.create(**{**ASK, "messages": [*SAY, spoken, *results], "max_tokens": 4})
    assert answer.choices[0].finish_reason


def test_a_loop_of_three_tools_comes_to_its_end(client: openai.OpenAI) -> None:
    messages, left = list(SAY), list(SCHEMAS)
    for seed in range(8):
        one: Any = [{"type": "function", "function": {"name": name}} for name in left]
        choice: Any = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": one}}
        asked: Any = {**ASK, "messages": messages, "tool_choice": choice, "seed": seed}
        (answer,) = client.chat.completions.create(**asked, parallel_tool_calls=False).choices
        if answer.finish_reason == "length":
            continue
        check(answer.message.tool_calls)
        messages.append(answer.message.model_dump(exclude_none=True))
        for call in answer.message.tool_calls or ():
            left.remove(call.function.name)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
        if not left:
            break
    assert not left
    (last,) = client.chat.completions.create(
        **{**ASK, "messages": messages, "max_tokens": 4}, tool_choice="none"
    ).choices
    assert last.message.content


def test_an_answer_that_is_cut_in_a_call_has_its_beginning(client: openai.OpenAI) -> None:
    one: Any = {"type": "function", "function": {"name": "weather"}}
    options: Any = {**ASK, "tool_choice": one, "temperature": 0}
    (whole,) = client.chat.completions.create(**options).choices
    (cut,) = client.chat.completions.create(**{**options, "max_tokens": 24}).choices
    assert cut.finish_reason == "length"
    assert whole.message.tool_calls
    for call in cut.message.tool_calls or ():
        assert whole.message.tool_calls[0].function.arguments.startswith(call.function.arguments)


def test_reasoning_comes_apart(thinking: openai.OpenAI, thinker: LLM) -> None:
    tokens = thinker.tokenizer.added_tokens
    options: Any = {"model": "tiny", "messages": SAY, "seed": 5, "max_tokens": 40}
    (cut,) = thinking.chat.completions.create(**options, logit_bias={str(tokens["</think>"]): -100}).choices
    assert cut.message.content == ""
    reasoning = cut.message.model_extra["reasoning_content"]
    assert reasoning == cut.message.model_extra["reasoning"]
    likely = {str(tokens["</think>"]): 8}
    answer = thinking.chat.completions.create(**options, logit_bias=likely)
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert 0 < (details.reasoning_tokens or 0) < answer.usage.completion_tokens
    chunks = list(thinking.chat.completions.create(**options, logit_bias=likely, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    message = answer.choices[0].message
    assert "".join(one.content or "" for one in deltas) == message.content
    streamed = "".join((one.model_extra or {}).get("reasoning_content") or "" for one in deltas)
    assert streamed == (message.model_extra or {}).get("reasoning_content", "")
    for off in ({"reasoning_effort": "none"}, {"extra_body": {"enable_thinking": False}}):
        (plain,) = thinking.chat.completions.create(**options, **off).choices
        assert "reasoning_content" not in (plain.message.model_extra or {})
    history: Any = [*SAY, {"role": "assistant", "content": "x", "reasoning_content": "y"}, *SAY]
    assert thinking.chat.completions.create(**{**options, "messages": history}).choices


def test_a_schema_holds_the_answer_behind_reasoning_and_beside_tools(
    thinking: openai.OpenAI, thinker: LLM
) -> None:
    bias = {str(thinker.tokenizer.added_tokens["</think>"]): 40}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "a<think>b"}}}
    for tools in ({}, {"tools": TOOLS, "logit_bias": {**bias, str(thinker.tokenizer.vocabulary['"']): 20}}):
        options: Any = {"model": "tiny", "messages": SAY, "max_tokens": 60, "logit_bias": bias, **tools}
        (choice,) = thinking.chat.completions.create(**options, response_format=form).choices
        assert choice.message.content == '"a<think>b"'
        assert choice.finish_reason == "stop"


def function(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


USERS: Any = {"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}


def called(**fields: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}, **fields}
    return {"messages": [*SAY, {"role": "assistant", "tool_calls": [call]}]}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a name that breaks the form": (function(name='f"'), "tools[0].function.name"),
    "another kind": ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
    "two of a name": ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    "no object": (function(parameters={"type": "string"}), "tools"),
    "no schema": (function(parameters={"properties": {"a": {"type": "?"}}}), "tools"),
    "not enforced": (
        function(strict=True, parameters={"properties": {"a": {"not": {"type": "null"}}}}),
        "tools",
    ),
    "no such tool": (
        {**function(), "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
    ),
    "no tools": ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    "arguments": (
        called(function={"name": "f", "arguments": "[1"}),
        "messages[1].tool_calls[0].function.arguments",
    ),
    "a user's call": (
        {
            "messages": [
                {"role": "user", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
            ]
        },
        "messages[0].tool_calls",
    ),
    "no content": ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
    "a result of nothing": (
        {"messages": [*SAY, {"role": "tool", "tool_call_id": "1", "content": "x"}]},
        "messages",
    ),
    "two grammars": ({**function(), "extra_body": {"grammar": 'start: "a"'}}, "grammar"),
    "effort": ({"reasoning_effort": "high"}, "reasoning_effort"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_server_refuses_with_the_field(client: openai.OpenAI, name: str) -> None:
    changed, param = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": SAY, "max_tokens": 2, **changed})
    body: Any = caught.value.body
    assert body["param"] == param, body
