"""Titled tables as plain data, which a terminal, a page and a document show alike."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Final

__all__ = ["Section", "markdown_table"]

LINE: Final = 118


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with a table.

    Args:
        title: What it is about.
        columns: Heads; those that begin with ``>`` are right-aligned. Without heads, rows are pairs.
        rows: Cells.
        notes: Remarks under it, a sentence or two each.
    """

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    notes: tuple[str, ...] = ()

    def to_markdown(self, level: int = 2) -> str:
        """Return it as Markdown under a heading; its heads must all be different.

        Args:
            level: Of the heading.
        """
        names = [name.lstrip(">") for name in self.columns]
        right = [name.lstrip(">") for name in self.columns if name.startswith(">")]
        parts = [f"{'#' * level} {self.title}\n", markdown_table(names, self.rows, right=right)]
        # No hyphen ends a line: it would be read as one between words.
        parts += [f"{fill(note, LINE, break_on_hyphens=False)}\n" for note in self.notes]
        return "\n".join(parts)


def markdown_table(
    columns: Sequence[str], lines: Sequence[Sequence[str]], *, right: Collection[str] = ()
) -> str:
    """Return a table in Markdown.

    Args:
        columns: Their names.
        lines: Their cells, which must hold no line's end.
        right: Names of the columns that are aligned to the right.
    """
    rows = [columns, ["---:" if name in right else "---" for name in columns]]
    rows += [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
