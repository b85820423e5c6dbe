"""The parts of HTML pages: Jinja2 templates with autoescape, each page one file that loads no other."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from rich.console import Group
from rich.table import Table
from rich.text import Text

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


def page_html(title: str, body: Sequence[Markup], *, script: str = "", data: object = None) -> str:
    """Return a whole page.

    Args:
        title: Its title and first heading.
        body: Its parts, as the functions of this module return them.
        script: The one script that may run, which reads ``data``; without it none may.
        data: JSON values for the script.
    """
    # In a script only `<` could end it; a page must not depend on what a name says.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    return (
        _environment()
        .get_template("page.html.jinja")
        .render(
            title=title,
            body=body,
            script=Markup(script),  # noqa: S704 - the program's own
            digest=digest,
            data=Markup(text),  # noqa: S704 - escaped above
        )
    )


def title_html(words: str, level: int) -> Markup:
    """Return a heading."""
    return part_html("title", words, level)


def section_html(section: Section, kind: str, *, level: int = 2) -> Markup:
    """Return a section: heading, table and notes.

    Args:
        section: Its content.
        kind: Kind of its numbers; the caption of the table.
        level: Of the heading; a section without title has none.
    """
    return part_html("section", section, kind, level, LONG_CELL, LONG_NAME)


def list_html(lines: Sequence[str]) -> Markup:
    """Return a list of sentences; commands between backticks become code."""
    return part_html("bullets", lines)


def sentences_html(lines: Sequence[str]) -> Markup:
    """Return sentences as paragraphs; commands between backticks become code."""
    return part_html("sentences", lines)


def bars_html(bars: Sequence[Bar], caption: str, keys: Sequence[tuple[str, str]] = ()) -> Markup:
    """Return a chart of bars, scaled to the longest.

    Args:
        bars: From the top.
        caption: Quantity and unit of the lengths.
        keys: Style classes with the meaning of their colours.
    """
    lengths = [sum(size for size, _ in bar.pieces) for bar in bars]
    longest = max([*lengths, *(end for bar in bars for end in bar.spread or ())], default=0.0)
    return part_html("bars", [(bar, list(_rectangles(bar, longest))) for bar in bars], caption, keys)


def side_by_side_html(charts: Sequence[Markup]) -> Markup:
    """Return charts in as many columns as the window has room for."""
    return part_html("side_by_side", charts)


def report_html(shown: Group, kind: str) -> Iterator[Markup]:
    """Yield the parts of a report of the terminal: its tables as sections, its lines as paragraphs.

    Args:
        shown: The report.
        kind: Kind of its numbers; the caption of each table.
    """
    for part in shown.renderables:
        if isinstance(part, Table):
            yield section_html(_section_of(part), kind)
        elif isinstance(part, Text) and part.plain.strip():
            yield sentences_html([part.plain.strip()])


def _section_of(shown: Table) -> Section:
    columns = tuple(f"{'>' if column.justify == 'right' else ''}{column.header}" for column in shown.columns)
    rows = zip(*([str(cell) for cell in column.cells] for column in shown.columns), strict=True)
    return Section(getattr(shown, "heading", ""), columns, tuple(rows))


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


def part_html(name: str, *arguments: object) -> Markup:
    """Return the markup of a macro of the parts' template, by its name."""
    macro: Callable[..., Markup] = getattr(_environment().get_template("parts.html.jinja").module, name)
    return macro(*arguments)


def _legal(value: object) -> object:
    """Replace the characters that are not legal in a page; markup holds legal text already."""
    return value if isinstance(value, Markup) or not isinstance(value, str) else CONTROLS.sub("\ufffd", value)


def _sentence(words: str) -> Markup:
    """Return a sentence with the text between backticks as code."""
    return Markup(CODE.sub(r"<code>\1</code>", str(escape(_legal(words)))))  # noqa: S704 - escaped before
