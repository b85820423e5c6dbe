"""Terminal reports as SVG pictures with selectable text, without external files."""

from __future__ import annotations

import html
import io
import re
from pathlib import Path
from typing import Final

from rich.console import RenderableType
from rich.terminal_theme import TerminalTheme

from heterollm.base import OptionError, check_folder, save_file
from heterollm.report.console import SafeConsole

TITLE: Final = "heterollm"
LEAST_WIDTH: Final = 60
WIDEST: Final = 240
PICTURE_WIDTH: Final = 118
"""Columns in which no line of a bench's tables wraps."""

# White paper, and colours of enough contrast on it.
THEME: Final = TerminalTheme(
    (255, 255, 255),
    (31, 35, 40),
    [
        (31, 35, 40), (180, 35, 24), (26, 127, 55), (122, 85, 0),
        (9, 105, 218), (130, 80, 223), (27, 124, 131), (87, 96, 106),
    ],
)  # fmt: skip

FORMAT: Final = """\
<svg class="heterollm-report" viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<title>heterollm</title>
<style>
.{unique_id}-matrix {{
    font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, "Liberation Mono", monospace;
    font-size: {char_height}px;
    line-height: {line_height}px;
}}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
<rect width="{width}" height="{height}" rx="8" fill="#ffffff" stroke="#d0d7de" stroke-width="1" />
<g transform="translate({terminal_x}, 14)" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""Rich's own template loads fonts from the net, which GitHub forbids, and draws a window's buttons."""

HEAD_ROOM: Final = 46
"""Height above the text in rich's picture, for a window title that this template lacks."""


def check_picture(path: Path) -> None:
    """Check that a picture can be written; called before a measurement.

    Raises:
        OptionError: The name does not end in ``.svg``, or there is no such folder.
    """
    if path.suffix.lower() != ".svg":
        raise OptionError(
            f"{path} does not end in .svg.", fix="Pictures of reports are SVG: name it FILE.svg."
        )
    check_folder(path, "picture")


def write_picture(path: Path, renderable: RenderableType, *, title: str, width: int = PICTURE_WIDTH) -> None:
    """Draw a report into a file.

    Args:
        path: The file; it is replaced once it is whole.
        renderable: The report.
        title: Text for readers that show no pictures.
        width: Columns.

    Raises:
        OptionError: It cannot be written.
    """
    save_file(path, picture_svg(renderable, title=title, width=width).encode())


def picture_svg(renderable: RenderableType, *, title: str, width: int = PICTURE_WIDTH) -> str:
    """Return a report as one SVG without external files.

    Args:
        renderable: The report.
        title: Text for readers that show no pictures.
        width: Columns.
    """
    console = SafeConsole(
        file=io.StringIO(),
        record=True,
        width=max(LEAST_WIDTH, min(width, WIDEST)),
        force_terminal=True,
        color_system="truecolor",
        legacy_windows=False,
    )
    console.print(renderable)
    text = console.export_svg(theme=THEME, code_format=FORMAT, unique_id="report")
    text = text.replace(f"<title>{TITLE}</title>", f"<title>{html.escape(title)}</title>", 1)
    return _without_head_room(text)


def _without_head_room(text: str) -> str:
    """Remove the empty space above the text."""

    def lower(found: re.Match[str]) -> str:
        return f"{found[1]}{float(found[2]) - HEAD_ROOM + 14:.1f}{found[3]}"

    text = re.sub(r'(viewBox="0 0 [\d.]+ )([\d.]+)(")', lower, text, count=1)
    return re.sub(r'(<rect width="[\d.]+" height=")([\d.]+)(" rx="8")', lower, text, count=1)
