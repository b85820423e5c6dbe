"""OpenAI's Responses API: its bodies of items and flat tools, and the responses that it keeps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta
from starlette.requests import Request

from heterollm.base import Positive
from heterollm.serve.about import About
from heterollm.serve.asking import MOST_TOOLS, AnswerRequest, Ask, ToolName, answers_to, call_rules, distinct
from heterollm.serve.bodies import BodyPart, check_model, decoded, object_of
from heterollm.serve.doors.openai import TIER_OF, Effort, Seed
from heterollm.serve.errors import RequestError
from heterollm.serve.guard import owner_of
from heterollm.serve.kept_responses import KeptResponse
from heterollm.tools import CallRules, ChatRequest, Tool, reasoning_variables


class _InputText(BodyPart, frozen=True, kw_only=True, tag_field="type", tag="input_text"):
    text: str


class _OutputText(BodyPart, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class _Refusal(BodyPart, frozen=True, kw_only=True, tag_field="type", tag="refusal"):
    refusal: str


class _Item(BodyPart, frozen=True, kw_only=True):
    """The fields of items that clients send back as they received them."""

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class _Message(_Item, frozen=True, kw_only=True, tag_field="type", tag="message"):
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_InputText | _OutputText | _Refusal]
    phase: str | None = None


class _Call(_Item, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    call_id: str
    name: ToolName
    arguments: str
    caller: Any = None
    namespace: None = None


class _CallOutput(_Item, frozen=True, kw_only=True, tag_field="type", tag="function_call_output"):
    call_id: str
    output: str | list[_InputText]
    name: str | None = None
    caller: Any = None
    namespace: None = None


class _ReasoningText(BodyPart, frozen=True, kw_only=True):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class _Reasoning(_Item, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    summary: list[_ReasoningText] = msgspec.field(default_factory=list)
    content: list[_ReasoningText] | None = None
    encrypted_content: str | None = None


_AnyItem: TypeAlias = _Message | _Call | _CallOutput | _Reasoning


class _ToolField(BodyPart, frozen=True, kw_only=True):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: Literal[False] | None = None


class _NamedTool(BodyPart, frozen=True, kw_only=True, tag_field="type", tag="function"):
    name: ToolName


class _AllowedTools(BodyPart, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[_NamedTool], Meta(min_length=1)]


class _TextFormat(BodyPart, frozen=True, kw_only=True, tag_field="type", tag="text"):
    pass


class _ObjectFormat(BodyPart, frozen=True, kw_only=True, tag_field="type", tag="json_object"):
    pass


class _SchemaFormat(BodyPart, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    schema: dict[str, Any]
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class _Text(BodyPart, frozen=True, kw_only=True):
    format: _TextFormat | _ObjectFormat | _SchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class _ReasoningOptions(BodyPart, frozen=True, kw_only=True):
    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None


class _StreamOptions(BodyPart, frozen=True, kw_only=True):
    include_obfuscation: bool | None = None


class _Body(BodyPart, frozen=True, kw_only=True):
    model: str
    input: str | Annotated[list[_AnyItem], Meta(min_length=1)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_output_tokens: Positive | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Annotated[list[_ToolField], Meta(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["auto", "none", "required"] | _NamedTool | _AllowedTools | None = None
    parallel_tool_calls: bool | None = None
    text: _Text | None = None
    reasoning: _ReasoningOptions | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Fields of this server's chats.
    seed: Seed | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    # Without effect here.
    truncation: Literal["auto", "disabled"] | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    max_tool_calls: int | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    context_management: Any = None
    # Without support: only values without effect.
    background: Literal[False] | None = None
    top_logprobs: Literal[0] | None = None
    conversation: None = None
    moderation: None = None
    prompt: None = None


SAMPLED: Final = ("temperature", "top_p", "seed", "top_k", "min_p", "repetition_penalty")
FIELDS: Final[Mapping[str, str]] = {"messages": "input", "response_format": "text.format"}


def response_request(about: About, owner: str, content: bytes) -> AnswerRequest:
    """Return the request in the body of a response.

    Args:
        about: Has the model, and the responses that the request may continue.
        owner: Whose responses these are.
        content: The body.

    Raises:
        HeteroLLMError: The server refuses it.
    """
    llm, defaults = about.llm, about.defaults
    body = decoded(content, _Body, llm.context, _settle)
    check_model(body.model, about.name)
    before = _previous(about, owner, body.previous_response_id)
    own: list[_AnyItem] = (
        [_Message(role="user", content=body.input)] if isinstance(body.input, str) else body.input
    )
    items = (*before.items, *own) if before else tuple(own)
    form = _form(body)
    final = {"type": "object"} if "json_object" in form else form.get("json_schema")
    tools = distinct(
        Tool(one.name, one.description, one.parameters or {}, bool(one.strict)) for one in body.tools or ()
    )
    effort = body.reasoning and body.reasoning.effort
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    chat = ChatRequest(
        dialogue=[*system, *_dialogue(items)],
        tools=tools,
        rules=_rules(tools, body, final),
        final=final,
        # Agents ask for an effort without knowing the model: a template without it ignores that.
        variables=reasoning_variables(llm.tokenizer, effort != "none" and effort) if effort else {},
    )
    given = {name: getattr(body, name) for name in SAMPLED if getattr(body, name) is not None}
    most = body.max_output_tokens or defaults.max_tokens

    def keep(response: dict[str, Any]) -> None:
        """Keep the response, with the dialogue to its end."""
        made = msgspec.convert(response["output"], list[_AnyItem])
        size = len(msgspec.json.encode((own, response))) + (before.size if before else 0)
        about.responses.put(response["id"], KeptResponse(owner, (*items, *made), size, response))

    ask = Ask(
        prompt=chat,
        options={**form, **given},
        most=most,
        stream=bool(body.stream),
        tier=TIER_OF[body.service_tier],
        owner=(body.prompt_cache_key, body.safety_identifier, body.user),
        fields=body.__struct_fields__,
        names=FIELDS,
        echo={"keep": None if body.store is False else keep, "fields": _echo(body, about, most)},
    )
    return answers_to(llm, defaults, ask)


def _settle(data: dict[str, Any], _known: Sequence[str]) -> None:
    """Give messages the type that they may lack."""
    items = data.get("input")
    for item in items if isinstance(items, list) else ():
        if isinstance(item, dict) and "role" in item:
            item.setdefault("type", "message")


def _previous(about: About, owner: str, key: str | None) -> KeptResponse | None:
    if key is None:
        return None
    found = about.responses.get(key, owner)
    if found is None:
        raise RequestError(
            f"There is no response {key!r:.80} in memory.",
            fix="Send the whole dialogue as input.",
            status=404,
            param="previous_response_id",
            code="previous_response_not_found",
        )
    return found


def _form(body: _Body) -> dict[str, Any]:
    match body.text.format if body.text else None:
        case _ObjectFormat():
            return {"json_object": True}
        case _SchemaFormat(schema=schema):
            return {"json_schema": schema}
    return {}


def _rules(tools: Sequence[Tool], body: _Body, final: dict[str, Any] | None) -> CallRules | None:
    choice, parallel = body.tool_choice, body.parallel_tool_calls is not False
    match choice:
        case "none":
            return None
        case _NamedTool(name=name):
            return call_rules(tools, required=True, names=[name], parallel=False, final=final)
        case _AllowedTools(mode=mode, tools=allowed):
            names = [one.name for one in allowed]
            return call_rules(tools, required=mode == "required", names=names, parallel=parallel, final=final)
    return call_rules(tools, required=choice == "required", parallel=parallel, final=final)


def _dialogue(items: Sequence[_AnyItem]) -> list[dict[str, Any]]:
    """Return messages as chat templates take them: an answer's reasoning, text and calls are one."""
    made: list[dict[str, Any]] = []

    def answer() -> dict[str, Any]:
        if not made or made[-1]["role"] != "assistant":
            made.append({"role": "assistant", "content": ""})
        return made[-1]

    for number, item in enumerate(items):
        match item:
            case _Reasoning():
                text = "\n".join(part.text for part in item.content or item.summary)
                if text:
                    answer()["reasoning_content"] = text
            case _Message(role="assistant"):
                own = answer()
                own["content"] = "\n".join(filter(None, (own["content"], _text(item.content))))
            case _Message():
                role = "system" if item.role == "developer" else item.role
                made.append({"role": role, "content": _text(item.content)})
            case _Call():
                function = {"name": item.name, "arguments": _arguments(item.arguments, number)}
                call = {"id": item.call_id, "type": "function", "function": function}
                answer().setdefault("tool_calls", []).append(call)
            case _CallOutput():
                text = _text(item.output)
                made.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
    return made


