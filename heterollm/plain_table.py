"""A table as plain data, which a terminal and a document show alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import Final

from heterollm.benchmarks.formats import markdown_table

__all__ = ["PlainTable", "markdown_page"]

LINE: Final = 118


@dataclass(frozen=True, slots=True)
class PlainTable:
    """A title, columns and lines.

    Args:
        title: What it shows.
        columns: Their names, all different; those that begin with ``>`` are aligned to the right.
        lines: A cell for each column.
        notes: What to know about it, a sentence or two each.
    """

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    def to_markdown(self, level: int = 2) -> str:
        """Return it as Markdown under a heading.

        Args:
            level: Of the heading.
        """
        names = [name.lstrip(">") for name in self.columns]
        right = [name.lstrip(">") for name in self.columns if name.startswith(">")]
        parts = [f"{'#' * level} {self.title}\n", markdown_table(names, self.lines, right=right)]
        # No hyphen ends a line: it would be read as one between words.
        parts += [f"{fill(note, LINE, break_on_hyphens=False)}\n" for note in self.notes]
        return "\n".join(parts)


def markdown_page(tables: Sequence[PlainTable]) -> str:
    """Return several tables, one after the other."""
    return "\n".join(table.to_markdown() for table in tables)
