"""Anthropic's Messages API: dialogues of content blocks, tools, reasoning, and the count of tokens."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias

from msgspec import Meta

from heterollm.base import Positive
from heterollm.serve.about import About
from heterollm.serve.answers import Ended, Spent
from heterollm.serve.asking import (
    MOST_STOPS,
    MOST_TOOLS,
    AnswerRequest,
    Ask,
    ToolName,
    answers_to,
    call_rules,
    distinct,
    prompt_of,
)
from heterollm.serve.bodies import BodyPart, check_model, decoded, object_of
from heterollm.serve.defaults import RequestDefaults
from heterollm.serve.errors import FailedRequest, RequestError, anthropic_error
from heterollm.serve.replies import SingleReply, named_events
from heterollm.tools import AnswerPart, CallRules, ChatRequest, Tool, reasoning_variables

if TYPE_CHECKING:
    from heterollm.llm import LLM


class _Cached(BodyPart, frozen=True, kw_only=True):
    # The server keeps sessions by itself.
    cache_control: Any = None


class _Text(_Cached, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str
    citations: Any = None


class _Thinking(BodyPart, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str
    signature: str = ""


class _HiddenThinking(BodyPart, frozen=True, kw_only=True, tag_field="type", tag="redacted_thinking"):
    data: str


class _ToolUse(_Cached, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: ToolName
    input: dict[str, Any]
    caller: Any = None
    toolset_name: None = None


class _ToolResult(_Cached, frozen=True, kw_only=True, tag_field="type", tag="tool_result"):
    tool_use_id: str
    content: str | list[_Text] | None = None
    is_error: bool | None = None
    toolset_name: None = None


_Block: TypeAlias = _Text | _Thinking | _HiddenThinking | _ToolUse | _ToolResult


class _Message(BodyPart, frozen=True, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _ToolField(_Cached, frozen=True, kw_only=True):
    name: ToolName
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    # Without effect here: arguments are always streamed, and all tools are in the prompt.
    eager_input_streaming: bool | None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: list[Literal["direct"]] | None = None
    input_examples: list[dict[str, Any]] | None = None


class _Choice(BodyPart, frozen=True, kw_only=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _ThinkingConfig(BodyPart, frozen=True, kw_only=True):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None
    display: str | None = None


class _Format(BodyPart, frozen=True, kw_only=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class _OutputConfig(BodyPart, frozen=True, kw_only=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: _Format | None = None


class _Metadata(BodyPart, frozen=True, kw_only=True):
    user_id: str | None = None


class _Body(_Cached, frozen=True, kw_only=True):
    model: str
    messages: Annotated[list[_Message], Meta(min_length=1)]
    max_tokens: Positive | None = None
    system: str | list[_Text] | None = None
    stop_sequences: Annotated[list[str], Meta(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: Annotated[list[_ToolField], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: _Choice | None = None
    thinking: _ThinkingConfig | None = None
    output_config: _OutputConfig | None = None
    metadata: _Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    # Of Anthropic's own service alone.
    inference_geo: str | None = None
    context_management: Any = None
    diagnostics: Any = None
    mcp_servers: Annotated[list[Any], Meta(max_length=0)] | None = None
    container: None = None
    speed: Literal["standard"] | None = None


FIELDS: Final = {"response_format": "output_config.format"}


def messages_request(llm: LLM, defaults: RequestDefaults, content: bytes) -> AnswerRequest:
    """Return the request in the body of a message.

    Raises:
        HeteroLLMError: The server refuses it.
    """
    body, ask = _asked(llm, defaults, content)
    if body.max_tokens is None:
        raise RequestError("max_tokens: Field required.", param="max_tokens")
    return answers_to(llm, defaults, ask)


def count_tokens(about: About, content: bytes) -> dict[str, int]:
    """Return the number of tokens of a message's prompt; errors as for :func:`messages_request`."""
    _, ask = _asked(about.llm, about.defaults, content)
    return {"input_tokens": len(prompt_of(about.llm, ask).ids)}


