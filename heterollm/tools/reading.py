"""Reads an answer as it comes: its text, its reasoning, and its calls."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from heterollm.tools.forms import ReasoningForm, ToolForm
from heterollm.tools.literals import STRING, CutError, dumps, read_arguments
from heterollm.tools.schemas import Tool

ID_LETTERS: Final = string.ascii_letters + string.digits
ID_LENGTH: Final = 9
"""Mistral's templates take ids of nine letters and digits alone; all others take any."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call, or a piece of one.

    Args:
        index: Its number in the answer.
        call_id: Its id; empty in a piece that continues a call.
        name: The tool's name; empty as well.
        arguments: JSON text of an object, or the next piece of it.
    """

    index: int
    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class AnswerPart:
    """New pieces of an answer, in this order."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[ToolCall, ...] = ()


def joined(parts: Iterable[AnswerPart]) -> AnswerPart:
    """Return the whole of an answer's parts."""
    reasoning, content, calls = "", "", list[ToolCall]()
    for part in parts:
        reasoning += part.reasoning
        content += part.content
        for piece in part.calls:
            if piece.call_id:
                calls.append(piece)
            else:
                calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + piece.arguments)
    return AnswerPart(reasoning, content, tuple(calls))


def new_id() -> str:
    """Return the id of a call."""
    return "".join(secrets.choice(ID_LETTERS) for _ in range(ID_LENGTH))


@dataclass(frozen=True, slots=True)
class ReplyForm:
    """The forms of calls and reasoning in the answers to one request.

    Args:
        tools: The tools that it may call.
        calls: The form of calls; None if there are none.
        reasoning: The form of reasoning; None if there is none.
        opened: Whether answers begin in their reasoning.
        marks: Ids of tokens that are no text, by their spelling.
        words: Those that are text after all where they mark nothing.
    """

    tools: Sequence[Tool] = ()
    calls: ToolForm | None = None
    reasoning: ReasoningForm | None = None
    opened: bool = False
    marks: Mapping[str, int] = field(default_factory=dict)
    words: frozenset[str] = frozenset()

    @property
    def is_text(self) -> bool:
        """Whether answers are text alone."""
        return self.calls is None and self.reasoning is None


class AnswerReader:
    """Divides one answer; the text of its steps has no mark that is a token.

    White space around reasoning and calls belongs to neither, and is left out.

    Args:
        form: The forms of its parts.
    """

    def __init__(self, form: ReplyForm) -> None:
        self._form = form
        self._names = {index: name for name, index in form.marks.items()}
        self._in: Literal["text", "reasoning", "call"] = "reasoning" if form.opened else "text"
        self._held = self._space = self._rest_of_mark = ""
        self._strips = form.opened
        self._has_content = False
        self._searched = 0
        self._parts: list[AnswerPart] = []
        self._sent: list[int] = []
        self.reasoning_tokens = 0
        self.calls = 0

    def push(self, text: str, token_id: int) -> AnswerPart:
        """Take a step, and return the parts that are complete with it."""
        self.reasoning_tokens += self._in == "reasoning"
        self._held += text
        self._advance()
        if (name := self._names.get(token_id)) is not None:
            if self._in != "call":
                self._show(self._held)
                self._held = ""
            self._take_mark(name)
            self._advance()
        return self._taken()

    def finish(self) -> AnswerPart:
        """Return the parts that were held back."""
        if self._in == "call":
            self._add(read_group(self._held, self._form)[0])
            if self.calls or self._is_call():
                return self._taken()
            self._in = "text"
        self._show(self._held)
        if self._in == "text" and not self.calls:  # text alone keeps its last spaces
            self._parts.append(AnswerPart(content=self._space))
        return self._taken()

    def _taken(self) -> AnswerPart:
        parts, self._parts = self._parts, []
        return AnswerPart(
            "".join(part.reasoning for part in parts),
            "".join(part.content for part in parts),
            tuple(call for part in parts for call in part.calls),
        )

    def _advance(self) -> None:
        """Read the text that is held as far as possible."""
        while True:
            if self._in == "call":
                if not self._take_group():
                    return
                continue
            if self._rest_of_mark:
                if len(self._held) < len(self._rest_of_mark) and self._rest_of_mark.startswith(self._held):
                    return
                self._held, self._rest_of_mark = self._held.removeprefix(self._rest_of_mark), ""
            marks = self._spelled_marks()
            found = min(((place, one) for one in marks if (place := self._held.find(one)) >= 0), default=None)
            if found is None:
                kept = max((_overlap(self._held, one) for one in marks), default=0)
                cut = len(self._held) - kept
                self._show(self._held[:cut])
                self._held = self._held[cut:]
                return
            place, mark = found
            self._show(self._held[:place])
            self._held = self._held[place + len(mark) :]
            self._take_mark(mark)

    def _spelled_marks(self) -> list[str]:
        """Return the marks that may come next as text."""
        calls, reasoning = self._form.calls, self._form.reasoning
        marks = [calls.begin] if calls is not None and calls.begin else []
        if reasoning is not None:
            if self._in == "reasoning":
                marks.append(reasoning.closes)
            elif not self._has_content:
                marks.append(reasoning.opens)
        if calls is not None and not calls.begin and self._in == "text" and not self._has_content:
            # The first character of the answer decides.
            marks += ["{"] if (self._space + self._held).lstrip().startswith("{") else []
        return [mark for mark in marks if mark not in self._form.marks]

    def _take_mark(self, mark: str) -> None:
        calls, reasoning = self._form.calls, self._form.reasoning
        if self._in == "call":
            self._held += mark
        elif calls is not None and mark == (calls.begin or "{"):
            self._enter("call")
            self._held = mark + self._held
        elif reasoning is not None and self._in == "reasoning" and mark == reasoning.closes:
            self._enter("text")
        elif reasoning is not None and not self._has_content and reasoning.opens.startswith(mark):
            self._enter("reasoning")
            self._rest_of_mark = reasoning.opens[len(mark) :]
        elif mark in self._form.words:
            self._show(mark)

    def _enter(self, state: Literal["text", "reasoning", "call"]) -> None:
        self._in, self._space, self._strips, self._searched = state, "", True, 0

    def _show(self, text: str) -> None:
        """Add a piece of text or reasoning, whose last spaces wait for more."""
        text = self._space + text
        text = text.lstrip() if self._strips else text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if not shown:
            return
        self._strips = False
        if self._in == "text":
            self._has_content = True
            self._parts.append(AnswerPart(content=shown))
        else:
            self._parts.append(AnswerPart(reasoning=shown))

    def _take_group(self) -> bool:
        """Read a group of calls as far as it is there; return whether the answer continues behind it."""
        form = self._form.calls
        assert form is not None  # it began
        place = self._held.find(form.closes, max(0, self._searched - len(form.closes)))
        self._searched = len(self._held)
        if not form.streams and not (form.may_continue and place >= 0):
            return False
        calls, end = read_group(self._held, self._form)
        if form.streams:
            self._add(calls)
        # Without an end an argument has the mark as a text.
        if end is None or not form.may_continue:
            return False
        self._add(calls)
        rest, self._sent = self._held[end:], []
        self._enter("text")
        self._held = rest
        return True

    def _is_call(self) -> bool:
        """Whether the held text begins as a call; JSON may be an answer that has a schema of its own."""
        form = self._form.calls
        assert form is not None  # it began
        begin = form.opens + form.pieces()[0]
        return bool(form.begin) or self._held.startswith(begin) or begin.startswith(self._held)

    def _add(self, calls: Sequence[ToolCall]) -> None:
        """Add the pieces of a group's calls that are new."""
        pieces = []
        for number, call in enumerate(calls):
            if number == len(self._sent):
                self._sent.append(0)
                self.calls += 1
                pieces.append(
                    replace(call, index=self.calls - 1, call_id=call.call_id or new_id(), arguments="")
                )
            if rest := call.arguments[self._sent[number] :]:
                self._sent[number] += len(rest)
                pieces.append(ToolCall(self.calls - len(self._sent) + number, "", "", rest))
        self._parts.append(AnswerPart(calls=tuple(pieces)))


