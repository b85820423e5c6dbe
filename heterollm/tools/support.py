"""A checkpoint's way to take tools, past calls and reasoning, found out by rendering its chat template."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeAlias

from heterollm.base import CheckpointError, InputError
from heterollm.text import Tokenizer
from heterollm.tools.forms import GENERIC, ReasoningForm, ToolForm, reasoning_form, tool_form
from heterollm.tools.literals import dumps, write_arguments

Dialogue: TypeAlias = Sequence[Mapping[str, Any]]
Rewriting: TypeAlias = Callable[[Dialogue], Dialogue]
"""Rewrites the past calls and results of a dialogue."""

NEEDLES: Final = ("zq8Kx2vA", "zq8Kx2vB")
"""Names of tools that no template writes by itself."""

INSTRUCTIONS: Final = """\
You can call these functions; each line has the JSON Schema of the arguments of one:
{tools}
To call functions, answer with this JSON and nothing else: \
{{"tool_calls": [{{"name": "…", "arguments": {{…}}}}]}}
You then get the results. If you need no function, answer with text."""

VARIABLES: Final = ("tools", "xml_tools")
"""Variables in which templates take tools."""

CODE: Final = re.compile(r"\{[{%](.*?)[}%]\}", re.DOTALL)
TEXT: Final = re.compile(r"'[^']*'|\"[^\"]*\"")
"""The code of a template, and the texts in it."""

RESERVED: Final = {
    *("tools", "documents", "messages", "chat_template", "conversations", "add_generation_prompt"),
    *("return_assistant_tokens_mask", "continue_final_message"),
}


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """A checkpoint's way to take tools.

    Args:
        template: The chat template, of dialogues with tools.
        form: The form of calls.
        way: The variable of the template with the tools; "system" for a field of the system message, and
            "text" for instructions.
        single: Rewrites dialogues with one call at a time.
        several: Rewrites dialogues with several.
        reasoning: The form of reasoning, if there is any.
    """

    template: str
    form: ToolForm
    way: str
    single: Rewriting
    several: Rewriting
    reasoning: ReasoningForm | None

    def has_variable(self, name: str) -> bool:
        """Return whether the template reads a variable."""
        code = " ".join(found[1] for found in CODE.finditer(self.template))
        read = re.search(rf"(?<![\w.]){re.escape(name)}\b", TEXT.sub("", code))
        return name not in RESERVED and read is not None


@lru_cache(maxsize=4)
def support_of(tokenizer: Tokenizer) -> ToolSupport:
    """Return a checkpoint's way to take tools; renders its template some times at the first call."""
    template = tokenizer.chat_template(tools=True)
    found = tool_form(template, tokenizer.added_tokens)
    way = "text" if found is None else _way(tokenizer, template)
    form = GENERIC if found is None or way == "text" else found
    single, several = (_change(tokenizer, form, way, count) for count in (1, 2))
    return ToolSupport(template, form, way, single, several, reasoning_form(template, tokenizer.added_tokens))


def render(
    tokenizer: Tokenizer,
    way: str,
    dialogue: Dialogue,
    declared: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
) -> str:
    """Return the text of a dialogue with tools; errors are those of ``Tokenizer.render_chat``."""
    given: dict[str, Any] = {"variables": variables}
    if way == "tools":
        given["tools"] = list(declared) or None
    elif declared and way == "xml_tools":
        given["variables"] = {**variables, way: declared}
    elif declared:
        system, dialogue = _system(dialogue)
        functions = [dumps(one["function"]) for one in declared]
        if way == "system":  # Phi-4 takes the functions as text in a field of the message
            system = {**system, "tools": f"[{', '.join(functions)}]"}
        else:
            text = INSTRUCTIONS.format(tools="\n".join(functions))
            system = {**system, "content": "\n\n".join(filter(None, (system["content"], text)))}
        dialogue = [system, *dialogue]
    try:
        return tokenizer.render_chat(dialogue, **given)
    except InputError:
        if len(dialogue) < 2 or dialogue[0]["role"] != "system":
            raise
        try:
            # There is no system role, or it vanishes in a loop of tools, as with Mistral's third version.
            return tokenizer.render_chat(_merged([{**dialogue[0], "role": "user"}, *dialogue[1:]]), **given)
        except InputError:
            pass
        raise


def _system(dialogue: Dialogue) -> tuple[Mapping[str, Any], Dialogue]:
    if dialogue[0]["role"] == "system":
        return dialogue[0], dialogue[1:]
    return {"role": "system", "content": ""}, dialogue


