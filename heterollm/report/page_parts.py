"""What the pages are made of: words, tables, bars and pictures as HTML, in one file that needs no other."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from heterollm.base import Section

__all__ = [
    "Bar",
    "bars_html",
    "kind_word",
    "list_html",
    "page_html",
    "picture_html",
    "section_html",
    "sentence_html",
    "text_html",
]

KINDS: Final = {"real": "measured"}
"""What times of a kind are called; others by the name of the kind."""

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Nothing is fetched, whatever a page should come to hold."""

STYLE: Final = """
:root { color-scheme: light dark;
  --text: #1a1c1e; --dim: #5c6268; --line: #d6dade; --back: #fff; --head: #f3f5f7; --track: #edf0f2; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8ea; --dim: #9aa2aa; --line: #3a4148; --back: #16191c; --head: #20252a;
    --track: #262c32; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 64rem; padding: 1rem; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; overflow-wrap: anywhere; }
p { margin: 0.4rem 0; color: var(--dim); font-size: 0.9rem; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1.5rem 0 0.4rem; overflow-wrap: anywhere; }
ul { margin: 0.4rem 0; padding-left: 1.2rem; }
li { margin: 0.3rem 0; overflow-wrap: anywhere; }
.box { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: 0.85rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.6rem; text-align: left; white-space: nowrap; border-top: 1px solid var(--line); }
caption { text-align: left; padding: 0.3rem 0.6rem; color: var(--dim); font-size: 0.8rem; }
thead th { background: var(--head); }
thead + tbody td:first-child { position: sticky; left: 0; background: var(--back); }
td.name { white-space: normal; min-width: 7rem; }
thead th:first-child { position: sticky; left: 0; }
td.words { white-space: normal; min-width: 11rem; overflow-wrap: anywhere; }
.right { text-align: right; }
.pictures { columns: 22rem; column-gap: 1rem; }
.pictures figure { break-inside: avoid; margin-bottom: 1rem; }
figure { margin: 0; }
img { display: block; width: 100%; height: auto; background: #fff; border: 1px solid var(--line);
  border-radius: 6px; }
.bars { display: grid; grid-template-columns: minmax(0, 16rem) 1fr auto; gap: 0.35rem 0.75rem;
  align-items: center; margin: 0.6rem 0; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
.bars > div { display: contents; }
.bars .name { overflow-wrap: anywhere; }
.bars .number { text-align: right; }
.bars .best { font-weight: 600; }
.bars svg { display: block; width: 100%; height: 0.9rem; background: var(--track); border-radius: 3px; }
.key { display: inline-block; margin-right: 0.9rem; }
.key > span { display: inline-block; width: 0.8rem; height: 0.8rem; margin-right: 0.3rem; border-radius: 2px;
  vertical-align: -0.05rem; }
figure + .box { margin-top: 0.8rem; }
.gpu { fill: #0072b2; background: #0072b2; }
.npu { fill: #d55e00; background: #d55e00; }
.both { fill: #009e73; background: #009e73; }
.other { fill: #8a9299; background: #8a9299; }
.spread { fill: var(--text); }
@media (max-width: 36rem) {
  .bars { grid-template-columns: 1fr auto; gap: 0.15rem 0.75rem; }
  .bars .name { grid-column: 1 / -1; margin-top: 0.3rem; }
}
figcaption { color: var(--dim); font-size: 0.85rem; margin-top: 0.3rem; }
"""

LONG_CELL: Final = 40
"""Characters from which on a cell may wrap."""

LONG_NAME: Final = 12
"""The same of a row's name, so that numbers have room beside it on a phone."""

CODE: Final = re.compile(r"`([^`]+)`")
CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]|[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class Bar:
    """One line of a chart.

    Args:
        name: What it is of.
        pieces: Lengths one after the other, with the class of the style that colours each.
        number: What stands behind it.
        spread: Between which lengths the samples lie; None for no mark.
        best: Whether it is the one to look at.
    """

    name: str
    pieces: tuple[tuple[float, str], ...]
    number: str
    spread: tuple[float, float] | None = None
    best: bool = False


def kind_word(time_kind: str | None) -> str:
    """Return how times of a kind came about: measured, emulated or simulated."""
    return KINDS.get(time_kind or "", time_kind or "not run")


def page_html(title: str, body: Sequence[str]) -> str:
    """Return a whole page.

    Args:
        title: Its title and first heading.
        body: What follows, as HTML.
    """
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{text_html(title)}</title>",
            f"<style>{STYLE}</style>\n</head>",
            "<body>",
            f"<h1>{text_html(title)}</h1>",
            *body,
            "</body>\n</html>\n",
        ]
    )


