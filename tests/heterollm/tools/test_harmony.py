"""Answers of gpt-oss: their channels, their calls, and the grammar that holds both."""

import json

import numpy as np
import pytest
from chat_models import CHATS, HARMONY_MARKS, chat_folder

from heterollm.base import GrammarError
from heterollm.text import GenerationOptions, GrammarTokens, Tokenizer
from heterollm.tools import CallRules, ChatRequest, Tool, chat_prompt, joined, reasoning_variables

NAMES = ("gpt-oss", "gpt-oss-gguf")
CITY = {"type": "object", "properties": {"city": {"enum": ["Bonn", "Köln"]}}, "required": ["city"]}
TOOLS = [Tool("weather", "Weather", CITY), Tool("weather_at.sea"), Tool("clock")]
SAY = [{"role": "user", "content": "x"}]
THINK = "<|channel|>analysis<|message|>"
NEXT = "<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
LOW = {"reasoning_effort": "low"}
ARGUMENTS = '{"city": "Bonn"}'
CALL = f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGUMENTS}"


def prompt_of(tokenizer, tools=TOOLS, final=None, effort=None, dialogue=SAY, **rules):
    made = CallRules(tools=tools, final=final, **rules) if tools else None
    request = ChatRequest(dialogue=dialogue, tools=tools, rules=made, final=final, effort=effort)
    return chat_prompt(tokenizer, request, 4000)


ANSWERS = {
    f"{THINK}So.<|end|><|start|>assistant{FINAL}Hello\n\n there.<|return|>": ("So.", "Hello\n\n there.", []),
    f"{FINAL}Hello<|return|>": ("", "Hello", []),
    f"{THINK}So.<|end|>": ("So.", "", []),
    f"{THINK}So.<|return|>": ("So.", "", []),
    f"{THINK}A{NEXT}{THINK}B{NEXT}{FINAL}C{NEXT}{FINAL}D": ("A\n\nB", "C\n\nD", []),
    f"{THINK}A{NEXT}<|channel|>commentary<|message|>I ask.{NEXT}{CALL}<|call|>": (
        "A",
        "I ask.",
        [("weather", ARGUMENTS)],
    ),
    f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}<|call|>": (
        "",
        "",
        [("weather", ARGUMENTS)],
    ),
    "<|channel|>analysis to=functions.weather_at.sea code<|message|>{}<|call|>": (
        "",
        "",
        [("weather_at.sea", "{}")],
    ),
    f"{CALL}<|call|><|start|>assistant{FINAL}Done.<|return|>": ("", "Done.", [("weather", ARGUMENTS)]),
    f"{CALL}<|call|><|start|>assistant to=clock<|channel|>commentary<|message|>{{}}<|end|>": (
        "",
        "",
        [("weather", ARGUMENTS), ("clock", "{}")],
    ),
    "<|channel|>analysis to=python code<|message|>1 + 1<|call|>": ("1 + 1", "", []),
    f"{THINK}A<|channel|>final<|message|>B<|return|>": ("A", "B", []),
    f"<|start|>assistant{FINAL}B<|constrain|>C<|return|>": ("", "BC", []),
    f"<|channel|>commentary to=assistant{THINK}A{NEXT}<|channel|>commentary{FINAL}B<|return|>": (
        "A",
        "B",
        [],
    ),
    "<|message|>B<|end|>": ("", "B", []),
    "No message.<|return|>": ("", "No message.", []),
    "No message.": ("", "No message.", []),
    " to=functions.wea": ("", "", []),
    "<|channel|>fin": ("", "", []),
    "": ("", "", []),
}


def called(whole):
    return [(call.name, call.arguments) for call in whole.calls]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", ANSWERS)
def test_messages_are_read_by_channel_and_recipient(name, text, tokenizer_of, reading):
    tokenizer = tokenizer_of(name)
    form = prompt_of(tokenizer).form
    whole = joined(reading(tokenizer, form, tokenizer.encode(text, add_bos=False)))
    assert (whole.reasoning, whole.content, called(whole)) == ANSWERS[text]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("text", [text for text in ANSWERS if text.count("<|") > 2])
def test_a_cut_answer_is_the_beginning_of_the_whole(name, text, tokenizer_of, reading):
    """Headers take several tokens, and an answer may end in each."""
    tokenizer = tokenizer_of(name)
    form, ids = prompt_of(tokenizer).form, tokenizer.encode(text, add_bos=False)
    reasoning, content, calls = ANSWERS[text]
    sizes = []
    for end in range(len(ids)):
        part = joined(reading(tokenizer, form, ids[:end]))
        assert reasoning.startswith(part.reasoning)
        assert content.startswith(part.content)
        own = called(part)
        assert own[:-1] == calls[: max(0, len(own) - 1)]
        for (tool, given), (whole_tool, whole) in zip(own[-1:], calls[len(own) - 1 :], strict=False):
            assert (tool, whole.startswith(given)) == (whole_tool, True)
        sizes.append(sum(map(len, (part.reasoning, part.content, *(given for _, given in own)))))
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("name", NAMES)
def test_spelled_marks_are_text(name, tokenizer_of, reading):
    tokenizer = tokenizer_of(name)
    form = prompt_of(tokenizer).form
    spelled = f"a<|end|>{CALL}<|call|>"
    ids = tokenizer.encode(FINAL, add_bos=False) + tokenizer.encode(spelled, add_bos=False, controls=False)
    whole = joined(reading(tokenizer, form, ids))
    assert (whole.content, whole.calls) == (spelled, ())


