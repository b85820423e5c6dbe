"""Ollama's own client against a server: chats, texts, tools, options, lists of models and errors."""

import json
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from typing import Any

import jsonschema
import ollama
import pytest
from chat_models import CHATS, chat_folder
from serve_http import ask, get, post

from heterollm.llm import LLM
from heterollm.serve import ServeOptions
from heterollm.serve.answers import Ended, Spent, StepOf
from heterollm.serve.defaults import RequestDefaults
from heterollm.serve.doors.anthropic import messages_request
from heterollm.serve.doors.ollama import OllamaChatReply
from heterollm.text import drive

SAY: Any = [{"role": "user", "content": "def add(a, b):"}]
CITY: Any = {"type": "object", "properties": {"city": {"enum": ["Köln", "Bonn"]}}, "required": ["city"]}
CITY["additionalProperties"] = False
TOOL: Any = {"type": "function", "function": {"name": "weather", "description": "Of a city"}}
TOOL["function"]["parameters"] = CITY
ONE: Any = {"type": "any", "disable_parallel_tool_use": True}
GREEDY: Any = {"temperature": 0, "num_predict": 16}
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def client(address: str) -> ollama.Client:
    return ollama.Client(host=address)


@pytest.fixture(scope="module")
def hermes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model with marks around its calls."""
    folder = chat_folder(tmp_path_factory.mktemp("chat") / "model", *CHATS["hermes"])
    with LLM.load(folder, device="host", plan="gpu") as loaded:
        yield loaded


def test_a_chat_is_the_models_own_answer(client: ollama.Client, llm: LLM) -> None:
    expected = llm.chat(SAY, max_new_tokens=16, session=llm.session())
    answer = client.chat(model="tiny", messages=SAY, options=GREEDY)
    assert answer.message.content == expected.text
    assert (answer.done, answer.done_reason, answer.model) == (True, "length", "tiny")
    assert (answer.prompt_eval_count, answer.eval_count) == (expected.prompt_tokens, 16)
    assert all(isinstance(getattr(answer, name), int) for name in TIMES)
    assert answer.created_at is not None
    assert datetime.fromisoformat(answer.created_at).tzinfo
    chunks = list(client.chat(model="tiny:latest", messages=SAY, options=GREEDY, stream=True))
    assert "".join(chunk.message.content or "" for chunk in chunks) == expected.text
    assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].eval_count == 16


def test_a_text_is_a_chat_or_raw(client: ollama.Client, llm: LLM) -> None:
    dialogue: Any = [{"role": "system", "content": "Write code."}, *SAY]
    expected = llm.chat(dialogue, max_new_tokens=16, session=llm.session()).text
    asked: Any = {"model": "tiny", "prompt": SAY[0]["content"], "options": GREEDY}
    assert client.generate(**asked, system="Write code.").response == expected
    raw = llm.generate(SAY[0]["content"], max_new_tokens=16, session=llm.session()).text
    assert client.generate(**asked, raw=True).response == raw
    assert "".join(one.response or "" for one in client.generate(**asked, raw=True, stream=True)) == raw


def test_options_reach_the_answer(client: ollama.Client, llm: LLM) -> None:
    options = {"seed": 3, "temperature": 0.7, "top_k": 0, "top_p": 0.9, "min_p": 0.01, "num_predict": 12}
    options |= {"repeat_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.1}
    ignored = {"num_ctx": 4096, "num_gpu": 99, "mirostat": 0, "use_mmap": True, "repeat_last_n": 64}
    answer = client.chat(model="tiny", messages=SAY, options={**options, **ignored}, keep_alive="5m")
    own: Any = {
        name: value for name, value in options.items() if name not in ("num_predict", "repeat_penalty")
    }
    expected = llm.chat(
        SAY, max_new_tokens=12, repetition_penalty=1.2, session=llm.session(), speculate=False, **own
    )
    assert answer.message.content == expected.text
    text = client.chat(model="tiny", messages=SAY, options=GREEDY).message.content or ""
    cut = client.chat(model="tiny", messages=SAY, options={**GREEDY, "stop": [text[5:8]]})
    assert cut.message.content == text[: text.index(text[5:8])]
    assert cut.done_reason == "stop"
    assert client.chat(model="tiny", messages=SAY, options={"num_predict": -1, "stop": "\n"}).eval_count


def test_a_format_holds_the_answer(client: ollama.Client) -> None:
    answer = client.chat(model="tiny", messages=SAY, format=CITY, options={"num_predict": 60})
    jsonschema.validate(json.loads(answer.message.content or ""), CITY)
    text = client.generate(model="tiny", prompt="x", format="json", options={"num_predict": 200, "seed": 1})
    assert text.done_reason == "length" or isinstance(json.loads(text.response), dict)


def test_calls_are_whole(hermes: LLM) -> None:
    """Ollama's requests cannot demand a call: here another door's does."""
    defaults = RequestDefaults.of(hermes, ServeOptions(name="tiny"))
    tools = [{"name": "weather", "input_schema": CITY}]
    body: Any = {"model": "tiny", "messages": SAY, "max_tokens": 99, "temperature": 0, "tools": tools}
    asked = messages_request(hermes, defaults, json.dumps({**body, "tool_choice": ONE}).encode())
    asked = replace(asked, echo={"model": "tiny"})
    ((sequence,),) = asked.prompts
    session = hermes.session()
    steps = [StepOf(0, one) for one in hermes.on_engine_thread(lambda: list(drive(sequence, session)))]
    assert sequence.result is not None
    end = Ended(0, sequence.result, Spent(answer_tokens=sequence.result.generated_tokens))
    whole = OllamaChatReply(hermes, "tiny", asked).whole(steps, [end], Spent())
    streamed = OllamaChatReply(hermes, "tiny", asked)
    lines = [line for step in steps for line in streamed.step(step)] + streamed.end(end)
    assert (whole["done_reason"], lines[-1]["done"]) == ("stop", True)
    (own,) = whole["message"]["tool_calls"]
    ((call,),) = [line["message"]["tool_calls"] for line in lines if "tool_calls" in line["message"]]
    assert call["function"] == own["function"]
    jsonschema.validate(call["function"]["arguments"], CITY)
    ollama.ChatResponse.model_validate(whole)


def test_results_find_their_calls(client: ollama.Client) -> None:
    call = {"function": {"name": "weather", "arguments": {"city": "Bonn"}}}
    said: Any = {"role": "assistant", "tool_calls": [call, {"function": {"name": "clock", "arguments": {}}}]}
    result = {"role": "tool", "content": "sunny"}
    for names in (({}, {}), ({"tool_name": "clock"}, {"tool_name": "weather"}), ({"name": "weather"}, {})):
        messages: Any = [*SAY, said, *({**result, **name} for name in names)]
        assert client.chat(model="tiny", messages=messages, tools=[TOOL], options=GREEDY).done


def test_thinking_comes_apart(thinking_address: str) -> None:
    client = ollama.Client(host=thinking_address)
    asked: Any = {"model": "tiny", "messages": SAY, "options": {"num_predict": 24, "seed": 5}}
    answer = client.chat(**asked, think=True)
    lines = list(client.chat(**asked, think=True, stream=True))
    assert answer.message.thinking
    assert "".join(line.message.thinking or "" for line in lines) == answer.message.thinking
    assert "thinking" in (client.show("tiny").capabilities or ())
    off = client.chat(**asked, think=False)
    assert off.eval_count == 24
    history: Any = [*SAY, {"role": "assistant", "content": "x", "thinking": "y"}, *SAY]
    assert client.chat(**{**asked, "messages": history}).done


def test_the_model_is_listed_shown_and_loaded(client: ollama.Client, llm: LLM, address: str) -> None:
    (model,) = client.list().models
    assert model.model == "tiny:latest"
    assert model.size == llm.checkpoint.file_bytes  # type: ignore[union-attr]
    (running,) = client.ps().models
    assert (running.model, running.context_length) == ("tiny:latest", llm.context)
    shown = client.show("tiny")
    assert shown.modelinfo is not None
    assert shown.modelinfo["llama.block_count"] == llm.config.layers
    assert shown.capabilities == ["completion", "tools"]
    assert "top_k 40" in (shown.parameters or "")
    assert post(address, "/api/show", {"name": "tiny"})[0] == 200
    _, version = get(address, "/api/version")
    assert [int(part) for part in version["version"].split(".")]
    for empty in (client.chat(model="tiny"), client.generate(model="tiny", keep_alive=0)):
        assert (empty.done, empty.done_reason) == (True, "load")


def test_a_stream_is_the_default_and_has_lines(address: str) -> None:
    body = {"model": "tiny", "prompt": "x", "options": {"num_predict": 3}}
    status, kind, text = ask(address, "POST", "/api/generate", body)
    assert (status, kind) == (200, "application/x-ndjson")
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["done"] for line in lines[:-1]] == [False] * (len(lines) - 1)
    assert lines[-1]["done"]
    status, kind, text = ask(address, "POST", "/api/generate", {**body, "stream": False})
    assert (kind, json.loads(text)["done"]) == ("application/json", True)


CALL: Any = {"function": {"name": "f", "arguments": "{}"}}
REFUSED: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "another model": ("/api/chat", {"model": "llama3"}, 404, "llama3"),
    "no model": ("/api/generate", {"model": None}, 400, "model"),
    "unknown field": ("/api/chat", {"tempreature": 1}, 400, "tempreature"),
    "unknown option": ("/api/chat", {"options": {"tempreature": 1}}, 400, "tempreature"),
    "heat": ("/api/chat", {"options": {"temperature": 101}}, 400, "temperature"),
    "penalty": ("/api/chat", {"options": {"repeat_penalty": 0}}, 400, "repetition_penalty"),
    "images": ("/api/chat", {"messages": [{**SAY[0], "images": ["x"]}]}, 400, "images"),
    "role": ("/api/chat", {"messages": [{"role": "robot", "content": "x"}]}, 400, "role"),
    "text as arguments": ("/api/chat", {"messages": [{**SAY[0], "tool_calls": [CALL]}]}, 400, "arguments"),
    "a result of nothing": ("/api/chat", {"messages": [{"role": "tool", "content": "x"}]}, 400, "result"),
    "thinking": ("/api/chat", {"think": True}, 400, "does not support thinking"),
    "format": ("/api/chat", {"format": "xml"}, 400, "format"),
    "schema": ("/api/chat", {"format": {"type": "?"}}, 400, ""),
    "suffix": ("/api/generate", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    "context": ("/api/generate", {"prompt": "x", "context": [5]}, 400, "context"),
    "too long": ("/api/generate", {"prompt": "x " * 5000}, 400, "context"),
    "show nothing": ("/api/show", {"model": None}, 400, "model"),
    "show another": ("/api/show", {"model": "x"}, 404, "x"),
    "pull": ("/api/pull", {}, 404, "Not Found"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_have_ollamas_form(address: str, name: str) -> None:
    path, changed, expected, said = REFUSED[name]
    base = {"model": "tiny", **({"messages": SAY} if path == "/api/chat" else {})}
    status, answer = post(address, path, {**base, **changed})
    assert status == expected
    assert list(answer) == ["error"]
    assert said in answer["error"]
    assert "Traceback" not in answer["error"]


def test_the_clients_errors_have_the_message(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="llama3") as caught:
        client.chat(model="llama3", messages=SAY)
    assert caught.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="temperature"):
        list(client.chat(model="tiny", messages=SAY, options={"temperature": -1}, stream=True))
