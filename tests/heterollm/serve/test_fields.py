"""Every field of OpenAI's requests, and the names that clients of other servers send."""

import json
import typing
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types import Completion, completion_create_params
from openai.types.chat import ChatCompletionChunk
from openai.types.chat import completion_create_params as chat_params

from heterollm.base import HeteroLLMError, OptionError
from heterollm.llm import LLM
from heterollm.serve import ServeOptions
from heterollm.serve.asking import AnswerRequest
from heterollm.serve.defaults import RequestDefaults
from heterollm.serve.doors.openai import chat_request, completion_request
from heterollm.serve.doors.openai_fields import IGNORED, NEUTRAL, RENAMED
from heterollm.serve.errors import RequestError
from heterollm.text import GenerationResult, drive

SAY: Any = [{"role": "user", "content": "def add(a, b):"}]
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {}}}
BAD_TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
PART: Any = {"type": "text", "text": "x"}

# Values that are taken, and values that are refused, of each field of OpenAI.
SHARED: dict[str, tuple[list[Any], list[Any]]] = {
    "model": (["tiny"], ["gpt-4", None, 5]),
    "temperature": ([None, 0, 1, 1.5, 1e-300], [-1e-9, 101, "hot", 1e999, True]),
    "top_p": ([None, 1, 0, 0.5, 5e-324], [1.01, -1, "x"]),
    "n": ([None, 1, 2], [0, 17, 1.5]),
    "seed": ([None, 0, -1, 2**63 - 1, -(2**63)], [2**63, 1.5, "x"]),
    "stop": ([None, "x", ["a", "b"], [], ""], [["a"] * 17, 5]),
    "max_tokens": ([None, 1, 10**9, -1], [0, -3, 1.5, True]),
    "frequency_penalty": ([None, 0, 2, -2, 0.5], [2.1, -2.1, "x"]),
    "presence_penalty": ([None, 0, 2, -2, 0.5], [2.1, -2.1, "x"]),
    "logit_bias": ([None, {}, {"50": 0}, {"50": -100, "7": 100}], [{"50": 101}, {"x": 1}, {"99999": 1}, [1]]),
    "stream": ([None, False, True], ["yes"]),
    "stream_options": (
        [None, {}, {"include_usage": True}, {"include_usage": None}, {"include_obfuscation": False}],
        [{"include_obfuscation": True}, {"usage": True}],
    ),
    "user": ([None, "anna"], []),
}
CHAT: dict[str, tuple[list[Any], list[Any]]] = {
    **SHARED,
    "messages": (
        [
            SAY,
            [{**SAY[0], "name": "anna"}],
            [{"role": "developer", "content": [PART, PART]}, *SAY],
            [{"role": "assistant", "content": "x", "refusal": None, "tool_calls": []}, *SAY],
        ],
        [
            [],
            None,
            *([{"role": role, "content": "x"}] for role in ("tool", "function", "robot")),
            *([{"role": "user", "content": content}] for content in (None, [], 5, [{"type": "refusal"}])),
            [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}],
        ],
    ),
    "audio": ([None], [{"format": "wav", "voice": "x"}]),
    "function_call": ([None, "none", "auto"], [{"name": "f"}]),
    "functions": ([None, []], [[{"name": "f"}]]),
    "logprobs": ([None, False, True], ["yes"]),
    "max_completion_tokens": ([None, 1, 10**9, -1], [0, 1.5]),
    "metadata": ([None, {}, {"a": "b"}], []),
    "modalities": ([None, ["text"]], [["text", "audio"], ["audio"]]),
    "moderation": ([None], [{"model": "x"}]),
    "parallel_tool_calls": ([None, True, False], ["x"]),
    "prediction": ([None], [{"type": "content", "content": "x"}]),
    "prompt_cache_key": ([None, "a"], []),
    "prompt_cache_options": ([None, {}], []),
    "prompt_cache_retention": ([None, "24h"], []),
    "reasoning_effort": ([None, "none"], ["low", "high"]),
    "response_format": (
        [
            None,
            {"type": "text"},
            {"type": "json_object"},
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}, "strict": True}},
        ],
        [{"type": "xml"}, {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "?"}}}],
    ),
    "safety_identifier": ([None, "a"], []),
    "service_tier": ([None, "auto", "default", "flex", "priority"], ["scale", "fast"]),
    "store": ([None, False, True], []),
    "tool_choice": ([None, "none", "auto"], ["required", {"type": "function", "function": {"name": "f"}}]),
    "tools": ([None, [], [TOOL]], [[TOOL, TOOL], [{"type": "custom", "custom": {"name": "f"}}], [BAD_TOOL]]),
    "top_logprobs": ([None, 0], [3, 21, -1]),
    "verbosity": ([None, "medium"], ["low", "high"]),
    "web_search_options": ([None], [{}]),
}
COMPLETION: dict[str, tuple[list[Any], list[Any]]] = {
    **SHARED,
    "prompt": (["x", ["x", "y"], [5, 6], [[5, 6], [7]]], ["", [], [[]], None, [5, "x"], [-1], [10**9]]),
    "best_of": ([None, 1], [2]),
    "echo": ([None, False], [True]),
    "logprobs": ([None, 0, 20], [21, -1, True]),
    "suffix": ([None, ""], ["x"]),
}


