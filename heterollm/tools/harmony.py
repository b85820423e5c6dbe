"""Answers of gpt-oss: messages with headers, whose channel and recipient say what their texts are.

The format is harmony: https://github.com/openai/harmony/blob/main/docs/format.md. The prompt ends in
``<|start|>assistant``. Each message has a header up to ``<|message|>``, and a text up to ``<|end|>``; that of
the last one ends in ``<|call|>`` or ``<|return|>``, which end the answer::

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>

The recipient of a call, ``to=functions.NAME``, stands before or behind the channel.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, Literal

from heterollm.tools.constraint import CallRules, GrammarWriter
from heterollm.tools.forms import CHANNELS, HARMONY, HARMONY_MARKS
from heterollm.tools.reading import AnswerPart, AnswerReader, ReplyForm, ToolCall, new_id
from heterollm.tools.schemas import Tool

CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w*)")
RECIPIENT: Final = re.compile(r"\bto=([^\s<]*)")
NEXT: Final = "<|end|><|start|>assistant"
BREAK: Final = "\n\n"
"""Text between two messages that are one to clients."""

EFFORTS: Final = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
"""The closest effort that the model knows, where it does not know one by itself."""


# -- the prompt ------------------------------------------------------------------------------------------


def with_thinking(dialogue: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return a dialogue that has reasoning where the template looks for it, in ``thinking``.

    Beside a call the template takes reasoning or a text, which it writes as reasoning: both become one.
    """
    made = []
    for message in dialogue:
        own, thinking = message, message.get("reasoning_content")
        if thinking and message.get("tool_calls"):
            own, thinking = {**own, "content": ""}, BREAK.join(filter(None, (thinking, message["content"])))
        made.append({**own, "thinking": thinking} if thinking else own)
    return made


def described(declared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the declaration of a tool with a description, which the template joins to others' text."""
    return {**declared, "function": {"description": "", **declared["function"]}}


# -- the grammar -----------------------------------------------------------------------------------------


def channel_grammar(
    rules: CallRules, *, marks: Mapping[str, int], end_ids: Collection[int], opened: bool
) -> str:
    """Return the grammar of an answer; arguments and errors are those of ``call_grammar``."""
    return _ChannelWriter(HARMONY, marks, end_ids).messages(rules, opened=opened)


class _ChannelWriter(GrammarWriter):
    """Writes the grammar of messages: free ones, and a call or a final one at the end."""

    def messages(self, rules: CallRules, *, opened: bool) -> str:
        """Return the whole grammar."""
        channel, message = self._literal("<|channel|>"), self._literal("<|message|>")
        text = self._rule(f"{self._other_than(*HARMONY_MARKS)}*")
        kind = self._rule(f'(" "? {self._literal("<|constrain|>")} " "? "json" | " json")?')
        # A preamble would be content, and so a part of the JSON.
        free = '"analysis"' if rules.final is not None else '("analysis" | "commentary")'
        last = [
            f"{self._header(tool, channel)} {kind} {message} {self._arguments(tool)}" for tool in rules.tools
        ]
        if not rules.required:
            self._strict = True  # tools have set their own
            body = text if rules.final is None else self._json(rules.final, rules.final)
            last.append(f'{channel} "final"{"" if rules.final is None else f" {kind}"} {message} {body}')
        first = f"{text} {self._literal(NEXT)} " if opened else ""
        before = f"({channel} {free} {message} {text} {self._literal(NEXT)})*"
        return self._text(f"{first}{before} ({' | '.join(last)})")

    def _header(self, tool: Tool, channel: str) -> str:
        recipient = self._literal(f" to=functions.{tool.name}")
        named = f'{channel} ("commentary" | "analysis")'
        return f"({named} {recipient} | {recipient} {named})"


# -- the answer ------------------------------------------------------------------------------------------


def reader_of(form: ReplyForm) -> AnswerReader:
    """Return a reader of one answer."""
    return ChannelReader(form) if form.reasoning is CHANNELS else AnswerReader(form)


class ChannelReader(AnswerReader):
    """Divides one answer by its messages.

    Reasoning is the channel ``analysis``, and each message to others than the tools of the request; content
    is ``final``, and ``commentary`` to no one. Texts stay as they are; an empty line divides two messages.

    Args:
        form: The forms of its parts.
    """

    def __init__(self, form: ReplyForm) -> None:
        super().__init__(form)
        self._header: str | None = None if form.opened else ""
        self._is_marked = form.opened
        self._spoken: set[Literal["text", "reasoning", "call"]] = set()
        self._break = ""

    def push(self, text: str, token_id: int) -> AnswerPart:
        """Take a step, and return the parts that are complete with it."""
        self.reasoning_tokens += self._header is None and self._in == "reasoning"
        if self._header is not None:
            self._header += text
        elif text:
            self._say(text)
        if (name := self._names.get(token_id)) is not None:
            self._take_mark(name)
        return self._taken()

    def finish(self) -> AnswerPart:
        """Return the parts that were held back: an answer without messages is a text."""
        self._show_bare_text()
        return self._taken()

    def _show_bare_text(self) -> None:
        text = self._header or ""
        if text and not self._is_marked and not _begins_alike(text.lstrip(), "to="):
            self._say(text)

    def _take_mark(self, mark: str) -> None:
        if self._header is None:
            if mark not in ("<|message|>", "<|constrain|>"):  # mark nothing within a text
                self._header = mark if mark == "<|channel|>" else ""
        elif mark == "<|message|>":
            self._open(self._header)
            self._header = None
        elif mark in ("<|channel|>", "<|constrain|>"):
            # A model may begin a header again, with another channel.
            self._header = mark if mark in self._header else self._header + mark
        else:
            self._show_bare_text()
            self._header = ""
        self._is_marked = True

    def _open(self, header: str) -> None:
        """Begin the text of a message."""
        channel, recipient = CHANNEL.search(header), RECIPIENT.search(header)
        name = "" if recipient is None else recipient[1].removeprefix("functions.")
        tools = () if self._form.calls is None else self._form.tools
        if any(tool.name == name for tool in tools):
            self._in = "call"
            self.calls += 1
            self._parts.append(AnswerPart(calls=(ToolCall(self.calls - 1, new_id(), name, ""),)))
            return
        is_reasoning = recipient is not None or (channel is not None and channel[1] == "analysis")
        self._in = "reasoning" if is_reasoning else "text"
        self._break = BREAK if self._in in self._spoken else ""

    def _say(self, text: str) -> None:
        """Add a piece of the text of a message."""
        self._spoken.add(self._in)
        if self._in == "call":
            self._parts.append(AnswerPart(calls=(ToolCall(self.calls - 1, "", "", text),)))
            return
        text, self._break = self._break + text, ""
        self._parts.append(AnswerPart(text) if self._in == "reasoning" else AnswerPart(content=text))


def _begins_alike(text: str, other: str) -> bool:
    """Whether one of two texts begins with the other."""
    return text.startswith(other) or other.startswith(text)
