"""Draws the Markdown that a model writes as HTML, for the page."""

from __future__ import annotations

import functools
from typing import Final

import msgspec
from markdown_it import MarkdownIt

from heterollm.serve.about import About
from heterollm.serve.bodies import decoded
from heterollm.serve.errors import RequestError

MOST_CHARACTERS: Final = 100_000
MOST_BRACKETS: Final = 2000
"""Openings of links, whose search for an end takes time by their square."""


class MarkdownText(msgspec.Struct, forbid_unknown_fields=True):
    """A body of ``POST /markdown``.

    Args:
        text: The text, in Markdown.
    """

    text: str


def draw(_about: About, content: bytes) -> dict[str, str]:
    """Return the ``html`` of a body's text, in which HTML of the text is text, and images are links.

    Raises:
        RequestError: The body has another form, or would take long.
    """
    text = decoded(content, MarkdownText, MOST_CHARACTERS).text
    if len(text) > MOST_CHARACTERS or text.count("[") > MOST_BRACKETS:
        raise RequestError(
            f"The text has {len(text)} characters and {text.count('[')} brackets.",
            fix=f"At most {MOST_CHARACTERS} and {MOST_BRACKETS} are drawn.",
            status=413,
        )
    return {"html": _renderer().render(text)}


@functools.cache
def _renderer() -> MarkdownIt:
    return MarkdownIt("js-default").disable("image")
