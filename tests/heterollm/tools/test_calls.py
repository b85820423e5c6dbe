"""Calls over random logits: whatever a model writes, they parse and follow the schemas of their tools."""

import json

import jsonschema
import pytest
from chat_models import CHATS
from tool_schemas import parameters

from heterollm.tools import CallRules, ChatPrompt, ChatRequest, ReplyForm, Tool, chat_prompt

SAY = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(("number", "name"), list(enumerate(CHATS)))
def test_required_calls_follow_their_schemas(number, name, tokenizer_of, answered):
    seen = 0
    for seed in range(5 * number, 5 * number + 5):
        tools = [Tool(f"tool_{i}", "Does it.", parameters(3 * seed + i)) for i in range(3)]
        rules = CallRules(tools=tools, required=True)
        prompt = chat_prompt(tokenizer_of(name), ChatRequest(dialogue=SAY, tools=tools, rules=rules), 4000)
        answer = answered(name, prompt, seed)
        if answer.reason not in ("complete", "eos"):
            continue
        assert answer.whole.calls, answer.text
        for call in answer.whole.calls:
            seen += 1
            arguments = json.loads(call.arguments)
            schema = next(tool.parameters for tool in tools if tool.name == call.name)
            jsonschema.Draft202012Validator(schema).validate(arguments)
    assert seen > 3


WEATHER = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Köln", "Bonn"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "note": {"anyOf": [{"type": "string", "maxLength": 4}, {"type": "null"}]},
    },
    "required": ["city", "days"],
}
TOOLS = [Tool("weather", "Weather.", WEATHER), Tool("clock")]


def prompt_of(tokenizer, **rules):
    made = CallRules(**{"tools": TOOLS, **rules})
    return chat_prompt(tokenizer, ChatRequest(dialogue=SAY, tools=made.tools, rules=made), 4000)


@pytest.mark.parametrize("name", CHATS)
def test_an_answer_may_have_text_and_calls(name, tokenizer_of, answered):
    """Whatever looks like a call to the reader is one to the grammar, and the other way round."""
    tokenizer = tokenizer_of(name)
    prompt = prompt_of(tokenizer)
    brace = tokenizer.vocabulary["{"]
    begins = [tokenizer.encode(text, add_bos=False)[0] for text in ("<tool_call>", "{")]
    called = 0
    for seed in range(30):
        if called > 2:
            break
        liked = {} if prompt.form.marks else {**dict.fromkeys(begins, 4.0), brace: 4.0}
        answer = answered(name, prompt, seed, liked=liked)
        if answer.reason not in ("complete", "eos"):
            continue
        called += len(answer.whole.calls)
        for call in answer.whole.calls:
            schema = next(tool.held() for tool in TOOLS if tool.name == call.name)
            jsonschema.Draft202012Validator(schema).validate(json.loads(call.arguments))
        assert "weather" not in answer.whole.content
        assert "clock" not in answer.whole.content
    assert called or not prompt.form.marks


@pytest.mark.parametrize(("name", "is_streamed"), [("hermes", True), ("phi-4", True), ("lfm2", False)])
def test_arguments_come_in_pieces_where_the_model_writes_json(name, is_streamed, tokenizer_of, answered):
    answer = answered(name, prompt_of(tokenizer_of(name), tools=TOOLS[:1], required=True), 1)
    pieces = [call for part in answer.pieces for call in part.calls if call.index == 0]
    assert pieces[0].call_id
    assert pieces[0].name
    assert not any(piece.call_id or piece.name for piece in pieces[1:])
    assert (len(pieces) > 3) == is_streamed
    assert "".join(piece.arguments for piece in pieces) == answer.whole.calls[0].arguments


def test_no_text_waits_before_a_mark_for_the_rest_of_a_stop_string(tokenizer_of, answered):
    mark = tokenizer_of("hermes").added_tokens["<|im_end|>"]
    prompt = ChatPrompt([5], ReplyForm(marks={"<|im_end|>": mark}), f'start: "a" <[{mark}]> "b"')
    answer = answered("hermes", prompt, 0, stop=("ab",))
    assert (answer.whole.content, answer.reason) == ("ab", "complete")
    assert [part.content for part in answer.pieces if part.content] == ["a", "b"]


@pytest.mark.parametrize("name", ["hermes", "lfm2", "qwen3-coder", "gemma-4"])
def test_arguments_may_be_a_reference(name, tokenizer_of, answered):
    point = {
        "type": "object",
        "properties": {
            "x": {"type": "boolean"},
            "inner": {"anyOf": [{"$ref": "#/$defs/P"}, {"type": "null"}]},
        },
        "required": ["x", "inner"],
    }
    schema = {"$ref": "#/$defs/P", "$defs": {"P": point}}
    tools = [Tool("point", None, schema)]
    called = 0
    for seed in range(8):
        answer = answered(
            name, prompt_of(tokenizer_of(name), tools=tools, required=True, parallel=False), seed
        )
        if answer.reason in ("complete", "eos"):
            (call,) = answer.whole.calls
            jsonschema.Draft202012Validator(schema).validate(json.loads(call.arguments))
            called += 1
    assert called
