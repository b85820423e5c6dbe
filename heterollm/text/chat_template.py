"""The chat template of a checkpoint, rendered in a child process under limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from heterollm.base import MIB, CheckpointError, InputError, LimitedChild, LimitError
from heterollm.text.rendering import render_whole
from heterollm.text.stream_decoder import FIX

TEMPLATES: Final = LimitedChild(
    "heterollm.text.template_child:render", cpu_s=5, memory_bytes=512 * MIB, answer_bytes=64 * MIB
)
"""Renders the chat templates of this process; those of published checkpoints take milliseconds in it."""


class TemplateSource(Protocol):
    """The part of transformers' tokenizers that has a template; the library has no types."""

    chat_template: str | dict[str, str] | None

    @property
    def special_tokens_map(self) -> dict[str, Any]:
        """Variables of the template."""

    def get_chat_template(self, *, tools: object = None) -> str:
        """Return the template for dialogues with these tools."""


class ChatTemplate:
    """A checkpoint's chat template.

    Args:
        source: Has its text.
        folder: The checkpoint, for messages.
    """

    def __init__(self, source: TemplateSource, folder: Path) -> None:
        self._source = source
        own = folder / "chat_template.jinja"
        self._file = own if own.is_file() else folder / "tokenizer_config.json"

    def text(self, tools: object = None) -> str:
        """Return the template, of dialogues with tools if they have another.

        Raises:
            CheckpointError: There are several, and none by default.
        """
        try:
            return self._source.get_chat_template(tools=tools)
        except ValueError as error:
            raise CheckpointError(f"The chat template in {self._file} fails: {error}.", fix=FIX) from error

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Return the text of a dialogue.

        Raises:
            InputError: The template refuses or ignores a message.
            CheckpointError: It is damaged.
        """
        return render_whole(lambda some: self._render(some, variables), messages)

    def _render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        try:
            reply = TEMPLATES.ask(
                {
                    **self._source.special_tokens_map,
                    **variables,
                    "conversations": [[dict(message) for message in messages]],
                    "chat_template": self.text(variables.get("tools")),
                }
            )
        except LimitError as error:
            raise CheckpointError(f"The chat template in {self._file} {error.message}.", fix=FIX) from error
        if "damaged" in reply:
            raise CheckpointError(
                f"The chat template in {self._file} is damaged: {reply['damaged']}.", fix=FIX
            )
        if "refused" in reply:
            raise InputError(f"The chat template refuses these messages: {reply['refused']}.")
        if "failed" in reply:
            raise CheckpointError(f"The chat template in {self._file} fails: {reply['failed']}.", fix=FIX)
        text: str = reply["text"]
        return text