def _asked(llm: LLM, defaults: RequestDefaults, content: bytes) -> tuple[_Body, Ask]:
    body = decoded(content, _Body, llm.context)
    check_model(body.model, defaults.name)
    config = body.output_config or _OutputConfig()
    final = None if config.format is None else config.format.schema
    tools = distinct(
        Tool(one.name, one.description, one.input_schema, bool(one.strict)) for one in body.tools or ()
    )
    wanted: bool | str | None = config.effort
    if body.thinking is not None:
        off = body.thinking.type == "disabled"
        wanted = False if off else config.effort or True
    chat = ChatRequest(
        dialogue=_dialogue(body),
        tools=tools,
        rules=_rules(tools, body.tool_choice or _Choice(type="auto"), final),
        final=final,
        # Clients ask for reasoning without knowing the model: a template without it ignores that.
        variables={} if wanted is None else reasoning_variables(llm.tokenizer, wanted),
    )
    options = {name: getattr(body, name) for name in ("temperature", "top_p", "top_k")}
    given = {name: value for name, value in options.items() if value is not None}
    stops = body.stop_sequences or []
    ask = Ask(
        prompt=chat,
        options={**given, **({"json_schema": final} if final is not None else {}), "stop": stops},
        most=body.max_tokens,
        stream=bool(body.stream),
        owner=(None if body.metadata is None else body.metadata.user_id,),
        fields=body.__struct_fields__,
        names=FIELDS,
        echo={"stop_sequences": stops},
    )
    return body, ask


def _rules(tools: Sequence[Tool], choice: _Choice, final: dict[str, Any] | None) -> CallRules | None:
    parallel = not choice.disable_parallel_tool_use
    if choice.type == "none":
        return None
    if choice.type != "tool":
        return call_rules(tools, required=choice.type == "any", parallel=parallel, final=final)
    if choice.name is None:
        raise RequestError("tool_choice.name: Field required.", param="tool_choice")
    return call_rules(tools, required=True, names=[choice.name], parallel=False, final=final)


def _dialogue(body: _Body) -> list[dict[str, Any]]:
    """Return messages as chat templates take them: a message for each result, before the user's text."""
    made: list[dict[str, Any]] = []
    if body.system:
        system = body.system if isinstance(body.system, str) else _text(body.system)
        made.append({"role": "system", "content": system})
    for number, message in enumerate(body.messages):
        blocks = [_Text(text=message.content)] if isinstance(message.content, str) else message.content
        if not blocks:
            raise RequestError(f"messages[{number}].content is empty.", param="messages")
        for block in blocks:
            _check_role(block, message.role, number)
        text = _text(block for block in blocks if isinstance(block, _Text))
        has_text = any(isinstance(block, _Text) for block in blocks)
        if message.role == "assistant":
            made.append(_answer(blocks, text))
            continue
        made += [_result(block) for block in blocks if isinstance(block, _ToolResult)]
        if has_text and made and made[-1]["role"] == message.role:  # turns of one role are one
            made[-1] = {**made[-1], "content": f"{made[-1]['content']}\n{text}"}
        elif has_text:
            made.append({"role": message.role, "content": text})
    if body.messages[-1].role == "assistant":
        raise RequestError(
            "The last message is the assistant's, and the server continues none.",
            fix="End with a message of the user.",
            param="messages",
        )
    return made


def _check_role(block: _Block, role: str, number: int) -> None:
    wrong = isinstance(block, _ToolResult) and role != "user"
    wrong |= isinstance(block, _ToolUse | _Thinking | _HiddenThinking) and role != "assistant"
    if wrong:
        kind = block.__struct_config__.tag
        raise RequestError(f"messages[{number}] of the {role} has a block {kind}.", param="messages")


def _answer(blocks: Sequence[_Block], text: str) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": text}
    if reasoning := "\n".join(block.thinking for block in blocks if isinstance(block, _Thinking)):
        made["reasoning_content"] = reasoning
    calls = [block for block in blocks if isinstance(block, _ToolUse)]
    if calls:
        made["tool_calls"] = [
            {"id": one.id, "type": "function", "function": {"name": one.name, "arguments": one.input}}
            for one in calls
        ]
    return made


def _result(block: _ToolResult) -> dict[str, Any]:
    content = block.content or ""
    text = content if isinstance(content, str) else _text(content)
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _text(blocks: Iterable[_Text]) -> str:
    return "\n".join(block.text for block in blocks)


STOP_REASONS: Final = {
    "eos": "end_turn",
    "complete": "end_turn",
    "stop": "end_turn",
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
}