@pytest.fixture(scope="module")
def defaults(llm: LLM) -> RequestDefaults:
    return RequestDefaults.of(llm, ServeOptions(name="tiny"))


def asked(llm: LLM, defaults: RequestDefaults, fields: dict[str, Any]) -> AnswerRequest:
    chat = "prompt" not in fields
    body = json.dumps({"model": "tiny", **({"messages": SAY} if chat else {}), **fields})
    return (chat_request if chat else completion_request)(llm, defaults, body.encode())


def answered(llm: LLM, defaults: RequestDefaults, **fields: Any) -> GenerationResult:
    """The answer to a request, computed at once."""
    ((sequence,),) = asked(llm, defaults, fields).prompts
    session = llm.session()
    assert llm.on_engine_thread(lambda: list(drive(sequence, session)))
    assert sequence.result is not None
    return sequence.result


def test_the_tables_have_every_field_of_openais_client() -> None:
    chat = typing.get_type_hints(chat_params.CompletionCreateParamsBase)
    assert set(CHAT) == {*chat, "stream"}
    completion = typing.get_type_hints(completion_create_params.CompletionCreateParamsBase)
    assert set(COMPLETION) == {*completion, "stream"}


def cases(index: int) -> Iterator[tuple[str, str, Any]]:
    for kind, table in (("chat", CHAT), ("completion", COMPLETION)):
        for field, values in table.items():
            for value in values[index]:
                yield kind, field, value


def test_neutral_and_supported_values_are_taken(llm: LLM, defaults: RequestDefaults) -> None:
    for kind, field, value in cases(0):
        asked(llm, defaults, {**({} if kind == "chat" else {"prompt": "x"}), field: value})


def test_other_values_are_refused_by_name(llm: LLM, defaults: RequestDefaults) -> None:
    for kind, field, value in cases(1):
        with pytest.raises(HeteroLLMError) as caught:
            asked(llm, defaults, {**({} if kind == "chat" else {"prompt": "x"}), field: value})
        said = f"{getattr(caught.value, 'param', None)} {caught.value}"
        assert field in said or (field == "temperature" and "JSON" in said), (field, value, said)


# Values of other servers' names that are taken, and values that are refused.
FOREIGN: dict[str, tuple[list[Any], list[Any]]] = {
    "repeat_penalty": ([None, 1, 1.1], [0, 1e-300, 1e300]),
    "repetition_penalty": ([None, 1, 1.1], [0, 1e-300, 1e300, -1]),
    "num_predict": ([None, 5, -1, -2], [0, "x"]),
    "n_predict": ([None, 5, -1], [0]),
    "max_new_tokens": ([None, 5], [0]),
    "top_k": ([None, 0, -1, 40, 10**30], [-2, 1.5]),
    "min_p": ([None, 0, 0.5], [1.1]),
    "cache_prompt": ([None, True], [False]),
    "chat_template_kwargs": ([None, {}, {"enable_thinking": False}], [{"colour": "red"}]),
    "enable_thinking": ([None, False], [True]),
    "num_ctx": ([None], [2048]),
    "mirostat": ([None, 0], [2]),
    "mirostat_tau": ([None, 5], []),
    "typical_p": ([None, 1, 1.0], [0.5]),
    "dry_multiplier": ([None, 0, 0.0], [0.8]),
    "dry_base": ([None, 1.75], []),
    "xtc_probability": ([None, 0], [0.5]),
    "xtc_threshold": ([None, 0.1], []),
    "tfs_z": ([None, 1], [0.5]),
    "samplers": ([None], [["top_k"]]),
    "grammar": ([None, 'start: "a"'], ['root ::= "a"', "start: b", 5]),
    "json_schema": ([None, {"type": "null"}], [{"type": "?"}, 5]),
    "guided_json": ([None, {"type": "null"}], [{"type": "?"}]),
    "guided_choice": ([None, ["yes", 'no "really"\n']], [[], "yes", [1]]),
    "guided_regex": ([None], ["a+"]),
    "guided_grammar": ([None], ["root ::= x"]),
    "min_tokens": ([None, 0], [5]),
    "ignore_eos": ([None, True, False], ["x"]),
    "stop_token_ids": ([None, []], [[5]]),
    "skip_special_tokens": ([None, True], [False]),
    "n_probs": ([None, 0], [5]),
    "options": ([None, {}], [{"num_ctx": 5}]),
    "format": ([None, ""], ["json"]),
    "keep_alive": (["5m"], []),
    "tempreature": ([], [1]),
}


