"""The grammar that holds an answer's calls to the schemas of their tools, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from heterollm.base import GrammarError
from heterollm.text import WHITESPACE
from heterollm.tools.forms import ID, PLACES, ReasoningForm, ToolForm
from heterollm.tools.literals import member_parts, write_value
from heterollm.tools.schemas import ANNOTATIONS, Schema, Tool, is_text, resolved

ANY: Final = r"(.|\n)*"
WORD: Final = re.compile(r"[\w-]+")
METACHARACTER: Final = re.compile(r"[\\.+*?()|\[\]{}^$/]")
MOST_DEPTH: Final = 16
OBJECT: Final = {"type", "properties", "required", "additionalProperties"}
"""Keywords of a plain object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """The calls that an answer may and must have.

    Args:
        tools: Tools that it may call.
        required: Whether it calls one.
        parallel: Whether it may have several calls.
        final: JSON Schema of an answer without calls; None for any text.
    """

    tools: Sequence[Tool]
    required: bool = False
    parallel: bool = True
    final: Schema | None = None


def call_grammar(
    rules: CallRules,
    form: ToolForm,
    reasoning: ReasoningForm | None,
    *,
    marks: Mapping[str, int],
    end_ids: Collection[int],
    opened: bool,
) -> str:
    """Return the grammar of an answer.

    Args:
        rules: The calls.
        form: Their form.
        reasoning: The form of reasoning, which may come first.
        marks: Tokens of the checkpoint, by their spelling, that are no text.
        end_ids: Tokens that end an answer.
        opened: Whether the prompt ends in the opening of the reasoning.

    Raises:
        GrammarError: A schema has a part that no grammar of this form expresses.
    """
    return GrammarWriter(form, marks, end_ids).whole(rules, reasoning, opened=opened)


