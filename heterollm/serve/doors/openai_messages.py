"""Messages, tools and choices in the bodies of chats: their fields, and the dialogue that they make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeAlias

from msgspec import Meta

from heterollm.serve.asking import ToolName, call_rules, distinct
from heterollm.serve.bodies import BodyPart, object_of
from heterollm.serve.errors import RequestError
from heterollm.tools import CallRules, Tool


class _TextPart(BodyPart, frozen=True, kw_only=True):
    type: Literal["text"]
    text: str


class _CalledFunction(BodyPart, frozen=True, kw_only=True):
    name: ToolName
    arguments: str = ""


class _Call(BodyPart, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: _CalledFunction
    index: int | None = None


class ChatMessage(BodyPart, frozen=True, kw_only=True):
    """A message in the body of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[_TextPart], Meta(min_length=1)] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[_Call] | None = None
    # Clients send back the messages that they received.
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: Literal[""] | None = None
    annotations: Annotated[list[Any], Meta(max_length=0)] | None = None
    audio: None = None
    function_call: None = None


class _Function(BodyPart, frozen=True, kw_only=True):
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolField(BodyPart, frozen=True, kw_only=True):
    """A tool in the body of a chat."""

    type: Literal["function"]
    function: _Function


class _Named(BodyPart, frozen=True, kw_only=True):
    name: ToolName


class _NamedTool(BodyPart, frozen=True, kw_only=True, tag_field="type", tag="function"):
    function: _Named


class _Allowed(BodyPart, frozen=True, kw_only=True):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_NamedTool], Meta(min_length=1)]


class _AllowedTools(BodyPart, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    allowed_tools: _Allowed


ToolChoice: TypeAlias = Literal["auto", "none", "required"] | _NamedTool | _AllowedTools


def tools_of(fields: Sequence[ToolField]) -> list[Tool]:
    """Return the tools of a body; errors as for :func:`distinct`."""
    functions = [field.function for field in fields]
    return distinct(
        Tool(one.name, one.description, one.parameters or {}, bool(one.strict)) for one in functions
    )


def rules_of(
    tools: Sequence[Tool], choice: ToolChoice | None, *, parallel: bool, final: dict[str, Any] | None
) -> CallRules | None:
    """Return the calls that an answer may have; None for none.

    Raises:
        RequestError: The choice has no such tool.
    """
    if choice == "none":
        return None
    required, names = choice == "required", None
    match choice:
        case _NamedTool(function=function):
            required, parallel, names = True, False, [function.name]
        case _AllowedTools(allowed_tools=allowed):
            required, names = allowed.mode == "required", [one.function.name for one in allowed.tools]
    return call_rules(tools, required=required, names=names, parallel=parallel, final=final)


def dialogue_of(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them.

    Raises:
        RequestError: A message lacks its text, or a call's arguments are no JSON object.
    """
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(message: ChatMessage, place: str) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    calls = message.tool_calls or ()
    if content is None and message.role != "tool" and not calls:
        raise RequestError("The message has no content.", param=f"{place}.content")
    if calls and message.role != "assistant":
        raise RequestError("Only messages of the assistant have tool_calls.", param=f"{place}.tool_calls")
    role = "system" if message.role == "developer" else message.role
    reasoning = message.reasoning_content or message.reasoning or message.thinking
    others = {"name": message.name, "reasoning_content": reasoning}
    made: dict[str, Any] = {"role": role, "content": content or ""}
    made |= {name: value for name, value in others.items() if value is not None}
    if message.role == "tool":
        made["tool_call_id"] = message.tool_call_id
    if calls:
        made["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _function(call, f"{place}.tool_calls[{number}]")}
            for number, call in enumerate(calls)
        ]
    return made


def _function(call: _Call, place: str) -> dict[str, Any]:
    # Templates write objects; a text would have its quotes and escapes twice.
    if (arguments := object_of(call.function.arguments)) is None:
        raise RequestError("The arguments are no JSON object.", param=f"{place}.function.arguments")
    return {"name": call.function.name, "arguments": arguments}