def test_names_of_other_servers_are_taken_or_answered(llm: LLM, defaults: RequestDefaults) -> None:
    for field, (taken, refused) in FOREIGN.items():
        for value in taken:
            asked(llm, defaults, {field: value})
        for value in refused:
            with pytest.raises(HeteroLLMError) as caught:
                asked(llm, defaults, {field: value})
            said = f"{getattr(caught.value, 'param', None)} {caught.value}"
            assert field in said or RENAMED[field][0] in said, (field, value, said)


def test_every_neutral_value_is_taken_and_another_is_not(llm: LLM, defaults: RequestDefaults) -> None:
    for name, neutral in NEUTRAL.items():
        for value in neutral:
            asked(llm, defaults, {"prompt": "x", name: value})
        with pytest.raises(RequestError, match=name) as caught:
            asked(llm, defaults, {"prompt": "x", name: {"not": "neutral"}})
        assert caught.value.param == name
        assert caught.value.code == "unsupported_parameter"
        assert caught.value.fix
    for name in IGNORED:
        asked(llm, defaults, {name: "anything"})


def test_a_name_of_another_server_means_the_same(llm: LLM, defaults: RequestDefaults) -> None:
    own = answered(llm, defaults, seed=3, max_tokens=12, repetition_penalty=1.3, top_k=0)
    theirs = answered(llm, defaults, seed=3, n_predict=12, repeat_penalty=1.3, top_k=-1)
    assert theirs.token_ids == own.token_ids
    assert own.token_ids != answered(llm, defaults, seed=3, max_tokens=12, top_k=0).token_ids
    assert answered(llm, defaults, guided_choice=["maybe"]).text == "maybe"
    assert answered(llm, defaults, json_schema={"const": 5}).text == "5"
    with pytest.raises(RequestError, match="both given"):
        asked(llm, defaults, {"repeat_penalty": 1.1, "repetition_penalty": 1.1})


def test_a_bias_forbids_and_forces_tokens(llm: LLM, defaults: RequestDefaults) -> None:
    plain = answered(llm, defaults, temperature=0, max_tokens=4)
    first = plain.token_ids[0]
    other = answered(llm, defaults, temperature=0, max_tokens=4, logit_bias={str(first): -100})
    assert first not in other.token_ids
    forced = answered(llm, defaults, temperature=0, max_tokens=4, logit_bias={"77": 100}, ignore_eos=True)
    assert forced.token_ids == (77,) * 4
    varied = answered(
        llm,
        defaults,
        temperature=0,
        max_tokens=4,
        logit_bias={"77": 20},
        frequency_penalty=2,
        ignore_eos=True,
    )
    assert varied.token_ids[0] == 77


def test_the_seed_of_none_is_none(llm: LLM, defaults: RequestDefaults) -> None:
    assert not asked(llm, defaults, {"seed": -1}).reproducible
    assert asked(llm, defaults, {"seed": -2}).reproducible
    seeds = RequestDefaults(defaults.name, {**defaults.sampling, "seed": 7}, None, "")
    assert asked(llm, seeds, {}).reproducible
    assert not asked(llm, seeds, {"seed": -1}).reproducible


def test_both_limits_hold_in_both_kinds_of_requests(llm: LLM, defaults: RequestDefaults) -> None:
    for kind in ({}, {"prompt": "x"}):
        given: Any = {**kind, "max_completion_tokens": 3, "max_tokens": 5, "ignore_eos": True}
        assert answered(llm, defaults, **given).generated_tokens == 3


