"""The prompt of a chat with tools, the grammar of its answer, and the form to read it in."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from heterollm.base import GrammarError, InputError, OptionError
from heterollm.text import GenerationOptions, Tokenizer, check_structure
from heterollm.tools.constraint import CallRules, call_grammar
from heterollm.tools.forms import CHANNELS, GENERIC, HARMONY_MARKS, ReasoningForm, ToolForm
from heterollm.tools.harmony import EFFORTS as CHANNEL_EFFORTS
from heterollm.tools.harmony import channel_grammar, described, with_thinking
from heterollm.tools.reading import ID_LENGTH, ReplyForm
from heterollm.tools.schemas import Tool
from heterollm.tools.support import Dialogue, ToolSupport, render, support_of

EFFORTS: Final = ("reasoning_effort", "enable_thinking", "thinking")
"""Variables of templates that turn reasoning on and off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat.

    Args:
        dialogue: Messages in OpenAI's form, with arguments as objects.
        tools: The declared tools.
        rules: The calls that the answer may have; None for none.
        final: JSON Schema of the answer, if it has one.
        effort: The effort of reasoning, "none" among them; None for the template's own.
        variables: Further variables of the template.
    """

    dialogue: Dialogue
    tools: Sequence[Tool] = ()
    rules: CallRules | None = None
    final: Mapping[str, Any] | None = None
    effort: str | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A prompt and its answer.

    Args:
        ids: The prompt.
        form: The forms of calls and reasoning in the answer.
        grammar: The grammar of the answer; None for any text.
    """

    ids: list[int]
    form: ReplyForm
    grammar: str | None

    def answer_options(self, options: Mapping[str, Any]) -> tuple[dict[str, Any], ReplyForm | None]:
        """Return the options of the answer, and the form to read it in; None where it is text alone.

        Args:
            options: Those of the caller, by their names in ``AnswerKeywords``; a grammar of the caller's own
                says what the answer is.

        Raises:
            OptionError: The caller gives a grammar, and the prompt has one.
        """
        made, has_grammar = dict(options), options.get("grammar") is not None
        if self.grammar is not None:
            if has_grammar:
                raise OptionError("grammar and tools are both given.", fix="Leave out one.")
            made = {name: value for name, value in made.items() if not name.startswith("json_")}
            made["grammar"] = self.grammar
        if has_grammar or self.form.is_text:
            return made, None
        return {**made, "marks": tuple(self.form.marks.values())}, self.form


def chat_prompt(tokenizer: Tokenizer, request: ChatRequest, most_tokens: int) -> ChatPrompt:
    """Return the prompt of a chat.

    Raises:
        InputError: The template refuses or ignores a message, or a result has no call.
        OptionError: The template has no such variable.
        GrammarError: The schema of a tool cannot be followed.
        ContextError: The prompt is longer than ``most_tokens``.
        CheckpointError: The template is damaged.
    """
    support = support_of(tokenizer)
    dialogue: Dialogue = ordered(request.dialogue)
    most_calls = max((len(message.get("tool_calls") or ()) for message in dialogue), default=0)
    if most_calls:
        dialogue = (support.several if most_calls > 1 else support.single)(dialogue)
    reasoning = support.reasoning
    variables = _variables(support, request)
    for tool in request.tools:
        tool.held()  # before a template meets a schema that no answer can follow
    declared = [tool.declared() for tool in request.tools]
    if reasoning is CHANNELS:
        dialogue, declared = with_thinking(dialogue), [described(one) for one in declared]
    text = render(tokenizer, support.way, dialogue, declared, variables)
    opened = _opens(text, reasoning)
    calls = support.form if request.tools else None
    marks = _marks(tokenizer, calls, reasoning)
    rules = request.rules or CallRules(tools=(), final=request.final)
    grammar, ends = None, tokenizer.eos_ids
    if reasoning is CHANNELS:
        if calls is not None or rules.final is not None:
            grammar = channel_grammar(rules, marks=marks, end_ids=ends, opened=opened)
    # Without calls and reasoning a schema needs no grammar around it.
    elif rules.tools or (opened and rules.final) or (calls is not None and calls.begin and not rules.final):
        grammar = call_grammar(rules, calls or GENERIC, reasoning, marks=marks, end_ids=ends, opened=opened)
    own = calls if request.rules is not None else None
    form = ReplyForm(request.tools, own, reasoning, opened, marks, _words(tokenizer, marks))
    return ChatPrompt(tokenizer.encode_chat(text, most_tokens=most_tokens), form, grammar)


def can_reason(tokenizer: Tokenizer) -> bool:
    """Whether the chat template has reasoning."""
    return support_of(tokenizer).reasoning is not None