class MessageReply(SingleReply):
    """A message, whole or in events: blocks of reasoning, text and calls, one after the other."""

    def __init__(self, llm: LLM, name: str, request: AnswerRequest) -> None:
        super().__init__(llm, name, request)
        self._id = f"msg_{secrets.token_hex(12)}"
        self._blocks = 0
        self._open: str | None = None
        """Type of the block that the stream is in."""

    def _head(self, content: list[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._name}
        return {**head, "content": content, "stop_reason": None, "stop_sequence": None, "usage": usage}

    def _body(self, part: AnswerPart, end: Ended, spent: Spent) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if part.reasoning:
            content.append({"type": "thinking", "thinking": part.reasoning, "signature": ""})
        if part.content:
            content.append({"type": "text", "text": part.content})
        for call in part.calls:
            content.append({"type": "tool_use", "id": call.call_id, "name": call.name})
            # An answer that ends in the middle of a call has no arguments of it.
            content[-1]["input"] = object_of(call.arguments) or {}
        head = self._head(content, self._usage(spent))
        return {**head, **self._stop(end), "timings": self._timings(spent)}

    def opening(self, choice: int) -> list[dict[str, Any]]:  # noqa: ARG002 - the only one
        """Return the event before the first block. How many tokens a session held is told at the end."""
        tokens = len(self._request.prompts[0][0].prompt_ids)
        message = self._head([], {"input_tokens": tokens, "output_tokens": 0})
        return [{"type": "message_start", "message": message}, {"type": "ping"}]

    def _chunks(self, part: AnswerPart) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if part.reasoning:
            events += self._enter({"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._delta("thinking_delta", thinking=part.reasoning))
        if part.content:
            events += self._enter({"type": "text", "text": ""})
            events.append(self._delta("text_delta", text=part.content))
        for call in part.calls:
            if call.call_id:
                own = {"type": "tool_use", "id": call.call_id, "name": call.name, "input": {}}
                events += self._enter(own, is_new=True)
            if call.arguments:
                events.append(self._delta("input_json_delta", partial_json=call.arguments))
        return events

    def _enter(self, block: dict[str, Any], *, is_new: bool = False) -> list[dict[str, Any]]:
        """Return the events of a block's beginning, and of the end of the one before."""
        if self._open == block["type"] and not is_new:
            return []
        events = self._leave()
        self._open = block["type"]
        return [*events, {"type": "content_block_start", "index": self._blocks, "content_block": block}]

    def _leave(self) -> list[dict[str, Any]]:
        if self._open is None:
            return []
        self._open = None
        self._blocks += 1
        return [{"type": "content_block_stop", "index": self._blocks - 1}]

    def _delta(self, kind: str, **values: str) -> dict[str, Any]:
        delta = {"type": kind, **values}
        return {"type": "content_block_delta", "index": self._blocks, "delta": delta}

    def _ending(self, end: Ended, spent: Spent) -> list[dict[str, Any]]:
        delta = {"type": "message_delta", "delta": self._stop(end), "usage": self._usage(spent)}
        return [*self._leave(), delta, {"type": "message_stop"}]

    def _stop(self, end: Ended) -> dict[str, Any]:
        reason, sequence = STOP_REASONS[end.result.stop_reason], None
        if self._reason(end) == "tool_calls":
            reason = "tool_use"
        elif end.result.stop_reason == "stop":
            whole = self._llm.tokenizer.decode(end.result.token_ids, controls=True)
            stops = [one for one in self._request.echo["stop_sequences"] if one and one in whole]
            sequence = min(stops, key=whole.find, default=None)
            reason = reason if sequence is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self, spent: Spent) -> dict[str, Any]:
        count = self._reasoning_tokens
        details = {} if count is None else {"output_tokens_details": {"thinking_tokens": count}}
        return {
            "input_tokens": spent.prompt_tokens - spent.cached_tokens,
            "cache_read_input_tokens": spent.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": spent.answer_tokens,
            **details,
        }

    def failed(self, failure: FailedRequest) -> dict[str, Any]:
        """Return the event of an error in the middle of a stream."""
        return anthropic_error(failure)[1]

    def encoded(self, chunks: Sequence[dict[str, Any]]) -> bytes:
        """Return events with their types."""
        return named_events(chunks)
