"""Requests of all doors: the wishes that a door has read, and the prepared answers to them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Final

from msgspec import Meta

from heterollm.base import ContextError, GrammarError, HeteroLLMError, InputError, OptionError
from heterollm.engine import AnswerKeywords, ServiceTier
from heterollm.serve.defaults import RequestDefaults
from heterollm.serve.errors import RequestError
from heterollm.serve.options import MOST_CHOICES
from heterollm.text import TokenSequence
from heterollm.tools import CallRules, ChatPrompt, ChatRequest, ReplyForm, Tool, chat_prompt, fault_of

if TYPE_CHECKING:
    from heterollm.llm import LLM

GBNF: Final = re.compile(r"^\s*root\s*::=", re.MULTILINE)
MOST_STOPS: Final = 16
MOST_TOOLS: Final = 512
MOST_TOP_LOGPROBS: Final = 20
ToolName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.:/-]{1,128}$")]
SEEDS: Final = 1 << 64
RANDOM_SEED: Final = -1
"""The seed that llama.cpp and Ollama take as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """A request as a door has read it.

    Args:
        prompt: A chat, or texts and token ids of several prompts.
        options: The options that the client gives, by their names in :class:`AnswerKeywords`.
        most: Tokens of an answer at most; None for as many as the context holds.
        count: Answers to each prompt.
        stream: Whether to send tokens as they come.
        include_usage: Whether the stream ends with the usage.
        logprobs: Whether to report log-probabilities.
        top: Likeliest tokens to report for each token.
        tier: The urgency.
        owner: Names of the client's choice, of user and cache: only requests of equal ones share sessions.
        fields: Names of the body's fields.
        names: The door's names of the fields ``messages``, ``prompt``, ``tools``, ``response_format`` and
            ``grammar``, if it has others.
        echo: Values that the answer repeats.
    """

    prompt: ChatRequest | Sequence[str | Sequence[int]]
    options: Mapping[str, Any]
    most: int | None
    count: int = 1
    stream: bool = False
    include_usage: bool = False
    logprobs: bool = False
    top: int = 0
    tier: ServiceTier = "default"
    owner: tuple[str | None, ...] = ()
    fields: Sequence[str] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    echo: Mapping[str, Any] = field(default_factory=dict)

    def cause(self, error: HeteroLLMError) -> str | None:
        """Return the field at fault: messages on options begin with their name."""
        chat = isinstance(self.prompt, ChatRequest)
        if isinstance(error, GrammarError):
            tools = isinstance(self.prompt, ChatRequest) and self.prompt.tools
            name = "grammar" if "grammar" in self.options else "tools" if tools else "response_format"
        elif isinstance(error, InputError):
            name = "messages" if chat else "prompt"
        else:
            name = error.message.split()[0]
            return name if name in self.fields else None
        return self.names.get(name, name)


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
        echo: Values that the answer repeats.
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
    echo: Mapping[str, Any] = field(default_factory=dict)


def answers_to(llm: LLM, defaults: RequestDefaults, ask: Ask) -> AnswerRequest:
    """Return a request whose prompts are tokens and whose answers can begin.

    Raises:
        HeteroLLMError: The server refuses it.
    """
    _check_grammar(ask)
    options = dict(ask.options)
    prompts, form, stops = ask.prompt, None, tuple(filter(None, options.get("stop") or ()))
    if isinstance(prompts, ChatRequest):
        prompt = prompt_of(llm, ask)
        stops += llm.tokenizer.chat_stop_strings
        try:
            options, form = prompt.answer_options(options)
        except OptionError as error:
            raise RequestError(error.message, fix=error.fix, param="grammar") from error
        prompts = (prompt.ids,)
    if ask.count * len(prompts) > MOST_CHOICES:
        raise RequestError(
            f"{ask.count * len(prompts)} answers are more than {MOST_CHOICES}.",
            param="n",
            code="too_many_answers",
        )
    answer: Any = {**defaults.sampling, **options, "stop": stops, "max_new_tokens": ask.most}
    seed = answer.pop("seed", None)
    seed = None if seed == RANDOM_SEED else seed
    # The number of guesses follows measured times, on which a seeded answer must not depend.
    answer["speculate"] = seed is None
    answer |= {"log_probabilities": ask.logprobs, "top_log_probabilities": ask.top}
    return AnswerRequest(
        chat=isinstance(ask.prompt, ChatRequest),
        prompts=_prepared(llm, ask, prompts, answer, seed),
        stream=ask.stream,
        include_usage=ask.include_usage,
        logprobs=ask.logprobs,
        tier=ask.tier,
        reproducible=seed is not None or answer["temperature"] == 0,
        owner=ask.owner,
        form=form,
        echo=ask.echo,
    )