def test_calls_stream_and_reasoning_is_counted(tokenizer_of, reading):
    tokenizer = tokenizer_of("gpt-oss")
    form = prompt_of(tokenizer).form
    parts = reading(tokenizer, form, tokenizer.encode(CALL, add_bos=False))
    first, *others = [call for part in parts for call in part.calls]
    assert (first.name, len(first.call_id), first.arguments) == ("weather", 9, "")
    assert len(others) > 2
    assert not any(piece.name or piece.call_id for piece in others)


def test_without_tools_a_call_is_no_call(tokenizer_of, reading):
    tokenizer = tokenizer_of("gpt-oss")
    prompt = prompt_of(tokenizer, tools=())
    assert prompt.grammar is None
    whole = joined(reading(tokenizer, prompt.form, tokenizer.encode(CALL, add_bos=False)))
    assert (whole.reasoning, whole.calls) == (ARGUMENTS, ())


# -- the grammar -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def accepts(tokenizer_of):
    """Tell whether a grammar allows all tokens of a text, and an end behind them."""
    tokens = {name: GrammarTokens(tokenizer_of(name), 2048) for name in NAMES}

    def run(name, prompt, text):
        tokenizer = tokenizer_of(name)
        constraint = tokens[name].constraint(GenerationOptions(grammar=prompt.grammar))
        complete = False
        for token in (*tokenizer.encode(text, add_bos=False), min(tokenizer.eos_ids)):
            if complete:
                return token in tokenizer.eos_ids
            if constraint.allowed(np.zeros(2048, np.float32))[token] < 0:
                return False
            complete = constraint.accept(token)
        return complete

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("heterollm.text.grammar.refusal_of", lambda _grammar: None)
        yield run


CALLS = (
    CALL,
    CALL.replace(" <|constrain|>json", ""),
    CALL.replace(" <|constrain|>", "<|constrain|>"),
    CALL.replace("commentary", "analysis"),
    f" to=functions.weather<|channel|>commentary json<|message|>{ARGUMENTS}",
    f" to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{ARGUMENTS}",
    f"{THINK}A{NEXT}{CALL}",
    f"{THINK}A{NEXT}{THINK}B{NEXT}<|channel|>commentary<|message|>C{NEXT} to=functions.clock<|channel|>"
    "commentary json<|message|>{}",
)
TEXTS = (f"{FINAL}A", f"{THINK}A{NEXT}{FINAL}B\n<tool>", f"<|channel|>commentary<|message|>A{NEXT}{FINAL}B")
NEITHER = (
    "",
    "A",
    f"{THINK}A",
    f"{THINK}A{NEXT}",
    f"{THINK}A<|return|>",
    f"{FINAL}A{NEXT}{FINAL}B",
    "<|channel|>other<|message|>A",
    CALL.replace("weather", "weath"),
    CALL.replace("weather", "weather_at"),
    CALL.replace("functions.", ""),
    CALL.replace("Bonn", "Rom"),
    CALL.replace(ARGUMENTS, "{}"),
    "<|channel|>analysis to=python code<|message|>1",
    "<|start|>user<|message|>A",
)


@pytest.mark.parametrize("name", NAMES)
def test_the_grammar_of_a_choice_allows_calls_texts_or_both(name, tokenizer_of, accepts):
    tokenizer = tokenizer_of(name)
    none = chat_prompt(tokenizer, ChatRequest(dialogue=SAY, tools=TOOLS), 4000)
    for prompt, allowed in (
        (prompt_of(tokenizer), (*CALLS, *TEXTS)),
        (prompt_of(tokenizer, required=True), CALLS),
        (none, TEXTS),
    ):
        for text in (*CALLS, *TEXTS, *NEITHER):
            assert accepts(name, prompt, text) == (text in allowed), text
    assert none.form.calls is None


def test_a_choice_may_name_one_tool(tokenizer_of, accepts):
    tokenizer = tokenizer_of("gpt-oss")
    rules = CallRules(tools=TOOLS[2:], required=True)
    prompt = chat_prompt(tokenizer, ChatRequest(dialogue=SAY, tools=TOOLS, rules=rules), 4000)
    assert accepts("gpt-oss", prompt, "<|channel|>commentary to=functions.clock<|message|>{}")
    assert not accepts("gpt-oss", prompt, CALL)


