"""Renders a dialogue so that no message is lost in silence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from heterollm.base import InputError

Messages: TypeAlias = Sequence[Mapping[str, Any]]

NEEDLE: Final = "zq8Kx2vW"
"""A text that no template writes by itself."""

SPLIT: Final = "\ufdd0"
"""Divides a text that spells a token without being one; Unicode gives this number to no character."""

SHAPE: Final = re.compile(r"<[^<>\s]{1,80}>|\[/?\w{1,40}\]")
"""The shape of most control tokens."""

FOREIGN: Final = ("user", "tool")
"""Roles whose texts are others' than the model's and its operator's."""


def render_whole(render: Callable[[Messages], str], messages: Messages) -> str:
    """Return the text of a dialogue, in which a template has left out no message but the assistant's.

    Templates of models with pictures go through the parts of a content, and write nothing of a plain text;
    they get the text as a part. A template may change a text, as SmolLM3's takes ``/no_think`` out, and cut
    earlier answers, as those of reasoning models do.

    Args:
        render: Renders messages with the template.
        messages: Role and content of each, oldest first.

    Raises:
        InputError: The template ignores a role.
    """
    text = render(messages)
    roles = sorted({message["role"] for message in messages} - {"assistant"})
    lost = [role for role in roles if _is_lost(text, messages, role)]
    ignored = [role for role in lost if _ignores(render, messages, role)]
    if "user" in ignored:
        messages = [{**message, "content": _parts(message["content"])} for message in messages]
        text = render(messages)
        ignored = [role for role in roles if _ignores(render, messages, role)]
    if ignored:
        raise InputError(
            f"The chat template ignores messages of the role {ignored[0]}.",
            fix="Put their text into a message of the user, or use another template.",
        )
    return text


class ControlTokens:
    """The tokens by which a template divides a dialogue: no text of users and tools may spell one.

    Args:
        names: Their spellings.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = frozenset(names)
        others = sorted((one for one in self._names if not SHAPE.fullmatch(one)), key=len, reverse=True)
        # A vocabulary may have thousands: a search for each would take a client's long text far too long.
        self._pattern = re.compile("|".join((SHAPE.pattern, *map(re.escape, others))))

    def guard(self, messages: Messages) -> list[Mapping[str, Any]]:
        """Return messages in which :data:`SPLIT` divides each spelling of users and tools."""
        return [
            {**message, "content": self.divide(message["content"])} if message["role"] in FOREIGN else message
            for message in messages
        ]

    def divide(self, text: str) -> str:
        """Return a text in which :data:`SPLIT` divides each spelling."""

        def divided(found: re.Match[str]) -> str:
            name = found[0]
            return f"{name[0]}{SPLIT}{name[1:]}" if name in self._names else name

        return self._pattern.sub(divided, text.replace(SPLIT, ""))


def _is_lost(text: str, messages: Messages, role: str) -> bool:
    contents = (message["content"] for message in messages if message["role"] == role)
    return any(content.strip() not in text for content in contents)


def _ignores(render: Callable[[Messages], str], messages: Messages, role: str) -> bool:
    """Whether the template writes nothing of a role's messages, whatever their text."""
    probes = [
        {**message, "content": _replaced(message["content"])} if message["role"] == role else message
        for message in messages
    ]
    return NEEDLE not in render(probes)


def _parts(content: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": content}]


def _replaced(content: object) -> object:
    return NEEDLE if isinstance(content, str) else _parts(NEEDLE)
