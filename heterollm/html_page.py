"""One page about a profile that needs nothing but itself: tables, pictures and style in one file."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Sequence
from html import escape
from typing import TYPE_CHECKING, Final

from heterollm.profile_tables import Section, sections

if TYPE_CHECKING:
    from heterollm.profiler.summary_rows import ProfileSummary

__all__ = ["profile_page"]

STYLE: Final = """
:root { color-scheme: light dark;
  --text: #1a1c1e; --dim: #5c6268; --line: #d6dade; --back: #fff; --head: #f3f5f7; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8ea; --dim: #9aa2aa; --line: #3a4148; --back: #16191c; --head: #20252a; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 64rem; padding: 1rem; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 2rem 0 0.5rem; }
p { margin: 0.4rem 0; color: var(--dim); font-size: 0.9rem; }
.box { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: 0.85rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.6rem; text-align: left; white-space: nowrap; border-top: 1px solid var(--line); }
tr:first-child > * { border-top: 0; }
thead th { background: var(--head); }
td.words { white-space: normal; min-width: 11rem; overflow-wrap: anywhere; }
.right { text-align: right; }
.pictures { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); }
figure { margin: 0; }
img { display: block; width: 100%; height: auto; background: #fff; border: 1px solid var(--line);
  border-radius: 6px; }
figcaption { color: var(--dim); font-size: 0.85rem; margin-top: 0.3rem; }
"""

LONG_CELL: Final = 40
"""Characters from which on a cell may wrap."""

CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]|[\ud800-\udfff]")


def profile_page(summary: ProfileSummary, pictures: Sequence[tuple[str, bytes]] = ()) -> str:
    """Return a profile as one HTML page.

    Args:
        summary: The profile.
        pictures: What each shows, and its PNG.
    """
    title = f"Profile of {summary.device}, {summary.time_kind} time"
    body = [f"<h1>{_text(title)}</h1>"]
    first, *rest = sections(summary)
    body += _section(first)
    if pictures:
        body.append('<h2>Pictures</h2>\n<div class="pictures">')
        body += [_picture(caption, png) for caption, png in pictures]
        body.append("</div>")
    for section in rest:
        body += _section(section)
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            '<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{_text(title)}</title>",
            f"<style>{STYLE}</style>\n</head>",
            "<body>",
            *body,
            "</body>\n</html>\n",
        ]
    )


def _text(words: str) -> str:
    """Return words as HTML text; characters that no page may hold are replaced."""
    return escape(CONTROLS.sub("\N{REPLACEMENT CHARACTER}", words))


def _section(section: Section) -> Iterator[str]:
    yield f"<h2>{_text(section.title)}</h2>"
    if section.rows:
        yield '<div class="box"><table>'
        right = [column.startswith(">") for column in section.columns]
        if section.columns:
            heads = zip(section.columns, right, strict=True)
            cells = "".join(f"<th{_class(own)}>{_text(name.lstrip('>'))}</th>" for name, own in heads)
            yield f"<thead><tr>{cells}</tr></thead>"
        yield "<tbody>"
        for row in section.rows:
            yield f"<tr>{''.join(_cells(row, right))}</tr>"
        yield "</tbody></table></div>"
    for line in section.notes:
        yield f"<p>{_text(line)}</p>"


def _cells(row: Sequence[str], right: Sequence[bool]) -> Iterator[str]:
    for place, cell in enumerate(row):
        if not right and place == 0:
            yield f'<th scope="row">{_text(cell)}</th>'
        elif place < len(right) and right[place]:
            yield f"<td{_class(True)}>{_text(cell)}</td>"
        else:
            words = ' class="words"' if not right or len(cell) > LONG_CELL else ""
            yield f"<td{words}>{_text(cell)}</td>"


def _class(right: bool) -> str:
    return ' class="right"' if right else ""


def _picture(caption: str, png: bytes) -> str:
    data = base64.b64encode(png).decode("ascii")
    words = _text(caption[:1].upper() + caption[1:])
    return (
        f'<figure><img alt="{words}" src="data:image/png;base64,{data}">'
        f"<figcaption>{words}</figcaption></figure>"
    )