def _way(tokenizer: Tokenizer, template: str) -> str:
    for way in (*VARIABLES, "system"):
        if way in VARIABLES and way not in template:
            continue
        try:
            text = render(tokenizer, way, [{"role": "user", "content": "x"}], [_declared(NEEDLES[0])], {})
        except (InputError, CheckpointError):
            continue
        if NEEDLES[0] in text:
            return way
    return "text"


def _declared(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "description": "x"}}}
    return {"type": "function", "function": {"name": name, "description": "x", "parameters": parameters}}


# -- past calls ------------------------------------------------------------------------------------------


def _change(tokenizer: Tokenizer, form: ToolForm, way: str, count: int) -> Rewriting:
    """Return the first way to write past calls in which the template loses none."""
    names = NEEDLES[:count]
    calls = [
        {"id": f"abcdefgh{i}", "type": "function", "function": {"name": name, "arguments": {"a": f"v{i}"}}}
        for i, name in enumerate(names)
    ]
    results = [
        {"role": "tool", "content": name.lower(), "tool_call_id": f"abcdefgh{i}", "name": name}
        for i, name in enumerate(names)
    ]
    dialogue: Dialogue = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *results,
    ]

    def written(messages: Dialogue) -> Dialogue:
        return [_written(one, form) for one in messages]

    changes: tuple[Rewriting, ...] = (_as_they_are, _divided, _as_texts, _divided_as_texts, written)
    for change in changes if way != "text" else ():
        try:
            text = render(tokenizer, way, change(dialogue), [_declared("f")], {})
        except (InputError, CheckpointError):
            continue
        if all(name in text and name.lower() in text for name in names):
            return change
    return lambda messages: _merged(_told(one) for one in written(messages))


def _as_they_are(messages: Dialogue) -> Dialogue:
    return messages


def _divided(messages: Dialogue) -> Dialogue:
    """Return a dialogue with one call in each message, followed by its result."""
    results = {one["tool_call_id"]: one for one in messages if one["role"] == "tool"}
    made: list[Mapping[str, Any]] = []
    for message in messages:
        unsaid = {**message, "content": ""}
        unsaid.pop("reasoning_content", None)
        for number, call in enumerate(message.get("tool_calls") or ()):
            made.append({**(unsaid if number else message), "tool_calls": [call]})
            made += [results[call["id"]]] if call["id"] in results else []
        if message["role"] != "tool" and not message.get("tool_calls"):
            made.append(message)
    return made


def _divided_as_texts(messages: Dialogue) -> Dialogue:
    return _as_texts(_divided(messages))


def _as_texts(messages: Dialogue) -> Dialogue:
    """Return a dialogue in which arguments are JSON text."""
    return [
        {
            **message,
            "tool_calls": [
                {**call, "function": {**call["function"], "arguments": dumps(call["function"]["arguments"])}}
                for call in message["tool_calls"]
            ],
        }
        if message.get("tool_calls")
        else message
        for message in messages
    ]


def _written(message: Mapping[str, Any], form: ToolForm) -> Mapping[str, Any]:
    """Return a message that has its calls as text."""
    if not message.get("tool_calls"):
        return message
    texts = [
        form.call.replace("{name}", call["function"]["name"])
        .replace("{id}", call["id"])
        .replace("{arguments}", write_arguments(call["function"]["arguments"], form))
        for call in message["tool_calls"]
    ]
    if form.between is None:
        text = (form.repeat or "\n").join(f"{form.opens}{one}{form.closes}" for one in texts)
    else:
        text = f"{form.opens}{form.between.join(texts)}{form.closes}"
    kept = {name: value for name, value in message.items() if name != "tool_calls"}
    return {**kept, "content": "\n".join(filter(None, (message["content"], text)))}


def _told(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a result as a message of the user."""
    if message["role"] != "tool":
        return message
    return {"role": "user", "content": f"Result of {message['name']}: {message['content']}"}


def _merged(messages: Iterable[Mapping[str, Any]]) -> Dialogue:
    """Return a dialogue in which no message of the user follows another."""
    made: list[Mapping[str, Any]] = []
    for message in messages:
        if made and made[-1]["role"] == message["role"] == "user":
            made[-1] = {**made[-1], "content": f"{made[-1]['content']}\n\n{message['content']}"}
        else:
            made.append(message)
    return made