def _text(content: str | Sequence[_InputText | _OutputText | _Refusal]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.refusal if isinstance(part, _Refusal) else part.text for part in content)


def _arguments(text: str, number: int) -> dict[str, Any]:
    if (arguments := object_of(text)) is None:
        raise RequestError("The arguments are no JSON object.", param=f"input[{number}].arguments")
    return arguments


def _echo(body: _Body, about: About, most: int | None) -> dict[str, Any]:
    """Return the fields of a response that repeat its request."""
    sampling, text = about.defaults.sampling, body.text or _Text()
    form = text.format or _TextFormat()
    return {
        "background": False,
        "instructions": body.instructions,
        "max_output_tokens": most,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "service_tier": TIER_OF[body.service_tier],
        "store": body.store is not False,
        "temperature": sampling.get("temperature") if body.temperature is None else body.temperature,
        "text": {"format": msgspec.to_builtins(form), "verbosity": text.verbosity or "medium"},
        "tool_choice": msgspec.to_builtins(body.tool_choice or "auto"),
        "tools": msgspec.to_builtins(body.tools or []),
        "top_p": sampling.get("top_p", 1.0) if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "user": body.user,
    }


def kept_response(about: About, request: Request) -> dict[str, Any]:
    """Return a response that the server keeps.

    Raises:
        RequestError: It keeps none of this id.
    """
    key = request.path_params["id"]
    found = about.responses.get(key, owner_of(request.headers))
    if found is None:
        raise _unknown(key)
    return found.body


def forget_response(about: About, request: Request) -> dict[str, Any]:
    """Forget a response; errors as for :func:`kept_response`."""
    key = request.path_params["id"]
    if not about.responses.remove(key, owner_of(request.headers)):
        raise _unknown(key)
    return {"id": key, "object": "response", "deleted": True}


def _unknown(key: str) -> RequestError:
    return RequestError(f"There is no response {key!r:.80} in memory.", status=404, code="response_not_found")
