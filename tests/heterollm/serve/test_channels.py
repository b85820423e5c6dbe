"""Answers of gpt-oss at all doors: their channels come apart, and only the right tokens end them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from chat_models import CHATS, chat_folder

from heterollm.llm import LLM

SAY: Any = [{"role": "user", "content": "What is the weather?"}]
CITY: Any = {"type": "object", "properties": {"city": {"enum": ["Bonn"]}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": CITY}}]
ENDS = ("<|return|>", "<|call|>")


@pytest.fixture(scope="module")
def speaker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model with the tokens of harmony and end tokens as published checkpoints have them."""
    folder = chat_folder(tmp_path_factory.mktemp("chat") / "model", *CHATS["gpt-oss"])
    added = json.loads((folder / "tokenizer.json").read_text("utf-8"))["added_tokens"]
    ids = {token["content"]: token["id"] for token in added}
    ends = {"eos_token_id": [ids[name] for name in ENDS]}
    (folder / "generation_config.json").write_text(json.dumps(ends), "utf-8")
    with LLM.load(folder, device="host", plan="gpu") as loaded:
        yield loaded


@pytest.fixture(scope="module")
def address(speaker: LLM, serving: Any) -> Iterator[str]:
    with serving(speaker) as found:
        yield found


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="unused", max_retries=0) as made:
        yield made


def likely(speaker: LLM, **texts: float) -> Any:
    """Return the bias of likely ends of messages, and of the first tokens of texts."""
    tokenizer = speaker.tokenizer
    bias = {tokenizer.encode(text, add_bos=False)[0]: value for text, value in texts.items()}
    return {str(token): value for token, value in ({tokenizer.added_tokens["<|end|>"]: 8.0} | bias).items()}


def test_the_end_of_a_message_does_not_end_the_answer(speaker: LLM) -> None:
    tokens = speaker.tokenizer.added_tokens
    assert {tokens[name] for name in ENDS} <= speaker.tokenizer.eos_ids
    assert tokens["<|end|>"] not in speaker.tokenizer.eos_ids


def test_a_schema_holds_the_text_behind_the_reasoning(client: openai.OpenAI, speaker: LLM) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": [1]}}}
    asked: Any = {"model": "tiny", "messages": SAY, "response_format": form}
    asked["logit_bias"] = likely(speaker, analysis=3.0)
    for seed in range(12):
        options: Any = {**asked, "seed": seed, "max_tokens": 150, "reasoning_effort": "low"}
        (choice,) = client.chat.completions.create(**options).choices
        if choice.finish_reason != "stop":
            continue
        reasoning = (choice.message.model_extra or {}).get("reasoning_content", "")
        assert json.loads(choice.message.content or "") == [1]
        deltas = [one.choices[0].delta for one in client.chat.completions.create(**options, stream=True)]
        assert "".join(one.content or "" for one in deltas) == choice.message.content
        assert "".join((one.model_extra or {}).get("reasoning_content", "") for one in deltas) == reasoning
        if reasoning:
            return
    pytest.fail("no answer had both")


def test_a_call_and_its_result_make_a_turn(client: openai.OpenAI, speaker: LLM) -> None:
    options: Any = {"model": "tiny", "messages": SAY, "tools": TOOLS, "max_tokens": 150}
    options["logit_bias"] = likely(speaker, commentary=6.0)
    for seed in range(12):
        (choice,) = client.chat.completions.create(**options, tool_choice="required", seed=seed).choices
        if choice.finish_reason != "tool_calls":
            continue
        (call,) = choice.message.tool_calls or ()
        assert json.loads(call.function.arguments) == {"city": "Bonn"}
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
        spoken: Any = choice.message.model_dump(exclude_none=True)
        again: Any = {**options, "messages": [*SAY, spoken, result], "max_tokens": 4}
        assert client.chat.completions.create(**again).choices[0].finish_reason == "length"
        return
    pytest.fail("no call came to its end")


SCHEMA: Any = {"const": [1]}
BODIES: dict[str, Any] = {
    "/v1/responses": {
        "input": "Hi",
        "max_output_tokens": 40,
        "temperature": 0,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
    },
    "/v1/messages": {
        "messages": SAY,
        "max_tokens": 40,
        "temperature": 0,
        "output_config": {"effort": "max", "format": {"type": "json_schema", "schema": SCHEMA}},
    },
    "/api/chat": {
        "messages": SAY,
        "think": "high",
        "format": SCHEMA,
        "options": {"num_predict": 40, "temperature": 0},
    },
}


def divided(path: str, body: Any) -> tuple[str, str]:
    """Return the reasoning and the text of an answer."""
    if path == "/api/chat":
        return body["message"].get("thinking", ""), body["message"]["content"]
    blocks = body["content"] if path == "/v1/messages" else body["output"]
    if path == "/v1/responses":
        blocks = [block for item in blocks for block in item["content"]]
    reasoning = "".join(
        one.get("thinking", "") or one["text"] * ("reasoning" in one["type"]) for one in blocks
    )
    return reasoning, "".join(one["text"] for one in blocks if one["type"] in ("text", "output_text"))


@pytest.mark.parametrize("path", BODIES)
def test_each_door_has_reasoning_apart(path: str, address: str) -> None:
    """The grammar begins the answer with a header: a text that is not read would begin with its channel."""
    answer = httpx.post(
        f"{address}{path}", json={"model": "tiny", "stream": False, **BODIES[path]}, timeout=60
    )
    assert answer.status_code == 200, answer.text
    reasoning, text = divided(path, answer.json())
    assert reasoning or text
    assert not reasoning.startswith("analysis")
    assert not text or "[1]".startswith("".join(text.split()))
