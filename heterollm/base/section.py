"""Titled tables as plain data, for the terminal, pages and documents."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Final

LINE: Final = 118


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with a table.

    Args:
        title: The heading.
        columns: Column heads; a leading ``>`` aligns the column to the right. Without heads, rows are pairs.
        rows: Cells.
        notes: Remarks below the table, a sentence or two each.
    """

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()

    def to_markdown(self, level: int = 2) -> str:
        """Return Markdown with a heading of some level; the column heads must all differ."""
        names = [name.lstrip(">") for name in self.columns]
        right = [name.lstrip(">") for name in self.columns if name.startswith(">")]
        parts = [f"{'#' * level} {self.title}\n", markdown_table(names, self.rows, right=right)]
        # A hyphen at the end of a line would become part of a word.
        parts += [f"{fill(note, LINE, break_on_hyphens=False)}\n" for note in self.notes]
        return "\n".join(parts)


def markdown_table(
    columns: Sequence[str], lines: Sequence[Sequence[str]], *, right: Collection[str] = ()
) -> str:
    """Return a table in Markdown.

    Args:
        columns: Names of the columns.
        lines: Cells of each row, without line breaks.
        right: Names of the columns that are aligned to the right.
    """
    rows = [columns, ["---:" if name in right else "---" for name in columns]]
    rows += [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
