"""Ollama's /api/chat and /api/generate: their bodies and options, and answers in lines of JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from heterollm.serve.answers import Ended, Spent
from heterollm.serve.asking import (
    MOST_STOPS,
    MOST_TOOLS,
    AnswerRequest,
    Ask,
    ToolName,
    answers_to,
    call_rules,
)
from heterollm.serve.bodies import BodyPart, check_model, decoded, object_of
from heterollm.serve.defaults import RequestDefaults
from heterollm.serve.doors.openai_messages import ToolField, tools_of
from heterollm.serve.errors import FailedRequest, RequestError, ollama_error
from heterollm.serve.replies import REASONS, SingleReply
from heterollm.tools import AnswerPart, ChatRequest, Tool, ToolCall, can_reason, reasoning_variables

if TYPE_CHECKING:
    from heterollm.llm import LLM

LATEST: Final = ":latest"
"""The tag of a name without one."""


class OllamaOptions(BodyPart, frozen=True, kw_only=True):
    """The options of an answer; those behind ``stop`` have no effect, as in newer versions of Ollama."""

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)] | None = None
    stop: str | Annotated[list[str], Meta(max_length=MOST_STOPS)] | None = None
    num_ctx: int | None = None
    num_keep: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    num_thread: int | None = None
    main_gpu: int | None = None
    draft_num_predict: int | None = None
    repeat_last_n: int | None = None
    penalize_newline: bool | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None


OPTION_OF: Final[Mapping[str, str]] = {
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "seed")},
    **{name: name for name in ("presence_penalty", "frequency_penalty")},
    "repeat_penalty": "repetition_penalty",
}
"""The options that reach an answer, with their names here."""


class _Body(BodyPart, frozen=True, kw_only=True):
    """The fields that chats and texts share."""

    model: str
    stream: bool | None = None
    options: OllamaOptions | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Literal["", "low", "medium", "high", "max"] | None = None
    # The one model is always loaded.
    keep_alive: int | float | str | None = None
    template: Literal[""] | None = None
    logprobs: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    truncate: bool | None = None
    shift: bool | None = None


class _CalledFunction(BodyPart, frozen=True, kw_only=True):
    name: ToolName
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    index: int | None = None
    description: str | None = None


class _Call(BodyPart, frozen=True, kw_only=True):
    function: _CalledFunction
    id: str | None = None
    type: Literal["function"] | None = None


class _Message(BodyPart, frozen=True, kw_only=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Annotated[list[Any], Meta(max_length=0)] | None = None
    tool_calls: list[_Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    # LiteLLM sends the name of a result so.
    name: str | None = None


class _ChatBody(_Body, frozen=True, kw_only=True):
    messages: list[_Message] | None = None
    tools: Annotated[list[ToolField], Meta(max_length=MOST_TOOLS)] | None = None


class _GenerateBody(_Body, frozen=True, kw_only=True):
    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: Literal[""] | None = None
    images: Annotated[list[Any], Meta(max_length=0)] | None = None
    context: Annotated[list[int], Meta(max_length=0)] | None = None
    width: None = None
    height: None = None
    steps: None = None


def chat_request(llm: LLM, defaults: RequestDefaults, content: bytes) -> AnswerRequest | dict[str, Any]:
    """Return the request in the body of a chat; one without messages only loads the model.

    Raises:
        HeteroLLMError: The server refuses it.
    """
    body = decoded(content, _ChatBody, llm.context)
    check_name(body.model, defaults.name)
    if not body.messages:
        return _loaded(body.model, {"message": {"role": "assistant", "content": ""}})
    tools = tools_of(body.tools or ())
    return _asked(llm, defaults, body, _dialogue(body.messages), tools)


def generate_request(llm: LLM, defaults: RequestDefaults, content: bytes) -> AnswerRequest | dict[str, Any]:
    """Return the request for a text; errors as for :func:`chat_request`."""
    body = decoded(content, _GenerateBody, llm.context)
    check_name(body.model, defaults.name)
    if not body.prompt:
        return _loaded(body.model, {"response": ""})
    if body.raw:
        return _asked(llm, defaults, body, body.prompt, ())
    system = [{"role": "system", "content": body.system}] if body.system else []
    return _asked(llm, defaults, body, [*system, {"role": "user", "content": body.prompt}], ())


def check_name(given: str, name: str) -> None:
    """Refuse a request for another model; errors as for :func:`check_model`."""
    check_model(given.removesuffix(LATEST), name.removesuffix(LATEST))


def _loaded(model: str, empty: dict[str, Any]) -> dict[str, Any]:
    return {"model": model, "created_at": now(), **empty, "done": True, "done_reason": "load"}


def now() -> str:
    """Return the time in Ollama's form."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _asked(
    llm: LLM,
    defaults: RequestDefaults,
    body: _Body,
    prompt: str | list[dict[str, Any]],
    tools: Sequence[Tool],
) -> AnswerRequest:
    options = body.options or OllamaOptions()
    given = {own: getattr(options, name) for name, own in OPTION_OF.items()}
    form: dict[str, Any] = {}
    if body.format == "json":
        form = {"json_object": True}
    elif isinstance(body.format, dict):
        form = {"json_schema": body.format}
    final = {"type": "object"} if "json_object" in form else form.get("json_schema")
    if body.think and not can_reason(llm.tokenizer):
        raise RequestError(f"{body.model!r} does not support thinking.", param="think")
    wanted = None if body.think == "" else body.think
    chat: ChatRequest | tuple[str] = (
        (prompt,)
        if isinstance(prompt, str)
        else ChatRequest(
            dialogue=prompt,
            tools=tools,
            rules=call_rules(tools, final=final),
            final=final,
            variables={} if wanted is None else reasoning_variables(llm.tokenizer, wanted),
        )
    )
    stops = [options.stop] if isinstance(options.stop, str) else options.stop
    most = defaults.max_tokens if options.num_predict is None else options.num_predict
    ask = Ask(
        prompt=chat,
        options={
            **form,
            **{name: value for name, value in given.items() if value is not None},
            "stop": stops or [],
        },
        # Ollama's -1 and -2 are as many as the context holds.
        most=most if most is not None and most > 0 else None,
        stream=body.stream is not False,
        fields=OllamaOptions.__struct_fields__,
        names={"response_format": "format"},
        echo={"model": body.model},
    )
    return answers_to(llm, defaults, ask)


