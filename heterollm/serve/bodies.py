"""Bodies of requests: decodes them, refuses parameters without support, and prepares the answers."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypeAlias, TypeVar

import msgspec
from msgspec import Meta

from heterollm.base import (
    ContextError,
    GrammarError,
    HeteroLLMError,
    InputError,
    OptionError,
    Positive,
    decode,
    decode_json,
)
from heterollm.engine import AnswerKeywords, ServiceTier
from heterollm.serve.defaults import RequestDefaults
from heterollm.serve.errors import RequestError
from heterollm.serve.fields import settle_fields
from heterollm.serve.messages import (
    MOST_TOOLS,
    ChatMessage,
    ToolChoice,
    ToolField,
    dialogue_of,
    rules_of,
    tools_of,
)
from heterollm.serve.options import MOST_CHOICES
from heterollm.serve.reading import check_values
from heterollm.text import TokenSequence
from heterollm.tools import ChatPrompt, ChatRequest, ReplyForm, chat_prompt, fault_of

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
LONG_BODY: Final = 1 << 16
"""Bytes from which the values of a body are counted before they are decoded."""

MOST_VALUES: Final = 1 << 16
"""Values of a body, beside the token ids of as many full contexts as there may be prompts."""

GBNF: Final = re.compile(r"^\s*root\s*::=", re.MULTILINE)
MOST_STOPS: Final = 16
MOST_TOP_LOGPROBS: Final = 20
SEEDS: Final = 1 << 64
RANDOM_SEED: Final = -1
"""The seed that llama.cpp and Ollama take as none."""

Seed = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class _StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class _AnswerBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


class _JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str = ""
    description: str | None = None
    schema: dict[str, Any]
    strict: bool | None = None


class _TextFormat(msgspec.Struct, frozen=True, tag_field="type", tag="text", forbid_unknown_fields=True):
    pass


class _ObjectFormat(
    msgspec.Struct, frozen=True, tag_field="type", tag="json_object", forbid_unknown_fields=True
):
    pass


class _SchemaFormat(
    msgspec.Struct, frozen=True, tag_field="type", tag="json_schema", forbid_unknown_fields=True
):
    json_schema: _JsonSchema


class _ChatBody(_AnswerBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
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


class _CompletionBody(_AnswerBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[str | int | Ids]
    logprobs: Annotated[int, Meta(ge=0, le=MOST_TOP_LOGPROBS)] | None = None


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A checked request.

    Args:
        chat: Whether it is a chat; else a completion.
        prompts: The answers to each prompt.
        stream: Whether to send tokens as they come.
        include_usage: Whether the stream ends with the usage.
        logprobs: Whether to report log-probabilities.
        tier: The urgency.
        reproducible: Whether the answers must not depend on other requests.
        owner: Names of the client's choice, of user and cache: only requests of equal ones share sessions.
        form: The forms of calls and reasoning in the answers; None if they are text alone.
    """

    chat: bool
    prompts: tuple[tuple[TokenSequence, ...], ...]
    stream: bool
    include_usage: bool
    logprobs: bool
    tier: ServiceTier
    reproducible: bool
    owner: tuple[str | None, ...]
    form: ReplyForm | None = None


def chat_request(llm: LLM, defaults: RequestDefaults, content: bytes) -> AnswerRequest:
    """Return the request in the body of a chat.

    Raises:
        HeteroLLMError: The server refuses it.
    """
    body = _decoded(content, _ChatBody, defaults.name, llm.context)
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs.", param="top_logprobs")
    options: AnswerKeywords = {"stop": (*_stops(body), *llm.tokenizer.chat_stop_strings)}
    final: dict[str, Any] | None = None
    match body.response_format:
        case _ObjectFormat():
            options["json_object"], final = True, {"type": "object"}
        case _SchemaFormat(wanted):
            options["json_schema"] = final = wanted.schema
    prompt = _chat_prompt(llm, body, final)
    if prompt.grammar is not None:
        if body.grammar is not None:
            raise RequestError("grammar and tools are both given.", fix="Leave out one.", param="grammar")
        options = {"stop": options["stop"], "grammar": prompt.grammar}
    # A grammar of the client's own says what an answer is.
    form = None if body.grammar is not None or prompt.form.is_text else prompt.form
    if form is not None:
        options["marks"] = tuple(form.marks.values())
    most = body.max_completion_tokens or body.max_tokens or defaults.max_tokens
    wants = bool(body.logprobs)
    made = _request(llm, defaults, body, (prompt.ids,), options, most, logprobs=wants, top=body.top_logprobs)
    return replace(made, form=form)


def _chat_prompt(llm: LLM, body: _ChatBody, final: dict[str, Any] | None) -> ChatPrompt:
    tools = tools_of(body.tools or ())
    variables = dict(body.chat_template_kwargs or {})
    if body.enable_thinking is not None:
        variables["enable_thinking"] = body.enable_thinking
    request = ChatRequest(
        dialogue=dialogue_of(body.messages),
        tools=tools,
        rules=rules_of(tools, body.tool_choice, parallel=body.parallel_tool_calls is not False, final=final),
        final=final,
        effort=body.reasoning_effort,
        variables=variables,
    )
    try:
        return chat_prompt(llm.tokenizer, request, llm.context)
    except ContextError:
        raise
    except (InputError, OptionError) as error:
        raise RequestError(error.message, fix=error.fix, param=_cause(body, error)) from error


