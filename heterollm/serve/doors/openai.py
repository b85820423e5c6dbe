"""OpenAI's chats and completions: their bodies, also with fields of other servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, TypeVar

from msgspec import Meta

from heterollm.base import Positive
from heterollm.engine import ServiceTier
from heterollm.serve.asking import MOST_STOPS, MOST_TOOLS, MOST_TOP_LOGPROBS, AnswerRequest, Ask, answers_to
from heterollm.serve.bodies import BodyPart, check_model, decoded
from heterollm.serve.defaults import RequestDefaults
from heterollm.serve.doors.openai_fields import settle_fields
from heterollm.serve.doors.openai_messages import (
    ChatMessage,
    ToolChoice,
    ToolField,
    dialogue_of,
    rules_of,
    tools_of,
)
from heterollm.serve.errors import RequestError
from heterollm.serve.options import MOST_CHOICES
from heterollm.tools import ChatRequest

if TYPE_CHECKING:
    from heterollm.llm import LLM

T = TypeVar("T", bound="_AnswerBody")

TIER_OF: Final[dict[str | None, ServiceTier]] = {
    None: "default",
    "auto": "default",
    "default": "default",
    "flex": "flex",
    "priority": "priority",
}

Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class _StreamOptions(BodyPart, frozen=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _AnswerBody(BodyPart, frozen=True, kw_only=True):
    """The fields that chats and completions share."""

    model: str
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    # The ranges are those of the Python API.
    temperature: float | None = None
    top_p: float | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_CHOICES)] | None = None
    seed: Seed | None = None
    stop: str | Annotated[list[str], Meta(max_length=MOST_STOPS)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    ignore_eos: bool | None = None
    grammar: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None


class _JsonSchema(BodyPart, frozen=True, kw_only=True):
    name: str = ""
    description: str | None = None
    schema: dict[str, Any]
    strict: bool | None = None


class _TextFormat(BodyPart, frozen=True, tag_field="type", tag="text"):
    pass


class _ObjectFormat(BodyPart, frozen=True, tag_field="type", tag="json_object"):
    pass


class _SchemaFormat(BodyPart, frozen=True, tag_field="type", tag="json_schema"):
    json_schema: _JsonSchema


class _ChatBody(_AnswerBody, frozen=True, kw_only=True):
    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    tools: Annotated[list[ToolField], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    response_format: _TextFormat | _ObjectFormat | _SchemaFormat | None = None


Ids = Annotated[list[int], Meta(min_length=1)]


class _CompletionBody(_AnswerBody, frozen=True, kw_only=True):
    prompt: str | list[str | int | Ids]
    logprobs: Annotated[int, Meta(ge=0, le=MOST_TOP_LOGPROBS)] | None = None


def chat_request(llm: LLM, defaults: RequestDefaults, content: bytes) -> AnswerRequest:
    """Return the request in the body of a chat.

    Raises:
        HeteroLLMError: The server refuses it.
    """
    body = _decoded(content, _ChatBody, defaults.name, llm.context)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs.", param="top_logprobs")
    form: dict[str, Any] = {}
    match body.response_format:
        case _ObjectFormat():
            form = {"json_object": True}
        case _SchemaFormat(wanted):
            form = {"json_schema": wanted.schema}
    final = {"type": "object"} if "json_object" in form else form.get("json_schema")
    tools = tools_of(body.tools or ())
    variables = dict(body.chat_template_kwargs or {})
    if body.enable_thinking is not None:
        variables["enable_thinking"] = body.enable_thinking
    chat = ChatRequest(
        dialogue=dialogue_of(body.messages),
        tools=tools,
        rules=rules_of(tools, body.tool_choice, parallel=body.parallel_tool_calls is not False, final=final),
        final=final,
        effort=body.reasoning_effort,
        variables=variables,
    )
    return answers_to(
        llm,
        defaults,
        Ask(
            prompt=chat,
            most=body.max_completion_tokens or body.max_tokens or defaults.max_tokens,
            logprobs=bool(body.logprobs),
            top=body.top_logprobs or 0,
            **_shared(body, form),
        ),
    )


def completion_request(llm: LLM, defaults: RequestDefaults, content: bytes) -> AnswerRequest:
    """Return the request in the body of a completion; errors as for :func:`chat_request`."""
    body = _decoded(content, _CompletionBody, defaults.name, llm.context)
    return answers_to(
        llm,
        defaults,
        Ask(
            prompt=prompts_of(body.prompt, "prompt"),
            most=body.max_completion_tokens or body.max_tokens or defaults.max_tokens or 16,
            logprobs=body.logprobs is not None,
            top=body.logprobs or 0,
            **_shared(body, {}),
        ),
    )


SAMPLED: Final = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "seed", "ignore_eos", "grammar"),
)


def _shared(body: _AnswerBody, form: dict[str, Any]) -> dict[str, Any]:
    """Return the wishes that both kinds of requests have, and the form of the answer."""
    given = {name: getattr(body, name) for name in SAMPLED if getattr(body, name) is not None}
    return {
        "options": {**form, **given, "stop": [body.stop] if isinstance(body.stop, str) else body.stop},
        "count": body.n or 1,
        "stream": bool(body.stream),
        "include_usage": bool(body.stream_options and body.stream_options.include_usage),
        "tier": TIER_OF[body.service_tier],
        "owner": (body.prompt_cache_key, body.safety_identifier, body.user),
        "fields": body.__struct_fields__,
    }


def _decoded(content: bytes, kind: type[T], name: str, context: int) -> T:
    body = decoded(content, kind, context, settle_fields)
    check_model(body.model, name)
    return body


def prompts_of(
    prompt: str | Sequence[Any], name: str, most: int | None = None
) -> tuple[str | Sequence[int], ...]:
    """Return one or several texts: a text, ids, or a list of these.

    Args:
        prompt: The value of a field.
        name: Its name.
        most: Texts at most.

    Raises:
        RequestError: It mixes ids with texts, or has too many.
    """
    if isinstance(prompt, str) or all(isinstance(item, int) for item in prompt):
        return (prompt,)
    if any(isinstance(item, int) for item in prompt):
        raise RequestError(f"{name} mixes token ids with texts.", param=name)
    if most is not None and len(prompt) > most:
        raise RequestError(f"{name} has {len(prompt)} texts, but {most} are the most.", param=name)
    return tuple(prompt)
