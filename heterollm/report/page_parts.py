"""The parts of HTML pages: Jinja2 templates with autoescape, each page one file that loads no other."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from heterollm.base import Section

KINDS: Final = {"real": "measured"}
"""Words for kinds of times; another kind keeps its name."""

LONG_CELL: Final = 40
"""A cell with so many characters may wrap."""

LONG_NAME: Final = 12
"""The same for the name of a row: on a phone numbers need the room."""

CODE: Final = re.compile(r"`([^`]+)`")
CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]|[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Bar:
    """One line of a chart.

    Args:
        name: Label.
        pieces: Lengths from the left, each with the style class that colours it.
        number: Text after the bar.
        spread: Lengths of the least and the largest sample; None for no mark.
        best: Whether to highlight the bar.
    """

    name: str
    pieces: tuple[tuple[float, str], ...]
    number: str
    spread: tuple[float, float] | None = None
    best: bool = False


def kind_word(time_kind: str | None) -> str:
    """Return the word for a kind of times: measured, emulated or simulated."""
    return KINDS.get(time_kind or "", time_kind or "not run")


def page_html(title: str, body: Sequence[Markup]) -> str:
    """Return a whole page.

    Args:
        title: Its title and first heading.
        body: Its parts, as the functions of this module return them.
    """
    return _environment().get_template("page.html.jinja").render(title=title, body=body)


def title_html(words: str, level: int) -> Markup:
    """Return a heading."""
    return _part("title", words, level)


def section_html(section: Section, kind: str, *, level: int = 2) -> Markup:
    """Return a section: heading, table and notes.

    Args:
        section: Its content.
        kind: Kind of its numbers; the caption of the table.
        level: Of the heading; a section without title has none.
    """
    return _part("section", section, kind, level, LONG_CELL, LONG_NAME)


def list_html(lines: Sequence[str]) -> Markup:
    """Return a list of sentences; commands between backticks become code."""
    return _part("bullets", lines)


def sentences_html(lines: Sequence[str]) -> Markup:
    """Return sentences as paragraphs; commands between backticks become code."""
    return _part("sentences", lines)


def bars_html(bars: Sequence[Bar], caption: str, keys: Sequence[tuple[str, str]] = ()) -> Markup:
    """Return a chart of bars, scaled to the longest.

    Args:
        bars: From the top.
        caption: Quantity and unit of the lengths.
        keys: Style classes with the meaning of their colours.
    """
    lengths = [sum(size for size, _ in bar.pieces) for bar in bars]
    longest = max([*lengths, *(end for bar in bars for end in bar.spread or ())], default=0.0)
    return _part("bars", [(bar, list(_rectangles(bar, longest))) for bar in bars], caption, keys)


def pictures_html(pictures: Sequence[tuple[str, bytes]]) -> Markup:
    """Return PNG pictures with their captions; the files are in the page."""
    drawn = [
        (caption[:1].upper() + caption[1:], base64.b64encode(png).decode("ascii"))
        for caption, png in pictures
    ]
    return _part("pictures", drawn)


def _rectangles(bar: Bar, longest: float) -> Iterator[tuple[str, float, float, int, int]]:
    """Yield class, left edge, width, top and height of each rectangle, with 100 as the longest bar."""
    scale = 100 / longest if longest > 0 else 0.0
    begin = 0.0
    for size, style in bar.pieces:
        width = max(0.0, scale * size)
        yield style, begin, width, 0, 10
        begin += width
    if bar.spread is not None:
        low, high = (scale * end for end in bar.spread)
        yield "spread", low, max(0.3, high - low), 4, 2


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("heterollm.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_legal,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["sentence"] = _sentence
    return environment


def _part(name: str, *arguments: object) -> Markup:
    """Return the markup of a macro of the parts' template."""
    macro: Callable[..., Markup] = getattr(_environment().get_template("parts.html.jinja").module, name)
    return macro(*arguments)


def _legal(value: object) -> object:
    """Replace the characters that are not legal in a page; markup holds legal text already."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else CONTROLS.sub("\ufffd", value)


def _sentence(words: str) -> Markup:
    """Return a sentence with the text between backticks as code."""
    return Markup(CODE.sub(r"<code>\1</code>", str(escape(_legal(words)))))  # noqa: S704 - escaped before
