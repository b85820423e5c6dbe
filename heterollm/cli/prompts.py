"""The prompts of ``generate``: words, files, stdin, and files of many prompts."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer

from heterollm.base import LARGEST_TEXT_BYTES, HeteroLLMError, InputError, check_stdin, parse_json, read_text

if TYPE_CHECKING:
    from heterollm.text import Message

JSON_LINES: Final = (".jsonl", ".ndjson")
FIELDS: Final = frozenset({"id", "prompt", "system", "messages"})


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text to continue, a message to answer, or a dialogue.

    Args:
        text: The text; of a dialogue, the last message.
        messages: The dialogue, rendered with the chat template; none for a text.
        key: The value of ``id`` in a JSON line.
    """

    text: str
    messages: tuple[Message, ...] = ()
    key: Any = None

    @classmethod
    def of(cls, text: object, system: object = None, key: object = None) -> Prompt:
        """Return the prompt of a text, with the instructions of a dialogue if there are any.

        Args:
            text: The text.
            system: Instructions before it; empty ones give a dialogue without; None gives no dialogue.
            key: A name of the prompt.

        Raises:
            InputError: The text is empty, or one of them is no text.
        """
        if not isinstance(text, str):
            raise InputError(f"The prompt is {text!r:.80}, not text.")
        if not isinstance(system, str | None):
            raise InputError(f"The instructions are {system!r:.80}, not text.")
        if not text:
            raise InputError("The prompt is empty.", fix="Give at least one word.")
        if system is None:
            return cls(text, (), key)
        instructions = [{"role": "system", "content": system}] if system else []
        return cls(text, (*instructions, {"role": "user", "content": text}), key)

    def in_template(self) -> Prompt:
        """Return the prompt as a message, for a model that has a chat template; a dialogue is one already."""
        return self if self.messages else replace(self, messages=({"role": "user", "content": self.text},))


def in_template(
    lines: Sequence[tuple[int, Prompt | HeteroLLMError]],
) -> list[tuple[int, Prompt | HeteroLLMError]]:
    """Return numbered prompts as messages; errors stay."""
    return [(number, one.in_template() if isinstance(one, Prompt) else one) for number, one in lines]


def single_prompt(words: str | None, files: Sequence[Path], system: str | None) -> Prompt:
    """Return the prompt of one answer: words, then files, with a blank line between; stdin without either.

    Raises:
        BadParameter: There is neither, and stdin is a terminal or empty.
        InputError: A file or stdin cannot be read, or there is no text.
    """
    if words is None and not files:
        text = "" if sys.stdin is None or sys.stdin.isatty() else _stdin()
        if not text:
            raise typer.BadParameter(
                "The prompt is missing: give it, or --file or --prompts, or pipe text into the command."
            )
        return Prompt.of(text, system)
    parts = [] if words is None else [_stdin() if words == "-" else words]
    parts += [_stdin() if str(path) == "-" else read_text(path).removesuffix("\n") for path in files]
    return Prompt.of("\n\n".join(part for part in parts if part), system)


def prompt_lines(path: Path, system: str | None) -> Iterator[tuple[int, Prompt | HeteroLLMError]]:
    """Yield the number and the prompt, or its error, of each line that is not blank.

    Args:
        path: A file with one prompt a line, or with JSON lines if its name says so; - is stdin.
        system: Instructions of prompts without their own.

    Raises:
        InputError: The file cannot be read.
    """
    text = _stdin() if str(path) == "-" else read_text(path)
    for number, line in enumerate(text.split("\n"), 1):
        line = line.removesuffix("\r")
        if line.strip():
            try:
                found = _json_prompt(line, system) if path.suffix in JSON_LINES else Prompt.of(line, system)
                yield number, found
            except HeteroLLMError as error:
                yield number, error


def _stdin() -> str:
    """Return all of stdin without the newline that `echo` and editors put at its end."""
    check_stdin()
    try:
        text = sys.stdin.read(LARGEST_TEXT_BYTES + 1)
        if len(text) > LARGEST_TEXT_BYTES:
            raise InputError("stdin has no end.", fix="Pipe a text into the command.")
        return text.removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"stdin cannot be read: {error}.") from error


def _json_prompt(line: str, system: str | None) -> Prompt:
    """Return the prompt of a JSON line.

    Raises:
        InputError: The line is no such object.
    """
    try:
        fields = parse_json(line)
    except ValueError as error:
        raise InputError(f"The line is not JSON: {error}.") from error
    given = set(fields) if isinstance(fields, dict) else set()
    if len(given & {"prompt", "messages"}) != 1 or not given <= FIELDS or {"messages", "system"} <= given:
        raise InputError(
            f"The line has {json.dumps(sorted(given))}.",
            fix='Give "prompt" and perhaps "system", or "messages"; "id" may name the line.',
        )
    key = fields.get("id")
    if "prompt" in fields:
        return Prompt.of(fields["prompt"], fields.get("system", system), key)
    messages = fields["messages"]
    sound = isinstance(messages, list) and all(
        isinstance(message, dict)
        and set(message) == {"role", "content"}
        and all(isinstance(text, str) for text in message.values())
        for message in messages
    )
    if not sound or not messages:
        raise InputError('"messages" is no dialogue.', fix="Give objects of two texts, role and content.")
    return Prompt(messages[-1]["content"], tuple(messages), key)