def read_group(text: str, form: ReplyForm) -> tuple[list[ToolCall], int | None]:
    """Return the calls of a group, and the place behind it; None if the text ends before.

    Args:
        text: Begins with the group.
        form: The form of its calls.
    """
    own = form.calls
    assert own is not None  # the text has calls
    pieces = own.pieces()
    calls: list[ToolCall] = []
    try:
        place = _behind(text, 0, own.opens)
        while True:
            place = _read_call(text, place, own, form.tools, calls)
            again = own.between or (pieces[0] if own.between == "" else None)
            if again is None or not text.startswith(again, place):
                return calls, _behind(text, place, own.closes)
            place += len(own.between or "")
    except CutError:
        return calls, None


def _read_call(text: str, place: int, form: ToolForm, tools: Sequence[Tool], calls: list[ToolCall]) -> int:
    """Add a call that begins at a place, with the beginning of its arguments if the text ends in them.

    Returns:
        The place behind it.
    """
    pieces = form.pieces()
    call_id, tool, arguments = "", None, ""
    for number, piece in enumerate(pieces):
        behind = pieces[number + 1] if number + 1 < len(pieces) else ""
        if piece == "{name}":
            fitting = (one for one in tools if text.startswith(one.name + behind, place))
            if (tool := next(fitting, None)) is None:
                raise CutError
            place += len(tool.name)
        elif piece == "{id}":
            end = text.find(behind, place)
            if end < 0:
                raise CutError
            call_id, place = text[place:end], end
        elif piece == "{arguments}":
            assert tool is not None  # all forms have the name first
            begin = place
            try:
                arguments, place = _arguments(text, place, form, tool)
            except CutError:
                if not form.member:
                    calls.append(ToolCall(len(calls), call_id, tool.name, text[begin:]))
                raise
        else:
            place = _behind(text, place, piece)
    assert tool is not None  # as above
    calls.append(ToolCall(len(calls), call_id, tool.name, arguments))
    return place


def _arguments(text: str, place: int, form: ToolForm, tool: Tool) -> tuple[str, int]:
    if form.member:
        value, end = read_arguments(text, place, form, tool.held())
        return dumps(value), end
    try:
        _, end = STRING.raw_decode(text, place)
    except json.JSONDecodeError as error:
        raise CutError from error
    return text[place:end], end


def _behind(text: str, place: int, piece: str) -> int:
    if not text.startswith(piece, place):
        raise CutError
    return place + len(piece)


def _overlap(text: str, mark: str) -> int:
    """Return the length of the beginning of a mark in which a text ends."""
    most = min(len(mark) - 1, len(text))
    return next((size for size in range(most, 0, -1) if mark.startswith(text[-size:])), 0)