def completion_request(llm: LLM, defaults: RequestDefaults, content: bytes) -> AnswerRequest:
    """Return the request in the body of a completion; errors as for :func:`chat_request`."""
    body = _decoded(content, _CompletionBody, defaults.name, llm.context)
    options: AnswerKeywords = {"stop": _stops(body)}
    prompts = _prompts(body.prompt)
    most = body.max_completion_tokens or body.max_tokens or defaults.max_tokens or 16
    wanted = body.logprobs is not None
    return _request(llm, defaults, body, prompts, options, most, logprobs=wanted, top=body.logprobs)


def _request(
    llm: LLM,
    defaults: RequestDefaults,
    body: _AnswerBody,
    prompts: Sequence[str | Sequence[int]],
    options: AnswerKeywords,
    most: int | None,
    *,
    logprobs: bool,
    top: int | None,
) -> AnswerRequest:
    count = body.n or 1
    if count * len(prompts) > MOST_CHOICES:
        raise RequestError(
            f"{count * len(prompts)} answers are more than {MOST_CHOICES}.",
            param="n",
            code="too_many_answers",
        )
    _check_grammar(body)
    given = {name: getattr(body, name) for name in SAMPLED if getattr(body, name) is not None}
    answer: Any = {**defaults.sampling, **options, **given, "max_new_tokens": most}
    seed = answer.pop("seed", None)
    seed = None if seed == RANDOM_SEED else seed
    # The number of guesses follows measured times, on which a seeded answer must not depend.
    answer["speculate"] = seed is None
    answer |= {"log_probabilities": logprobs, "top_log_probabilities": top or 0}
    try:
        made = []
        for prompt in prompts:
            first = llm.prepare(prompt, **_seeded(answer, seed, 0))
            ids = first.prompt_ids.tolist()
            others = (llm.prepare(ids, **_seeded(answer, seed, i)) for i in range(1, count))
            made.append((first, *others))
    except ContextError:
        raise
    except (InputError, OptionError) as error:
        cause: HeteroLLMError = error
        if isinstance(error, GrammarError) and isinstance(body, _ChatBody) and body.tools:
            cause = fault_of(tools_of(body.tools)) or error
        raise RequestError(cause.message, fix=cause.fix, param=_cause(body, cause)) from error
    return AnswerRequest(
        chat=isinstance(body, _ChatBody),
        prompts=tuple(made),
        stream=bool(body.stream),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        logprobs=logprobs,
        tier=TIER_OF[body.service_tier],
        reproducible=seed is not None or answer["temperature"] == 0,
        owner=(body.prompt_cache_key, body.safety_identifier, body.user),
    )


SAMPLED: Final = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "seed", "ignore_eos", "grammar"),
)


def _cause(body: _AnswerBody, error: HeteroLLMError) -> str | None:
    """Return the field at fault: messages on options begin with their name."""
    if isinstance(error, GrammarError):
        tools = isinstance(body, _ChatBody) and body.tools
        return "grammar" if body.grammar is not None else "tools" if tools else "response_format"
    if isinstance(error, InputError):
        return "messages" if isinstance(body, _ChatBody) else "prompt"
    name = error.message.split()[0]
    return name if name in type(body).__struct_fields__ else None


def _seeded(options: AnswerKeywords, seed: int | None, number: int) -> AnswerKeywords:
    """Return the options of one of several answers: each has a seed of its own."""
    return options if seed is None else {**options, "seed": (seed + number) % SEEDS}


def _decoded(content: bytes, kind: type[T], name: str, context: int) -> T:
    if len(content) > LONG_BODY:
        check_values(content, MOST_VALUES + MOST_CHOICES * context)
    data = decode_json(content, source="The body", error=RequestError)
    if not isinstance(data, dict):
        raise RequestError("The body is no JSON object.")
    settle_fields(data, kind.__struct_fields__)
    try:
        body = decode(data, kind, source="The request is not valid", error=RequestError)
    except RequestError as error:
        error.param = _field(error.message)
        raise
    if body.model != name:
        raise RequestError(
            f"There is no model {body.model!r:.100} here.",
            fix=f"This server has {name!r}.",
            status=404,
            param="model",
            code="model_not_found",
        )
    return body


def _field(message: str) -> str | None:
    """Return the path of the field that a message of :func:`decode` names."""
    found = re.search(r"valid: (\w[\w\[\].]*): |field `(\w+)`", message)
    return None if found is None else found[1] or found[2]


def _stops(body: _AnswerBody) -> tuple[str, ...]:
    stop = body.stop or ()
    return tuple(filter(None, (stop,) if isinstance(stop, str) else stop))


def _check_grammar(body: _AnswerBody) -> None:
    if body.grammar is not None and GBNF.search(body.grammar):
        raise RequestError(
            "The grammar is one of llama.cpp (GBNF), but the server takes Lark.",
            fix="Write `start: …` for `root ::= …`; `python -m llguidance.gbnf_to_lark` converts most.",
            param="grammar",
        )


def _prompts(prompt: str | Sequence[Any]) -> tuple[str | Sequence[int], ...]:
    """Return the prompts of a completion: a text, ids, or a list of several."""
    if isinstance(prompt, str) or all(isinstance(item, int) for item in prompt):
        return (prompt,)
    if any(isinstance(item, int) for item in prompt):
        raise RequestError("prompt mixes token ids with texts.", param="prompt")
    return tuple(prompt)
