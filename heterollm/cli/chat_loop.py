"""The dialogue on a terminal or a pipe: lines in, answers out."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from heterollm.base import HeteroLLMError, write
from heterollm.report import console as report
from heterollm.text import Conversation

if TYPE_CHECKING:
    from heterollm.cli.options import TokenOptions
    from heterollm.llm import LLM
    from heterollm.text import Message

__all__ = ["ChatLoop"]

HELP: Final = "/reset forgets the dialogue, /exit or Ctrl-D ends, Ctrl-C stops an answer."


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

    def run(self) -> None:
        """Answer line by line until the input ends or ``/exit``."""
        if self._interactive:
            report.show(report.note(HELP))
            if not self._llm.tokenizer.has_chat_template:
                report.show(report.note("The model brings no chat template; a plain form is used."))
        while (line := self._read()) is not None:
            text = line.strip()
            if text == "/exit":
                return
            if text == "/reset":
                self._conversation.reset()
                self._session.reset()
                report.show(report.note("The dialogue is forgotten."))
            elif text.startswith("/"):
                report.show(report.note(f"There is no {text.split()[0]}: {HELP}"))
            elif text:
                self._answer(text)

    def _read(self) -> str | None:
        """Return the next line, or None at the end of the input; Ctrl-C drops the line begun."""
        while True:
            try:
                return input("> " if self._interactive and sys.stdout.isatty() else "")
            except EOFError:
                if self._interactive:
                    write("\n")
                return None
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                write("\n")

    def _answer(self, text: str) -> None:
        before = self._conversation.messages
        self._conversation.add_user(text)
        stream = None
        try:
            stream = self._llm.stream(
                self._conversation.prompt_ids(),
                session=self._session,
                stop=self._llm.tokenizer.chat_stop_strings,
                max_new_tokens=self._max_new_tokens,
                **asdict(self._choice),
            )
            try:
                for step in stream:
                    write(step.text)
            except KeyboardInterrupt:
                stream.close()
            result = stream.result
        except HeteroLLMError as error:
            # A dialogue that became too long must not end the program.
            report.show(report.error_panel(error))
            report.show(report.note(HELP))
            self._take_back(before)
            return
        finally:
            if stream is not None:
                stream.close()
        write("\n")
        self._conversation.add_assistant(result.text)
        for failure in self._llm.failures[self._failures :]:
            report.show(report.note(failure))
        self._failures = len(self._llm.failures)
        if result.stop_reason == "context":
            report.show(report.note(f"The context of {self._llm.context} tokens is full. {HELP}"))
        elif self._interactive:
            rate = result.decode_tokens_per_s
            speed = "" if rate is None else f", {rate:.1f} tokens/s"
            if result.speculation is not None and result.speculation.passes:
                speed += f", {result.speculation.tokens_per_pass:.2f} a pass"
            report.show(
                report.note(f"{result.generated_tokens} tokens{speed}, ended by {result.stop_reason}")
            )

    def _take_back(self, messages: tuple[Message, ...]) -> None:
        """Return to an earlier state of the dialogue."""
        self._conversation.reset()
        for message in messages:
            if message["role"] == "user":
                self._conversation.add_user(message["content"])
            elif message["role"] == "assistant":
                self._conversation.add_assistant(message["content"])
