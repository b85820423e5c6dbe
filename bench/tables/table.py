"""A table of a page from rows of bench/results: its declaration, and the one writer of all."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

from simulated_rows import view

ROOT: Final = Path(__file__).resolve().parents[2]
Row: TypeAlias = Mapping[str, Any]
Line: TypeAlias = Iterable[str]
Lines: TypeAlias = Iterable[Line]

FRESH: Final[dict[str, tuple[Row, ...]]] = {}
"""Rows that were taken again, in place of those of the files."""


@cache
def rows_of(name: str) -> tuple[Row, ...]:
    """Return the rows of a file in bench/results."""
    if name in FRESH:
        return FRESH[name]
    path = ROOT / "bench" / "results" / f"{name}.jsonl"
    rows = map(json.loads, path.read_text("utf-8").splitlines())
    return tuple(view(row) if row.get("modelled") else row for row in rows)


def having(rows: str | Iterable[Row], **asked: object) -> list[Row]:
    """Return the rows, or those of a file, that have these values; None also stands for a lacking one."""
    found = rows_of(rows) if isinstance(rows, str) else rows
    return [row for row in found if all(row.get(key) == value for key, value in asked.items())]


def last(rows: str | Iterable[Row], **asked: object) -> Row:
    """Return the last row that has these values; a bench that was run again appends."""
    found = having(rows, **asked)
    if not found:
        raise SystemExit(f"No row has {asked}.")
    return found[-1]


def values_of(rows: Iterable[Row], *keys: str) -> list[Any]:
    """Return the values of keys in rows, each once, in order; tuples for several keys."""
    found = (tuple(row[key] for key in keys) for row in rows)
    return list(dict.fromkeys(one if len(keys) > 1 else one[0] for one in found))


@dataclass(frozen=True, slots=True)
class Table:
    """A table of a page.

    Args:
        page: Path of the page.
        name: Name in the marks around it.
        lines: Yields the cells of each line.
        titles: Titles of its columns with bars between them; None if ``lines`` yields them first.
        sides: A letter for each column, ``l`` or ``r``; columns beyond are ``r``.
        tight: Whether an empty cell is one space.
    """

    page: str
    name: str
    lines: Callable[[], Lines]
    titles: str | None = None
    sides: str = "l"
    tight: bool = False

    def markdown(self) -> str:
        """Return the table as Markdown."""
        lines = [list(line) for line in self.lines()]
        titles = lines.pop(0) if self.titles is None else self.titles.split(" | ")
        rule = ["---" if side == "l" else "---:" for side in self.sides.ljust(len(titles), "r")]
        texts = [f"| {' | '.join(cells)} |" for cells in (titles, *lines)]
        made = "\n".join([texts[0], f"|{'|'.join(rule)}|", *texts[1:]])
        return made.replace("|  |", "| |").replace("|  |", "| |") if self.tight else made


def page_path(page: str) -> str:
    """Return the path of a page by its name."""
    return "README.md" if page == "README" else f"docs/{page}.md"


TABLES: Final[dict[tuple[str, str], Table]] = {}
"""Every table by page and name."""


def table(
    page: str, name: str, titles: str | None = None, sides: str = "l", *, tight: bool = False
) -> Callable[[Callable[[], Lines]], Callable[[], Lines]]:
    """Declare a table of a page of docs; decorates the function that yields the cells of each line."""
    path = page_path(page)

    def declared(lines: Callable[[], Lines]) -> Callable[[], Lines]:
        TABLES[path, name] = Table(path, name, lines, titles, sides, tight)
        return lines

    return declared


def plain_table(
    page: str, name: str, titles: str, cells: str, rows: Callable[[], Iterable[Row]], sides: str = "l"
) -> None:
    """Declare a table with a line for each row.

    Args:
        page: Name of the page.
        name: Name in the marks around it.
        titles: Titles of its columns, with bars between them.
        cells: Format of a line, with the names of values and bars between cells.
        rows: Returns the rows.
        sides: As of :class:`Table`.
    """
    table(page, name, titles, sides)(lambda: (cells.format_map(row).split(" | ") for row in rows()))
