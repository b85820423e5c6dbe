"""The texts in which families of models write calls of tools and their reasoning: one declaration each."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

PLACES: Final = re.compile(r"(\{name\}|\{id\}|\{arguments\})")
ID: Final = "[a-zA-Z0-9]{9}"
"""Regular expression of the ids that models write, which are Mistral's."""

JSON_CALL: Final = '{"name": "{name}", "arguments": {arguments}}'


@dataclass(frozen=True, slots=True)
class ValueForm:
    """The form of an argument's value that is not JSON.

    Args:
        quote: Encloses a text: a quotation mark with Python's escapes, or a token without any; empty for a
            text as it stands, up to the end of its tag.
        words: The words for true, false and null.
        bare_keys: Whether keys of objects have no quotes.
    """

    quote: str
    words: tuple[str, str, str] = ("true", "false", "null")
    bare_keys: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """The text of a family's calls: ``opens call between call closes``, and perhaps more such groups.

    Args:
        name: For messages and tests.
        signs: Texts of which a chat template has all, or a vocabulary as tokens.
        begin: The text by which an answer's reader knows a call; empty if a call is the whole answer and
            begins with ``{``.
        opens: Text before the first call of a group.
        call: A call, with ``{name}``, ``{id}`` and ``{arguments}``; the arguments are a JSON object unless
            there is a ``member``.
        between: Text between two calls of a group; None if a group has one call.
        closes: Text behind the last call of a group.
        repeat: Text between two groups; None if an answer has one.
        tail: Whether text may follow a single group.
        member: An argument, with ``{key}`` and ``{value}``.
        joint: Text between two arguments.
        values: The form of a value.
        ends: Further tokens that end an answer behind calls.
    """

    name: str
    signs: tuple[tuple[str, ...], ...] = ()
    begin: str = ""
    opens: str = ""
    call: str = JSON_CALL
    between: str | None = None
    closes: str = ""
    repeat: str | None = None
    tail: bool = False
    member: str = ""
    joint: str = ""
    values: ValueForm = ValueForm("")
    ends: tuple[str, ...] = ()

    @property
    def may_continue(self) -> bool:
        """Whether anything may follow a group."""
        return self.repeat is not None or self.tail

    @property
    def streams(self) -> bool:
        """Whether arguments can be sent as they come: as JSON, and behind the id."""
        return not self.member and "{id}" not in self.call.partition("{arguments}")[2]

    def pieces(self) -> list[str]:
        """Return the texts and places of a call, in order."""
        return [piece for piece in PLACES.split(self.call) if piece]


PYTHON: Final = ValueForm("'", ("True", "False", "None"))

HERMES: Final = ToolForm(
    name="hermes",
    signs=(("<tools>", "<tool_call>"),),
    begin="<tool_call>",
    opens="<tool_call>\n",
    closes="\n</tool_call>",
    repeat="\n",
)
MISTRAL_3: Final = ToolForm(
    name="mistral-v3",
    signs=(("[TOOL_CALLS]",),),
    begin="[TOOL_CALLS]",
    opens="[TOOL_CALLS][",
    call='{"name": "{name}", "arguments": {arguments}, "id": "{id}"}',
    between=", ",
    closes="]",
)
GLM: Final = ToolForm(
    name="glm",
    signs=(("<tool_call>", "<arg_key>", "<arg_value>"),),
    begin="<tool_call>",
    opens="<tool_call>",
    call="{name}\n{arguments}",
    closes="</tool_call>",
    repeat="\n",
    member="<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
)

HARMONY_MARKS: Final = frozenset(
    {*("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"), *("<|end|>", "<|call|>", "<|return|>")}
)
"""Tokens between the messages of an answer of gpt-oss, and in their headers."""

HARMONY: Final = ToolForm(
    name="gpt-oss",
    begin="<|channel|>",
    call=" to=functions.{name}<|channel|>commentary json<|message|>{arguments}<|call|>",
)
"""As templates write past calls; :mod:`.harmony` reads and holds these and those of models."""