def test_a_request_without_parameters_has_the_servers_defaults(
    llm: LLM, defaults: RequestDefaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    from heterollm.model import SamplingDefaults

    assert defaults.sampling == {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
    assert "llama.cpp" in str(defaults)
    chosen = ServeOptions(name="tiny", sampling={"temperature": 0.0, "seed": 5}, max_tokens=3)
    own = RequestDefaults.of(llm, chosen)
    assert asked(llm, own, {}).reproducible
    assert answered(llm, own).generated_tokens == 3
    assert answered(llm, own).token_ids == llm.chat(SAY, max_new_tokens=3, session=llm.session()).token_ids
    assert "temperature 0," in str(own)

    def recommended(**values: Any) -> RequestDefaults:
        monkeypatch.setattr(LLM, "sampling_defaults", SamplingDefaults(**values))
        return RequestDefaults.of(llm, ServeOptions(name="tiny", sampling={"top_k": 7}))

    recommends = recommended(temperature=0.6, top_p=0.9)
    assert recommends.sampling == {"temperature": 0.6, "top_p": 0.9, "top_k": 7}
    assert "as the checkpoint recommends, but for the options" in str(recommends)
    assert recommended(do_sample=False, temperature=0.6).sampling == {"temperature": 0.0, "top_k": 7}
    assert recommended(repetition_penalty=1.1, top_k=50).sampling == {"repetition_penalty": 1.1, "top_k": 7}
    with pytest.raises(OptionError, match="temperature"):
        recommended(temperature=500)


def test_a_message_has_its_name_in_the_template(
    llm: LLM, defaults: RequestDefaults, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        type(llm.tokenizer), "render_chat", lambda _self, messages, **_: seen.append(messages) or "x"
    )
    messages = [
        {"role": "developer", "content": "a"},
        {"role": "user", "name": "anna", "content": [PART, PART]},
    ]
    asked(llm, defaults, {"messages": messages})
    assert seen == [[{"role": "system", "content": "a"}, {"role": "user", "content": "x\nx", "name": "anna"}]]


CHARACTERS = "\U0001f600é漢 a"


@pytest.mark.parametrize("stream", [False, True])
def test_the_bytes_of_an_answers_tokens_are_its_text(client: openai.OpenAI, stream: bool) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [CHARACTERS]}}}
    options: Any = {"model": "tiny", "messages": SAY, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    options |= {"response_format": schema, "n": 2, "max_tokens": 60}
    if stream:
        chunks = list(client.chat.completions.create(**options, stream=True))
        tokens = [
            token
            for chunk in chunks
            for choice in chunk.choices
            if choice.index == 1 and choice.logprobs
            for token in choice.logprobs.content or ()
        ]
    else:
        tokens = client.chat.completions.create(**options).choices[1].logprobs.content
    assert b"".join(bytes(token.bytes or ()) for token in tokens).decode() == json.dumps(
        CHARACTERS, ensure_ascii=False
    )
    partial = [token for token in tokens if token.bytes and token.bytes[0] >= 0x80]
    assert any(token.token.startswith("\\x") for token in partial)
    assert all(top.bytes is not None or top.token.startswith("<|") for t in tokens for top in t.top_logprobs)


def test_a_completions_offsets_count_whole_characters(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model="tiny", prompt="x", max_tokens=60, logprobs=2, extra_body={"grammar": 'start: "\U0001f600é!"'}
    )
    (choice,) = answer.choices
    assert choice.text == "\U0001f600é!"
    offsets = dict(zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True))
    assert offsets["!"] == 2
    assert choice.logprobs.text_offset[0] == 0


@pytest.mark.parametrize("usage", [False, True])
def test_chunks_have_openais_form(client: openai.OpenAI, usage: bool) -> None:
    shared: Any = {"model": "tiny", "max_tokens": 6, "seed": 1, "n": 2, "stream": True}
    shared |= {"stream_options": {"include_usage": usage}}
    chats = client.chat.completions.with_raw_response.create(
        messages=SAY, logprobs=True, top_logprobs=2, **shared
    )
    texts = client.completions.with_raw_response.create(prompt="x", logprobs=2, **shared)
    for lines, kind in ((chats, ChatCompletionChunk), (texts, Completion)):
        found = [json.loads(line[6:]) for line in lines.http_response.iter_lines() if line[6:7] == "{"]
        for chunk in found:
            for choice in chunk["choices"] if kind is Completion else ():
                # OpenAI's streams have null, too, before the end; its types do not.
                choice["finish_reason"] = choice["finish_reason"] or "stop"
            kind.model_validate(chunk, strict=True)
        *others, last = found
        assert all(("usage" in chunk) == usage for chunk in found)
        if usage:
            assert all(chunk["usage"] is None for chunk in others)
            assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 12)