class GrammarWriter:
    """Writes rules; each has a name of its own.

    Args:
        form: The form of calls.
        marks: As for :func:`call_grammar`.
        end_ids: As well.
    """

    def __init__(self, form: ToolForm, marks: Mapping[str, int], end_ids: Collection[int]) -> None:
        self._form = form
        self._marks = marks
        self._end_ids = end_ids
        self._lines: list[str] = []
        self._strict = True
        names = sorted(marks, key=len, reverse=True)
        self._parts = re.compile("(" + "|".join(map(re.escape, names)) + ")") if names else None

    # -- the answer ----------------------------------------------------------------------------------

    def whole(self, rules: CallRules, reasoning: ReasoningForm | None, *, opened: bool) -> str:
        """Return the whole grammar."""
        think = self._think(reasoning, opened=opened)
        final = "" if rules.final is None else self._json(rules.final, rules.final)
        if final and not rules.tools:
            return self._text(think + final)
        if rules.required or final:
            groups = f"{self._groups(rules)}{self._end()}"
            return self._text(f"{think}({groups}{f' | {final}' if final and not rules.required else ''})")
        if self._form.begin in self._marks:
            return self._text(self._with_tokens(rules))
        return self._text(think + self._with_texts(rules))

    def _groups(self, rules: CallRules) -> str:
        """Return calls without text."""
        group = self._calls(rules.tools, many=rules.parallel)
        if not self._continues(rules):
            return group
        return f"{group} ({self._literal(self._form.repeat or '')} {group})*"

    def _continues(self, rules: CallRules) -> bool:
        return rules.parallel and self._form.repeat is not None

    def _with_tokens(self, rules: CallRules) -> str:
        """Return text and calls whose mark is a token; text is any other token, reasoning too."""
        free = self._free()
        if not rules.tools:
            return free
        group = self._calls(rules.tools, many=rules.parallel)
        if self._continues(rules):
            return f"{free} ({group} {free})*{self._end()}"
        tail = f" {free}" if rules.parallel and self._form.tail else ""
        return f"{free} ({group}{self._end()}{tail})?"

    def _with_texts(self, rules: CallRules) -> str:
        """Return text and calls whose mark is a text, or that are the whole answer."""
        free, begin = self._free(), self._form.begin
        if not rules.tools:
            return free
        # A lazy rule ends with its mark, so that the call lacks it.
        lead = f"{self._rule(f'/{ANY}{_regex(begin)}/', lazy=True)} " if begin else ""
        group = self._calls(rules.tools, many=rules.parallel, led=bool(begin))
        if self._continues(rules):
            return f"({lead}{group})* {free}{self._end()}"
        tail = f" {free}" if rules.parallel and self._form.tail else ""
        return f"({free} | {lead}{group}{self._end()}{tail})"

    def _text(self, start: str) -> str:
        return "\n".join((f"start: {start}", *self._lines, ""))

    def _free(self) -> str:
        """Return the rule of text without a call."""
        begin = self._form.begin
        if begin in self._marks:
            return self._rule(f"{self._other_than(begin, *self._form.ends)}*")
        return self._terminal(_without(f"/{ANY}/", begin) if begin else r"/\s*([^\s{](.|\n)*)?/")

    def _end(self) -> str:
        ends = [f"<[{self._marks[name]}]>" for name in self._form.ends if name in self._marks]
        return f" ({' | '.join(ends)})?" if ends else ""

    def _think(self, form: ReasoningForm | None, *, opened: bool) -> str:
        if form is None:
            return ""
        if form.closes in self._marks:
            body = f"{self._other_than(form.closes, self._form.begin)}* {self._literal(form.closes)}"
        else:
            ended, begin = f"/{ANY}{_regex(form.closes)}/", self._form.begin
            body = self._rule(self._terminal(_without(ended, begin) if begin else ended), lazy=True)
        body = f"{body} (/[ \\n]{{1,4}}/)?"
        return f"{body} " if opened else f"({self._literal(form.opens)} {body})? "

    def _other_than(self, *names: str) -> str:
        """Return any token but marks and those that end an answer."""
        ids = {self._marks[name] for name in names if name in self._marks} | set(self._end_ids)
        return f"<[^{','.join(map(str, sorted(ids)))}]>"

    # -- calls ---------------------------------------------------------------------------------------

    def _calls(self, tools: Sequence[Tool], *, many: bool, led: bool = False) -> str:
        """Return the rule of a group of calls; the first one lacks the mark if a rule before it has it."""
        form = self._form
        arguments = [self._arguments(tool) for tool in tools]
        begin = len(form.begin) if led else 0
        own = begin if form.opens else 0
        first = self._one_of(tools, arguments, begin - own)
        opens = self._literal(form.opens[own:])
        group = f"{opens} {first}"
        if many and form.between is not None:
            another = first if begin == own else self._one_of(tools, arguments, 0)
            group += f" ({self._literal(form.between)} {another})*"
        return self._rule(f"{group} {self._literal(form.closes)}")

    def _one_of(self, tools: Sequence[Tool], arguments: Sequence[str], skipped: int) -> str:
        """Return the rule of a call without the first characters of its form."""
        alternatives = []
        for tool, own in zip(tools, arguments, strict=True):
            made, text = [], ""
            for part in PLACES.split(self._form.call[skipped:]):
                if part in ("{id}", "{arguments}"):
                    made += [self._literal(text), own if part == "{arguments}" else f"/{ID}/"]
                    text = ""
                else:
                    text += tool.name if part == "{name}" else part
            alternatives.append(self._rule(" ".join((*made, self._literal(text)))))
        return self._rule(" | ".join(alternatives))

    def _arguments(self, tool: Tool) -> str:
        try:
            return self._arguments_of(tool)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise GrammarError(f"The parameters of {tool.name!r:.80} are no JSON Schema.") from error

    def _arguments_of(self, tool: Tool) -> str:
        root = schema = tool.held()
        self._strict = tool.strict
        if not self._form.member:
            return self._json(schema, root)
        known = resolved(schema, schema)
        keys, needed = known.get("properties", {}), known.get("required", [])
        if set(known) - ANNOTATIONS - OBJECT or not set(needed) <= set(keys):
            raise GrammarError(
                f"The parameters of {tool.name!r:.80} are no plain object, which calls of this model are.",
                fix="Put `anyOf` and others into its properties.",
            )
        before, between, after = member_parts(self._form)
        members = []
        for key, one in keys.items():
            label = f"{before}{key}{between}"
            if self._form.values.quote:
                value = f"{self._literal(label)} {self._value(one, root)} {self._literal(after)}"
            else:
                value = f"{self._literal(label)} {self._tagged(one, root, after)}"
            members.append((value, key in needed))
        return self._rule(self._sequence(members, self._form.joint))

    def _sequence(self, members: Sequence[tuple[str, bool]], joint: str) -> str:
        """Return the rule of members in order, of which some may be missing, with a text between them."""
        if not members:
            return '""'
        if not joint:
            return " ".join(value if needed else f"({value})?" for value, needed in members)
        between, rest, heads = self._literal(joint), '""', '""'
        for value, needed in reversed(members):
            head = self._rule(f"{value} {rest}")
            own = self._rule(f"{between} {value} {rest}")
            heads = head if needed else self._rule(f"{head} | {heads}")
            rest = own if needed else self._rule(f"{own} | {rest}")
        return heads

    # -- values --------------------------------------------------------------------------------------

    def _value(self, schema: Any, root: Schema, depth: int = 0) -> str:  # noqa: ANN401 - JSON
        """Return the rule of a value in the form of the family, or in JSON where that says more."""
        schema = resolved(schema, root)
        values = self._form.values
        if not isinstance(schema, Mapping) or depth > MOST_DEPTH:
            return self._json(schema, root)
        own = {name: one for name, one in schema.items() if name not in ANNOTATIONS}
        kind = own.get("type")
        if "enum" in own or "const" in own:
            allowed = own.get("enum", [own.get("const")])
            if set(own) <= {"type", "enum", "const"} and isinstance(allowed, list) and allowed:
                return self._rule(" | ".join(self._literal(write_value(one, values)) for one in allowed))
        elif own.keys() == {"anyOf"} and isinstance(own["anyOf"], list) and own["anyOf"]:
            return self._rule(" | ".join(self._value(one, root, depth + 1) for one in own["anyOf"]))
        elif own == {"type": "string"}:
            return self._string()
        elif own == {"type": "boolean"}:
            return self._rule(" | ".join(self._literal(word) for word in values.words[:2]))
        elif own == {"type": "null"}:
            return self._literal(values.words[2])
        elif kind == "array" and own.keys() == {"type", "items"}:
            item, joint = self._value(own["items"], root, depth + 1), '"," (/ /)?'
            return self._rule(f'"[" ({item} ({joint} {item})*)? "]"')
        elif kind == "object" and own.get("additionalProperties") is False:
            names = own.get("properties", {})
            plain = own.keys() <= OBJECT and set(own.get("required", [])) <= set(names)
            if plain and all(WORD.fullmatch(name) for name in names):
                return self._object(own, root, depth)
        return self._json(schema, root)

    def _object(self, schema: Schema, root: Schema, depth: int) -> str:
        values, members = self._form.values, []
        for name, one in schema.get("properties", {}).items():
            label = f"{name}:" if values.bare_keys else f"{write_value(name, values)}: "
            value = f"{self._literal(label)} {self._value(one, root, depth + 1)}"
            members.append((value, name in schema.get("required", ())))
        inner = self._sequence(members, "," if values.bare_keys else ", ")
        return self._rule(f'"{{" {inner} "}}"')

    def _string(self) -> str:
        """Return the rule of any text in quotes."""
        quote = self._form.values.quote
        if quote == "'":
            single = r"/'([^'\\\x00-\x1f]|\\['\\nrt])*'/"
            return self._rule(f"{single} | {self._json({'type': 'string'}, {})}")
        if quote in self._marks:
            text = self._terminal(_without(f"/{ANY}/", quote))
            return self._rule(f"{self._literal(quote)} {text} {self._literal(quote)}")
        lazy = self._rule(f"/{ANY}{_regex(quote)}/", lazy=True)
        return self._rule(f"{self._literal(quote)} {lazy}")

    def _tagged(self, schema: Any, root: Schema, after: str) -> str:  # noqa: ANN401 - JSON
        """Return the rule of a value and of the text behind it: texts as they stand, others in JSON."""
        if not is_text(schema, root):
            return f"{self._json(schema, root)} {self._literal(after)}"
        value = _text_terminal(schema, root)
        if isinstance(value, list):
            return self._rule(" | ".join(self._literal(one + after) for one in value))
        cut = min((place for name in self._marks if (place := after.find(name)) >= 0), default=len(after))
        if cut < len(after):
            text = self._terminal(_without(f"({value} {self._literal(after[:cut])})", after))
            return f"{text} {self._literal(after[cut:])}"
        # The text ends where it has its end for the first time.
        ended = f"({value} {self._literal(after)}) & ~/{ANY}{_regex(after)}(.|\\n)+/"
        return self._rule(self._terminal(ended), lazy=True)

    # -- parts ---------------------------------------------------------------------------------------

    def _rule(self, body: str, *, lazy: bool = False) -> str:
        name = f"r{len(self._lines)}"
        self._lines.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _terminal(self, body: str) -> str:
        name = f"T{len(self._lines)}"
        self._lines.append(f"{name}: {body}")
        return name

    def _json(self, schema: Any, root: Schema) -> str:  # noqa: ANN401 - JSON
        """Return the rule of JSON that follows a schema, with the definitions of its root."""
        if not isinstance(schema, Mapping):
            schema = {} if schema is True else {"not": {}}
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        guidance = {"whitespace_pattern": WHITESPACE, "lenient": not self._strict}
        return self._rule(f"%json {json.dumps({**definitions, **schema, 'x-guidance': guidance})}")

    def _literal(self, text: str) -> str:
        """Return a text, with the ids of tokens that are none."""
        parts = [text] if self._parts is None else self._parts.split(text)
        made = [
            f"<[{self._marks[part]}]>" if part in self._marks else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        ]
        return " ".join(made) or '""'