def reasoning_variables(tokenizer: Tokenizer, wanted: bool | str) -> dict[str, Any]:
    """Return the variables of the chat template that turn reasoning on or off; empty if it has none.

    Args:
        tokenizer: Knows the template.
        wanted: Whether to reason, or the effort.
    """
    support = support_of(tokenizer)
    if not wanted and support.reasoning is CHANNELS:
        wanted = "none"  # such a model always reasons, and has efforts alone
    made = {
        name: _effort(support, wanted) if name == "reasoning_effort" else bool(wanted) for name in EFFORTS
    }
    if isinstance(wanted, bool):
        del made["reasoning_effort"]
    return {name: value for name, value in made.items() if support.has_variable(name)}


def fault_of(tools: Sequence[Tool]) -> GrammarError | None:
    """Return the error of the first tool whose schema no answer can follow, with its name."""
    for tool in tools:
        guidance = {} if tool.strict else {"x-guidance": {"lenient": True}}
        try:
            check_structure(GenerationOptions(json_schema={**tool.held(), **guidance}))
        except GrammarError as error:
            return GrammarError(f"The tool {tool.name!r:.80}: {error.message}", fix=error.fix)
    return None


def _opens(prompt: str, reasoning: ReasoningForm | None) -> bool:
    """Whether a prompt ends in the opening of the reasoning."""
    return reasoning is not None and prompt.rstrip().endswith(reasoning.opens.rstrip())


def _words(tokenizer: Tokenizer, marks: Mapping[str, int]) -> frozenset[str]:
    return frozenset(name for name, index in marks.items() if index not in tokenizer.special_tokens)


def _marks(tokenizer: Tokenizer, calls: ToolForm | None, reasoning: ReasoningForm | None) -> dict[str, int]:
    """Return the tokens that occur in the forms."""
    if reasoning is CHANNELS:
        return {name: tokenizer.added_tokens[name] for name in sorted(HARMONY_MARKS)}
    texts = [] if reasoning is None else [reasoning.opens, reasoning.closes]
    if calls is not None:
        texts += [calls.begin, calls.opens, calls.call, calls.closes, calls.member, calls.values.quote]
        texts += calls.ends
    whole = "\0".join(texts)
    return {
        name: index
        for name, index in tokenizer.added_tokens.items()
        if len(name) > 2 and not name[0].isalnum() and not name.isspace() and name in whole
    }


def _variables(support: ToolSupport, request: ChatRequest) -> dict[str, Any]:
    """Return the variables of the template."""
    made: dict[str, Any] = {}
    for name, value in request.variables.items():
        if support.has_variable(name):
            made[name] = value
        elif value:
            raise OptionError(
                f"chat_template_kwargs has {name!r:.80}, but the chat template has no such variable.",
                fix="Leave it out.",
            )
    if request.effort is None:
        return made
    known = [name for name in EFFORTS if support.has_variable(name)]
    if not known and (request.effort != "none" or support.reasoning is not None):
        raise OptionError("reasoning_effort has no effect: the chat template has no variable for it.")
    for name in known:
        is_switch = name != "reasoning_effort"
        made.setdefault(name, request.effort != "none" if is_switch else _effort(support, request.effort))
    return made


def _effort(support: ToolSupport, wanted: bool | str) -> bool | str:
    """Return the effort as the model knows it."""
    return CHANNEL_EFFORTS.get(str(wanted), wanted) if support.reasoning is CHANNELS else wanted


def ordered(dialogue: Dialogue) -> list[dict[str, Any]]:
    """Return a dialogue whose results follow their calls in order, with names, and ids of nine characters.

    Raises:
        InputError: A result has no call.
    """
    made: list[dict[str, Any]] = []
    waiting: dict[str, dict[str, Any]] = {}
    results: dict[str, dict[str, Any]] = {}

    def place_results() -> None:
        made.extend(results[call_id] for call_id in waiting if call_id in results)
        results.clear()

    for number, message in enumerate(dialogue):
        if message["role"] != "tool":
            place_results()
            own = dict(message)
            if own.get("tool_calls"):
                waiting = {call["id"]: call for call in own["tool_calls"]}
                own["tool_calls"] = [{**call, "id": _short(call["id"], number)} for call in own["tool_calls"]]
                begin = number
            made.append(own)
            continue
        call_id = message.get("tool_call_id")
        if call_id is None:  # some clients rely on the order
            call_id = next((one for one in waiting if one not in results), None)
        if call_id not in waiting:
            raise InputError(f"The message {number} is a result, but no call before has its tool_call_id.")
        name = waiting[call_id]["function"]["name"]
        results[call_id] = {**message, "tool_call_id": _short(call_id, begin), "name": name}
    place_results()
    return made


def _short(call_id: str, place: int) -> str:
    """Return an id of nine letters and digits, the same at each turn: Mistral's templates refuse others."""
    if len(call_id) == ID_LENGTH and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(f"{place} {call_id}".encode()).hexdigest()[:ID_LENGTH]
