"""The chat template of a checkpoint, rendered in a child process under limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from heterollm.base import MIB, CheckpointError, InputError, LimitedChild, LimitError
from heterollm.text.rendering import render_whole
from heterollm.text.stream_decoder import FIX

TEMPLATES: Final = LimitedChild(
    "heterollm.text.template_child:render", cpu_s=5, memory_bytes=512 * MIB, answer_bytes=64 * MIB
)
"""Renders the chat templates of this process; those of published checkpoints take milliseconds in it."""


class ChatTemplate:
    """A checkpoint's chat template.

    Args:
        template: Its text, or several texts by name; None if there is none.
        special: Spelling of each special token by its name.
        folder: The checkpoint, for messages.
    """

    def __init__(
        self, template: str | Mapping[str, str] | None, special: Mapping[str, str], folder: Path
    ) -> None:
        self._template, self._special = template, special
        own = folder / "chat_template.jinja"
        self._file = own if own.is_file() else folder / "tokenizer_config.json"

    @property
    def exists(self) -> bool:
        """Whether the checkpoint has a template."""
        return self._template is not None

    def text(self, tools: object = None) -> str:
        """Return the template, of dialogues with tools if they have another; empty if there is none.

        Raises:
            CheckpointError: There are several, and none by default.
        """
        if isinstance(self._template, str | None):
            return self._template or ""
        name = "tool_use" if tools is not None and "tool_use" in self._template else "default"
        if name not in self._template:
            raise CheckpointError(
                f"The chat templates in {self._file} are {', '.join(self._template)}; none is the default.",
                fix=FIX,
            )
        return self._template[name]

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
                    "template": self.text(variables.get("tools")),
                    "variables": {**self._special, **variables, "messages": list(map(dict, messages))},
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