def text_html(words: str) -> str:
    """Return words as HTML text; characters that no page may hold are replaced."""
    return escape(CONTROLS.sub("\N{REPLACEMENT CHARACTER}", words))


def sentence_html(words: str) -> str:
    """Return a sentence as HTML, with the commands that stand between its backticks as code."""
    return CODE.sub(r"<code>\1</code>", text_html(words))


def section_html(section: Section, kind: str, *, level: int = 2) -> Iterator[str]:
    """Yield a section: heading, table and notes.

    Args:
        section: What it says.
        kind: How its numbers came about, which stands over the table.
        level: Of the heading; without a title there is none.
    """
    if section.title:
        yield f"<h{level}>{text_html(section.title)}</h{level}>"
    if section.rows:
        yield '<div class="box"><table>'
        yield f"<caption>{text_html(kind)}</caption>"
        right = [column.startswith(">") for column in section.columns]
        if section.columns:
            heads = zip(section.columns, right, strict=True)
            cells = "".join(f"<th{_class(own)}>{text_html(name.lstrip('>'))}</th>" for name, own in heads)
            yield f"<thead><tr>{cells}</tr></thead>"
        yield "<tbody>"
        for row in section.rows:
            yield f"<tr>{''.join(_cells(row, right))}</tr>"
        yield "</tbody></table></div>"
    for line in section.notes:
        yield f"<p>{sentence_html(line)}</p>"


def list_html(lines: Sequence[str]) -> Iterator[str]:
    """Yield a list of sentences."""
    yield "<ul>"
    for line in lines:
        yield f"<li>{sentence_html(line)}</li>"
    yield "</ul>"


def bars_html(bars: Sequence[Bar], caption: str, keys: Sequence[tuple[str, str]] = ()) -> Iterator[str]:
    """Yield a chart of bars, drawn to the longest of them.

    Args:
        bars: From the top.
        caption: What their lengths are.
        keys: Classes of the style, and what their colours mean.
    """
    lengths = [sum(size for size, _ in bar.pieces) for bar in bars]
    longest = max([*lengths, *(end for bar in bars for end in bar.spread or ())], default=0.0)
    yield '<figure><div class="bars">'
    for bar in bars:
        best = " best" if bar.best else ""
        yield (
            f'<div><span class="name{best}">{text_html(bar.name)}</span>'
            '<svg viewBox="0 0 100 10" preserveAspectRatio="none" aria-hidden="true">'
            f"{''.join(_rectangles(bar, longest))}</svg>"
            f'<span class="number{best}">{text_html(bar.number)}</span></div>'
        )
    legend = "".join(
        f'<span class="key"><span class="{style}"></span>{text_html(words)}</span>' for style, words in keys
    )
    yield f"</div><figcaption>{text_html(caption)}{'<br>' if legend else ''}{legend}</figcaption></figure>"


def _rectangles(bar: Bar, longest: float) -> Iterator[str]:
    scale = 100 / longest if longest > 0 else 0.0
    begin = 0.0
    for size, style in bar.pieces:
        yield f'<rect class="{style}" x="{begin:.2f}" width="{max(0.0, scale * size):.2f}" height="10"/>'
        begin += max(0.0, scale * size)
    if bar.spread is not None:
        low, high = (scale * end for end in bar.spread)
        yield f'<rect class="spread" x="{low:.2f}" y="4" width="{max(0.3, high - low):.2f}" height="2"/>'


def _cells(row: Sequence[str], right: Sequence[bool]) -> Iterator[str]:
    for place, cell in enumerate(row):
        if not right and place == 0:
            yield f'<th scope="row">{text_html(cell)}</th>'
        elif place < len(right) and right[place]:
            yield f"<td{_class(True)}>{text_html(cell)}</td>"
        else:
            words = ' class="words"' if not right or len(cell) > LONG_CELL else ""
            if place == 0 and len(cell) > LONG_NAME:
                words = ' class="name"'
            yield f"<td{words}>{text_html(cell)}</td>"


def _class(right: bool) -> str:
    return ' class="right"' if right else ""


def picture_html(caption: str, png: bytes) -> str:
    """Return a picture with its caption; the file is in the page."""
    data = base64.b64encode(png).decode("ascii")
    words = text_html(caption[:1].upper() + caption[1:])
    return (
        f'<figure><img alt="{words}" src="data:image/png;base64,{data}">'
        f"<figcaption>{words}</figcaption></figure>"
    )
