"""Renders a dialogue so that no message is lost in silence."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias

from heterollm.base import InputError

Messages: TypeAlias = Sequence[Mapping[str, Any]]

NEEDLE: Final = "zq8Kx2vW"
"""A text that no template writes by itself."""

SPLIT: Final = "\ufdd0"
"""Divides a text that spells a token without being one; Unicode gives this number to no character."""

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


def guarded(messages: Messages, names: Collection[str]) -> list[Mapping[str, Any]]:
    """Return messages in which no text of users and tools spells a token, such as the end of a turn.

    Args:
        messages: Role and content of each.
        names: The spellings; each is divided by :data:`SPLIT`.
    """
    pattern = re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))) or "(?!)")

    def divided(text: str) -> str:
        return pattern.sub(lambda found: f"{found[0][0]}{SPLIT}{found[0][1:]}", text.replace(SPLIT, ""))

    return [
        {**message, "content": divided(message["content"])} if message["role"] in FOREIGN else message
        for message in messages
    ]


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