def distinct(tools: Iterable[Tool]) -> list[Tool]:
    """Return tools.

    Raises:
        RequestError: Two have one name.
    """
    made = list(tools)
    if len({tool.name for tool in made}) < len(made):
        raise RequestError("Two tools have the same name.", param="tools")
    return made


def call_rules(
    tools: Sequence[Tool],
    *,
    required: bool = False,
    names: Sequence[str] | None = None,
    parallel: bool = True,
    final: Mapping[str, Any] | None = None,
) -> CallRules | None:
    """Return the calls that an answer may have; None for none.

    Args:
        tools: The declared tools.
        required: Whether the answer has a call at least.
        names: Tools that it may call; None for all.
        parallel: Whether it may have several.
        final: JSON Schema of an answer without calls, if it has one.

    Raises:
        RequestError: There is no such tool.
    """
    if not tools and (required or names):
        raise RequestError("tool_choice needs tools.", param="tool_choice")
    if not tools:
        return None
    chosen = [tool for tool in tools if names is None or tool.name in names]
    if names is not None and len(chosen) < len(set(names)):
        raise RequestError("tool_choice names a tool that is not among tools.", param="tool_choice")
    return CallRules(tools=chosen, required=required, parallel=parallel, final=final)


def prompt_of(llm: LLM, ask: Ask) -> ChatPrompt:
    """Return the prompt of a chat; errors as for :func:`answers_to`."""
    assert isinstance(ask.prompt, ChatRequest)  # the door has read one
    try:
        return chat_prompt(llm.tokenizer, ask.prompt, llm.context)
    except ContextError:
        raise
    except (InputError, OptionError) as error:
        raise RequestError(error.message, fix=error.fix, param=ask.cause(error)) from error


def _prepared(
    llm: LLM, ask: Ask, prompts: Sequence[str | Sequence[int]], answer: AnswerKeywords, seed: int | None
) -> tuple[tuple[TokenSequence, ...], ...]:
    made = []
    try:
        for prompt in prompts:
            first = llm.prepare(prompt, **_seeded(answer, seed, 0))
            ids = first.prompt_ids.tolist()
            others = (llm.prepare(ids, **_seeded(answer, seed, i)) for i in range(1, ask.count))
            made.append((first, *others))
    except ContextError:
        raise
    except (InputError, OptionError) as error:
        cause: HeteroLLMError = error
        if isinstance(error, GrammarError) and isinstance(ask.prompt, ChatRequest) and ask.prompt.tools:
            cause = fault_of(ask.prompt.tools) or error
        raise RequestError(cause.message, fix=cause.fix, param=ask.cause(cause)) from error
    return tuple(made)


def _seeded(options: AnswerKeywords, seed: int | None, number: int) -> AnswerKeywords:
    """Return the options of one of several answers: each has a seed of its own."""
    return options if seed is None else {**options, "seed": (seed + number) % SEEDS}


def _check_grammar(ask: Ask) -> None:
    grammar = ask.options.get("grammar")
    if grammar is not None and GBNF.search(grammar):
        raise RequestError(
            "The grammar is one of llama.cpp (GBNF), but the server takes Lark.",
            fix="Write `start: …` for `root ::= …`; `python -m llguidance.gbnf_to_lark` converts most.",
            param="grammar",
        )
