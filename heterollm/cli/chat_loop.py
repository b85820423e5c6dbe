"""The dialogue on a terminal or a pipe: lines in, answers out."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

from heterollm.base import HeteroLLMError, InputError, write
from heterollm.cli.answers import AnswerWriter
from heterollm.cli.line_input import line_reader
from heterollm.report import console as report
from heterollm.text import Conversation, load_dialogue, save_dialogue

if TYPE_CHECKING:
    from heterollm.cli.options import TokenOptions
    from heterollm.llm import LLM
    from heterollm.text import GenerationResult

COMMANDS: Final = {
    "/help": "show this list",
    "/system": "show the instructions; /system TEXT replaces them, /system - removes them",
    "/regen": "answer the last message again",
    "/reset": "forget the dialogue; the instructions stay",
    "/save": "/save FILE writes the dialogue",
    "/load": "/load FILE goes on with a dialogue that was saved",
    "/stats": "show tokens, times and the device",
    "/exit": "end, as Ctrl-D does; Ctrl-C stops an answer",
}
HINT: Final = "/help lists the commands, /exit or Ctrl-D ends, Ctrl-C stops an answer."


class ChatLoop:
    """One dialogue with a loaded model, in one session.

    Args:
        llm: The model.
        system: Instructions before the first message.
        max_new_tokens: Most tokens of an answer.
        choice: How tokens are chosen.
    """

    def __init__(self, llm: LLM, *, system: str | None, max_new_tokens: int, choice: TokenOptions) -> None:
        self._llm = llm
        self._max_new_tokens = max_new_tokens
        self._choice = choice
        self._session = llm.session()
        self._conversation = Conversation(llm.tokenizer, system)
        self._interactive = sys.stdin.isatty()
        self._failures = 0
        self._again = 0
        self._last: GenerationResult | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: report.show(report.pairs_table(COMMANDS.items())),
            "/system": self._instruct,
            "/regen": lambda _: self._regenerate(),
            "/reset": lambda _: self._forget(),
            "/save": self._save,
            "/load": self._load,
            "/stats": lambda _: self._show_statistics(),
        }

    def run(self) -> None:
        """Answer line by line until the input ends or ``/exit``."""
        if self._interactive:
            _note(HINT)
            if not self._llm.tokenizer.has_chat_template:
                _note("The model brings no chat template; a plain form is used.")
        read = line_reader(tuple(COMMANDS), _note)
        while (line := self._read(read)) is not None:
            text = line.strip()
            name, _, rest = text.partition(" ")
            if name == "/exit":
                return
            try:
                if name in self._commands:
                    self._commands[name](rest.strip())
                elif text.startswith("/"):
                    _note(f"There is no {name}: {HINT}")
                elif text:
                    self._answer(text)
            except HeteroLLMError as error:
                # A dialogue that became too long, or a wrong file name, must not end the program.
                report.show(report.error_line(error))

    def _read(self, read: Callable[[], str]) -> str | None:
        """Return the next line, or None at the end of the input; Ctrl-C drops the line begun."""
        while True:
            try:
                return read()
            except EOFError:
                if self._interactive:
                    write("\n")
                return None
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                write("\n")

    def _answer(self, text: str | None) -> None:
        """Answer a message; None for the last one of the dialogue."""
        before = self._conversation.messages
        if text is not None:
            self._conversation.add_user(text)
            self._again = 0
        try:
            result, content = self._stream()
        except HeteroLLMError:
            # A message that the model refuses would make it refuse every later one.
            self._conversation.restore(before)
            raise
        write("\n")
        self._last = result
        if not result.generated_tokens and result.stop_reason == "cancelled":
            self._conversation.restore(before)
            _note("Nothing was answered, so the message is forgotten.")
            return
        self._conversation.add_assistant(content)
        for failure in self._llm.failures[self._failures :]:
            _note(failure)
        self._failures = len(self._llm.failures)
        if result.stop_reason == "context":
            _note(f"The context of {self._llm.context} tokens ended the answer.")
        elif self._interactive:
            rate = result.decode_tokens_per_s
            speed = "" if rate is None else f", {rate:.1f} tokens/s"
            if result.speculation is not None and result.speculation.passes:
                speed += f", {result.speculation.tokens_per_pass:.2f} a pass"
            _note(f"{result.generated_tokens} tokens{speed}, ended by {result.stop_reason}")

    def _stream(self) -> tuple[GenerationResult, str]:
        """Write the answer to the dialogue as it is made; Ctrl-C stops it.

        Returns:
            The result, and the text of the answer without its reasoning.
        """
        context = self._llm.context
        limit = context - min(self._max_new_tokens, context // 4)
        dropped = self._conversation.fit(limit, limit - context // 4)
        if dropped:
            turns = "its oldest turn" if dropped == 1 else f"its oldest {dropped} turns"
            _note(f"The dialogue lost {turns}: the context of {context} tokens is full.")
        choice = asdict(self._choice)
        if choice["seed"] is not None:
            choice["seed"] += self._again
        waiting = report.Waiting("Reading the dialogue")
        writer = AnswerWriter()
        stream = self._llm.stream_chat(
            self._conversation.messages,
            session=self._session,
            max_new_tokens=self._max_new_tokens,
            progress=waiting.progress,
            **choice,
        )
        try:
            try:
                for step in waiting.until_first(stream):
                    writer.add(step)
            except KeyboardInterrupt:
                stream.close()
            return stream.result, writer.text
        finally:
            stream.close()

    # -- commands ------------------------------------------------------------------------------------

    def _instruct(self, text: str) -> None:
        if text:
            self._conversation.system = None if text == "-" else text
        now = self._conversation.system
        _note("There are no instructions." if now is None else f"Instructions: {now}")

    def _regenerate(self) -> None:
        before = self._conversation.messages
        if not self._conversation.drop_answer():
            raise InputError("There is no message to answer again.")
        if self._choice.temperature == 0:
            _note("At temperature 0 the answer is the same; --temperature changes that.")
        self._again += 1
        try:
            self._answer(None)
        except HeteroLLMError:
            self._conversation.restore(before)
            raise

    def _forget(self) -> None:
        self._conversation.reset()
        self._session.reset()
        _note("The dialogue is forgotten.")

    def _save(self, name: str) -> None:
        path = _file(name, "/save")
        save_dialogue(path, self._conversation.messages)
        _note(f"Wrote {len(self._conversation.messages)} messages to {path}.")

    def _load(self, name: str) -> None:
        path = _file(name, "/load")
        self._conversation.restore(load_dialogue(path))
        _note(f"Read {len(self._conversation.messages)} messages from {path}.")

    def _show_statistics(self) -> None:
        turns = sum(message["role"] == "user" for message in self._conversation.messages)
        held = f"{self._session.position} of {self._llm.context} tokens of the context"
        _note(f"{turns} {'turn' if turns == 1 else 'turns'}, {held}")
        if self._last is not None:
            _note("The last answer:")
            report.show(report.statistics_lines(self._last, self._llm.device, self._llm.plan))


def _note(text: str) -> None:
    report.show(report.note(text))


def _file(name: str, command: str) -> Path:
    if not name:
        raise InputError(f"{command} has no file name.", fix=f"Type {command} FILE.")
    return Path(name).expanduser()