def test_a_schema_holds_the_final_message_alone(tokenizer_of, accepts):
    tokenizer, schema = tokenizer_of("gpt-oss"), {"const": [1]}
    json_final = FINAL.replace("<|message|>", " <|constrain|>json<|message|>")
    for tools in ((), TOOLS):
        prompt = prompt_of(tokenizer, tools=tools, final=schema)
        for text in (f"{FINAL}[1]", f"{json_final}[1]", f"{THINK}A{NEXT}{THINK}{{{NEXT}{FINAL}[1]"):
            assert accepts("gpt-oss", prompt, text), text
        for text in ("[1]", f"{FINAL}1", f"<|channel|>commentary<|message|>A{NEXT}{FINAL}[1]"):
            assert not accepts("gpt-oss", prompt, text), text
        assert accepts("gpt-oss", prompt, CALL) == bool(tools)
    free = prompt_of(tokenizer, tools=(), final={})
    assert accepts("gpt-oss", free, f'{THINK}A{NEXT}{FINAL}"x"')


def test_a_strict_tool_leaves_the_final_schema_as_it_is(tokenizer_of, accepts):
    unique = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    for strict in (False, True):
        prompt = prompt_of(tokenizer_of("gpt-oss"), tools=[Tool("f", None, unique, strict=strict)])
        if strict:
            with pytest.raises(GrammarError, match="uniqueItems"):
                accepts("gpt-oss", prompt, f"{FINAL}A")
        else:
            assert accepts("gpt-oss", prompt, f"{FINAL}A")


# -- the prompt ------------------------------------------------------------------------------------------


def text_of(tokenizer, **options):
    return tokenizer.decode(prompt_of(tokenizer, **options).ids, controls=True)


@pytest.mark.parametrize(
    ("effort", "known"),
    [
        (None, "medium"),
        ("none", "low"),
        ("low", "low"),
        ("medium", "medium"),
        ("high", "high"),
        ("max", "high"),
    ],
)
def test_the_effort_is_one_that_the_model_knows(effort, known, tokenizer_of):
    tokenizer = tokenizer_of("gpt-oss")
    assert f"Reasoning: {known}<|end|>" in text_of(tokenizer, effort=effort)
    for wanted, made in ((effort or True, {"reasoning_effort": known} if effort else {}), (False, LOW)):
        assert reasoning_variables(tokenizer, wanted) == made


@pytest.mark.parametrize("content", ["", "I ask."])
@pytest.mark.parametrize("count", [1, 2])
def test_a_call_comes_back_with_its_reasoning_once(content, count, tokenizer_of):
    calls = [
        {"id": f"{i}", "type": "function", "function": {"name": name, "arguments": {"city": "Bonn"}}}
        for i, name in enumerate(("weather", "clock")[:count])
    ]
    results = [{"role": "tool", "tool_call_id": f"{i}", "content": f"r{i}"} for i in range(count)]
    spoken = {"role": "assistant", "content": content, "reasoning_content": "So.", "tool_calls": calls}
    text = text_of(tokenizer_of("gpt-oss"), dialogue=[*SAY, spoken, *results])
    thinking = "So.\n\nI ask." if content else "So."
    assert (
        text.count(f"<|start|>assistant{THINK}{thinking}<|end|><|start|>assistant to=functions.weather") == 1
    )
    assert text.count("So.") == 1
    for i, name in enumerate(("weather", "clock")[:count]):
        call = (
            f" to=functions.{name}<|channel|>commentary json<|message|>{json.dumps({'city': 'Bonn'})}<|call|>"
        )
        assert f'{call}<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>"r{i}"' in text


def test_a_template_of_channels_needs_their_tokens(tmp_path):
    folder = chat_folder(tmp_path / "m", CHATS["gpt-oss"][0], HARMONY_MARKS[:-1])
    form = prompt_of(Tokenizer.from_folder(folder, [0])).form
    assert form.reasoning is None
    assert form.calls.name == "generic"


def test_a_prompt_may_open_the_reasoning(tmp_path, reading):
    template = CHATS["gpt-oss"][0].replace(
        "<|start|>assistant{%- endif", f"<|start|>assistant{THINK}{{%- endif"
    )
    folder = chat_folder(tmp_path / "m", template, HARMONY_MARKS)
    tokenizer = Tokenizer.from_folder(folder, [0])
    prompt = prompt_of(tokenizer)
    form = prompt.form
    assert form.opened
    text = f"A{NEXT}{FINAL}B"
    whole = joined(reading(tokenizer, form, tokenizer.encode(text, add_bos=False)))
    assert (whole.reasoning, whole.content) == ("A", "B")
    constraint = GrammarTokens(tokenizer, 2048).constraint(GenerationOptions(grammar=prompt.grammar))
    for token in tokenizer.encode(text, add_bos=False):
        assert constraint.allowed(np.zeros(2048, np.float32))[token] == 0
        constraint.accept(token)
