"""OpenAI's own client against a server of the bundled model."""

import json
from typing import Any

import openai
import pytest

from heterollm.llm import LLM

SAY: Any = [{"role": "user", "content": "def add(a, b):"}]


def test_a_chat_is_the_models_own_answer(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.chat.completions.create(model="tiny", messages=SAY, max_tokens=16, temperature=0)
    expected = llm.chat(SAY, max_new_tokens=16, session=llm.session())
    (choice,) = answer.choices
    assert choice.message.content == expected.text
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == expected.prompt_tokens
    assert answer.usage.completion_tokens == 16
    timings = answer.model_extra["timings"]
    assert timings["plan"] == llm.plan.level == "rows"
    assert timings["prefill_tokens"] + timings["cached_tokens"] == expected.prompt_tokens
    assert timings["decode_tokens_per_s"] > 0


def test_a_stream_has_the_text_of_the_whole_answer(client: openai.OpenAI) -> None:
    options: Any = {"model": "tiny", "messages": SAY, "max_tokens": 16, "seed": 5}
    whole = client.chat.completions.create(**options)
    chunks = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage


def test_each_answer_of_several_has_a_seed_of_its_own(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(
        model="tiny", prompt=["import ", "def "], n=2, seed=3, max_tokens=12, top_p=0.9
    )
    expected = [
        llm.generate(
            prompt,
            temperature=0.8,  # llama.cpp's, as top_k and min_p
            top_k=40,
            min_p=0.05,
            top_p=0.9,
            max_new_tokens=12,
            seed=seed,
            session=llm.session(),
        ).text
        for prompt in ("import ", "def ")
        for seed in (3, 4)
    ]
    assert [choice.text for choice in answer.choices] == expected


def test_log_probabilities_name_the_likeliest_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=SAY, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    assert answer.choices[0].logprobs is not None
    tokens = answer.choices[0].logprobs.content
    assert tokens is not None
    assert "".join(token.token for token in tokens) == answer.choices[0].message.content
    for token in tokens:
        assert token.token == token.top_logprobs[0].token
        assert token.logprob == token.top_logprobs[0].logprob >= token.top_logprobs[2].logprob
    old = client.completions.create(model="tiny", prompt="def ", max_tokens=4, temperature=0, logprobs=2)
    logprobs = old.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset[1] == len(logprobs.tokens[0])
    assert len(logprobs.top_logprobs[0]) == 2


def test_an_answer_ends_at_a_stop_string_and_follows_a_schema(client: openai.OpenAI) -> None:
    free = client.completions.create(model="tiny", prompt="def add(a, b):", max_tokens=24, temperature=0)
    text = free.choices[0].text
    cut = client.completions.create(
        model="tiny", prompt="def add(a, b):", max_tokens=24, temperature=0, stop=[text[9:12]]
    )
    assert cut.choices[0].text == text[: text.index(text[9:12])]
    assert cut.choices[0].finish_reason == "stop"
    schema = {
        "type": "object",
        "properties": {"age": {"type": "integer", "maximum": 99}},
        "required": ["age"],
    }
    schema["additionalProperties"] = False
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    answer = client.chat.completions.create(
        model="tiny", messages=SAY, response_format=wanted, temperature=0, max_tokens=60
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content or "")["age"], int)


def test_the_model_is_listed(client: openai.OpenAI, llm: LLM) -> None:
    (model,) = client.models.list()
    assert client.models.retrieve("tiny") == model
    assert model.model_extra["context_length"] == llm.context


REFUSED: dict[str, tuple[dict[str, Any], str, str | None]] = {
    "tools": ({"tools": [{"type": "function"}]}, "tools[0]", None),
    "penalty": ({"frequency_penalty": 2.5}, "frequency_penalty", None),
    "image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        None,
    ),
    "tiny penalty": ({"extra_body": {"repetition_penalty": 1e-300}}, "repetition_penalty", None),
    "heat": ({"temperature": "hot"}, "temperature", None),
    "far too many": ({"n": 99}, "n", None),
    "more than there are sessions": ({"n": 4}, "n", None),
    "unknown field": ({"extra_body": {"tempreature": 1}}, "tempreature", None),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "?"}}}},
        "response_format",
        None,
    ),
    "no messages": ({"messages": []}, "messages", None),
    "too long": (
        {"messages": [{"role": "user", "content": "x " * 5000}]},
        None,
        "context_length_exceeded",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_server_refuses_with_the_field(client: openai.OpenAI, name: str) -> None:
    changed, param, code = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{"model": "tiny", "messages": SAY, **changed})
    body: Any = caught.value.body
    assert body["type"] == "invalid_request_error"
    assert body["message"]
    assert (body["param"], body["code"]) == (param, code)


def test_what_the_server_lacks_is_said(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="'tiny'"):
        client.chat.completions.create(model="gpt-4", messages=SAY)
    with pytest.raises(openai.BadRequestError, match="no embeddings"):
        client.embeddings.create(model="tiny", input="text")