FORMS: Final = (
    ToolForm(
        name="qwen3-coder",
        signs=(("<tool_call>", "<function=", "<parameter="),),
        begin="<tool_call>",
        opens="<tool_call>\n",
        call="<function={name}>\n{arguments}</function>",
        closes="\n</tool_call>",
        repeat="\n",
        member="<parameter={key}>\n{value}\n</parameter>\n",
    ),
    replace(
        GLM,
        signs=(("<tool_call>", "</arg_key><arg_value>"),),
        call="{name}{arguments}",
        member=GLM.member.replace("\n", ""),
    ),
    GLM,
    HERMES,
    ToolForm(
        name="granite-3.1",
        signs=(("available_tools", "<tool_call>"),),
        begin="<tool_call>",
        opens="<tool_call>[",
        between=", ",
        closes="]",
    ),
    ToolForm(
        name="granite-3",
        signs=(("available_tools",),),
        begin="<|tool_call|>",
        opens="<|tool_call|>[",
        between=", ",
        closes="]",
    ),
    replace(HERMES, signs=(("<tool_call>",),)),
    ToolForm(
        name="mistral-v13",
        signs=(("[TOOL_CALLS]", "[ARGS]"),),
        begin="[TOOL_CALLS]",
        call="[TOOL_CALLS]{name}[ARGS]{arguments}",
        between="",
    ),
    # The vocabulary of SentencePiece has a space behind each mark.
    replace(MISTRAL_3, signs=(("[TOOL_CALLS] [",),), opens="[TOOL_CALLS] ["),
    MISTRAL_3,
    ToolForm(
        name="lfm2",
        signs=(("<|tool_call_start|>",),),
        begin="<|tool_call_start|>",
        opens="<|tool_call_start|>[",
        call="{name}({arguments})",
        between=", ",
        closes="]<|tool_call_end|>",
        tail=True,
        member="{key}={value}",
        joint=", ",
        values=PYTHON,
    ),
    ToolForm(
        name="gemma-4",
        signs=(("<|tool_call>", "<tool_call|>"),),
        begin="<|tool_call>",
        call="<|tool_call>call:{name}{{arguments}}<tool_call|>",
        between="",
        member="{key}:{value}",
        joint=",",
        values=ValueForm('<|"|>', bare_keys=True),
        ends=("<|tool_response>",),
    ),
    ToolForm(
        name="functiongemma",
        signs=(("<start_function_call>",),),
        begin="<start_function_call>",
        call="<start_function_call>call:{name}{{arguments}}<end_function_call>",
        between="",
        member="{key}:{value}",
        joint=",",
        values=ValueForm("<escape>", bare_keys=True),
        ends=("<start_function_response>",),
    ),
    ToolForm(
        name="phi-4",
        signs=(("<|tool|>", "<|/tool|>"),),
        begin="<|tool_call|>",
        opens="<|tool_call|>[",
        between=", ",
        closes="]<|/tool_call|>",
    ),
    ToolForm(
        name="llama-3",
        signs=(("<|python_tag|>", "parameters"), ("tools_in_user_message",)),
        call='{"name": "{name}", "parameters": {arguments}}',
    ),
)
"""The first one whose signs are found is the form of a checkpoint."""

MISTRAL_11: Final = ToolForm(
    name="mistral-v11",
    signs=(("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),),
    begin="[TOOL_CALLS]",
    call="[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]{arguments}",
    between="",
)
"""Recognised by the template alone: the vocabularies of later versions have its tokens, too."""

GENERIC: Final = ToolForm(name="generic", opens='{"tool_calls": [', between=", ", closes="]}")
"""The form of a template without tools: instructions ask for it, and the answer's grammar holds it."""


@dataclass(frozen=True, slots=True)
class ReasoningForm:
    """The texts around reasoning, which comes before an answer."""

    opens: str
    closes: str


CHANNELS: Final = ReasoningForm("<|channel|>analysis<|message|>", "<|end|>")
"""The channel of reasoning, which an answer may have several times."""

REASONING: Final = (
    ReasoningForm("<think>", "</think>"),
    ReasoningForm("[THINK]", "[/THINK]"),
    ReasoningForm("<seed:think>", "</seed:think>"),
    ReasoningForm("<|channel>thought\n", "<channel|>"),
)


def tool_form(template: str, tokens: Iterable[str]) -> ToolForm | None:
    """Return the form of a checkpoint's calls, by its chat template and then by its added tokens."""
    known = frozenset(tokens)
    if has_channels(template, known):
        return HARMONY
    for form in (MISTRAL_11, *FORMS):
        if any(all(sign in template for sign in signs) for signs in form.signs):
            return form
    for form in FORMS:
        # A template may leave out past calls, and thereby all marks.
        if form.begin and any(set(signs) <= known for signs in form.signs):
            return form
    return None


def reasoning_form(template: str, tokens: Iterable[str]) -> ReasoningForm | None:
    """Return the form of a checkpoint's reasoning, if its chat template knows one."""
    if has_channels(template, tokens):
        return CHANNELS
    return next((form for form in REASONING if form.closes in template), None)


def has_channels(template: str, tokens: Iterable[str]) -> bool:
    """Return whether answers are messages in channels, whose marks are tokens."""
    return HARMONY.begin in template and HARMONY_MARKS.issubset(tokens)