def _regex(text: str) -> str:
    """Return a text as a part of a regular expression between slashes."""
    return METACHARACTER.sub(r"\\\g<0>", text).replace("\n", "\\n")


def _without(terminal: str, text: str) -> str:
    return f"{terminal} & ~/{ANY}{_regex(text)}{ANY}/"


def _text_terminal(schema: Any, root: Schema) -> str | list[str]:  # noqa: ANN401 - JSON
    """Return the texts that a schema allows, as a list or as a terminal."""
    schema = resolved(schema, root)
    if "enum" in schema or "const" in schema:
        return ["null" if one is None else one for one in schema.get("enum", [schema.get("const")])]
    if "anyOf" in schema:
        parts = [_text_terminal(one, root) for one in schema["anyOf"]]
        if all(isinstance(one, list) for one in parts):
            return [text for one in parts for text in one]
        return "(" + " | ".join(one if isinstance(one, str) else _choices(one) for one in parts) + ")"
    if schema.get("type") == "null":
        return ["null"]
    low, high = schema.get("minLength", 0), schema.get("maxLength", "")
    terminal = f"/(.|\\n){{{low},{high}}}/" if low or high != "" else f"/{ANY}/"
    if (pattern := schema.get("pattern")) is not None:
        terminal += f" & /{_whole(pattern)}/"
    return terminal


def _choices(texts: Sequence[str]) -> str:
    return "/" + "|".join(map(_regex, texts)) + "/"


def _whole(pattern: str) -> str:
    """Return a pattern, which may match in the middle, as one of whole texts."""
    inner = pattern.removeprefix("^")
    begin = "" if inner != pattern else ANY
    if inner.endswith("$") and not inner.endswith("\\$"):
        inner, end = inner[:-1], ""
    else:
        end = ANY
    if re.search(r"(?<!\\)[|^$]", re.sub(r"\[[^]]*\]|\([^()]*\)", "", inner)):
        raise GrammarError(
            f"The pattern {pattern!r:.80} has alternatives or anchors inside.", fix="Use anyOf."
        )
    return f"{begin}({inner}){end}".replace("/", "\\/")