def _dialogue(messages: Sequence[_Message]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them: each call with an id, each result with its call's."""
    made: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []
    for number, message in enumerate(messages):
        own: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            own["reasoning_content"] = message.thinking
        if message.tool_calls:
            if message.role != "assistant":
                raise RequestError(f"messages[{number}] has tool_calls, but is the {message.role}'s.")
            calls = [
                (call.id or f"call_{number}_{place}", call.function)
                for place, call in enumerate(message.tool_calls)
            ]
            waiting = [(call_id, function.name) for call_id, function in calls]
            own["tool_calls"] = [
                {"id": key, "type": "function", "function": {"name": f.name, "arguments": f.arguments}}
                for key, f in calls
            ]
        if message.role == "tool":
            own["tool_call_id"] = _call_of(message, waiting)
        made.append(own)
    return made


def _call_of(message: _Message, waiting: list[tuple[str, str]]) -> str | None:
    """Return the id of a result's call, which waits no longer: by id, else by name, else by order."""
    name = message.tool_name or message.name
    for call_id, called in waiting:
        if message.tool_call_id in (None, call_id) and name in (None, called):
            waiting.remove((call_id, called))
            return call_id
    return message.tool_call_id or name


class _OllamaReply(SingleReply):
    """An answer, whole or in lines of JSON; calls come whole, at the end."""

    media_type = "application/x-ndjson"

    def __init__(self, llm: LLM, name: str, request: AnswerRequest) -> None:
        super().__init__(llm, name, request)
        self._begin_ns = time.monotonic_ns()
        self._calls: list[ToolCall] = []

    def _said(self, part: AnswerPart) -> dict[str, Any]:
        """Return the fields of new text and reasoning, and of whole calls."""
        raise NotImplementedError

    def _line(self, part: AnswerPart) -> dict[str, Any]:
        return {"model": self._request.echo["model"], "created_at": now(), **self._said(part), "done": False}

    def _body(self, part: AnswerPart, end: Ended, spent: Spent) -> dict[str, Any]:
        return {**self._line(part), **self._done(end, spent)}

    def _chunks(self, part: AnswerPart) -> list[dict[str, Any]]:
        for piece in part.calls:
            if piece.call_id:
                self._calls.append(piece)
            else:
                last = self._calls[-1]
                whole = last.arguments + piece.arguments
                self._calls[-1] = ToolCall(last.index, last.call_id, last.name, whole)
        if not part.content and not part.reasoning:
            return []
        return [self._line(AnswerPart(part.reasoning, part.content))]

    def _ending(self, end: Ended, spent: Spent) -> list[dict[str, Any]]:
        calls = [self._line(AnswerPart(calls=tuple(self._calls)))] if self._calls else []
        return [*calls, {**self._line(AnswerPart()), **self._done(end, spent)}]

    def _done(self, end: Ended, spent: Spent) -> dict[str, Any]:
        return {
            "done": True,
            "done_reason": REASONS[end.result.stop_reason],
            "total_duration": time.monotonic_ns() - self._begin_ns,
            "load_duration": 0,
            "prompt_eval_count": spent.prompt_tokens,
            "prompt_eval_duration": int(1e9 * spent.prefill_s),
            "eval_count": spent.answer_tokens,
            "eval_duration": int(1e9 * spent.decode_s),
        }

    def failed(self, failure: FailedRequest) -> dict[str, Any]:
        """Return the line of an error in the middle of a stream."""
        return ollama_error(failure)[1]

    def encoded(self, chunks: Sequence[dict[str, Any]]) -> bytes:
        """Return lines of JSON."""
        return b"".join(msgspec.json.encode(chunk) + b"\n" for chunk in chunks)


class OllamaChatReply(_OllamaReply):
    """The answer to a chat."""

    def _said(self, part: AnswerPart) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": part.content}
        if part.reasoning:
            message["thinking"] = part.reasoning
        calls = [(call, object_of(call.arguments)) for call in part.calls]
        if calls:
            message["tool_calls"] = [
                {"id": one.call_id, "function": {"index": one.index, "name": one.name, "arguments": given}}
                for one, given in calls
                if given is not None  # an answer may end in the middle of a call
            ]
        return {"message": message}


class OllamaTextReply(_OllamaReply):
    """The continuation of a prompt."""

    def _said(self, part: AnswerPart) -> dict[str, Any]:
        thinking = {"thinking": part.reasoning} if part.reasoning else {}
        return {"response": part.content, **thinking}
