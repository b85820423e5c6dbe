"""Prints the tables of the fields of a checkpoint's files for docs/checkpoints.md."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import heterollm.model.fields as room
from heterollm.model.families import CONFIG_FIELDS
from heterollm.model.fields.table import Field, FieldTable

PAGE: Final = Path(__file__).parent / "checkpoints.md"
BEGIN: Final = "<!-- fields: written by docs/generate.py -->"
END: Final = "<!-- end of fields -->"

EFFECTS: Final = {"read": "read", "none": "no effect", "refused": "refused"}
HEAD: Final = "| field | here | meaning, or reason | of | defined by |\n|---|---|---|---|---|"


def tables() -> Iterator[FieldTable]:
    """Yield the table of config.json, then every table of the room, by the names of its modules."""
    yield CONFIG_FIELDS
    seen = {id(CONFIG_FIELDS)}
    for module in sorted(one.name for one in pkgutil.iter_modules(room.__path__)):
        for value in vars(importlib.import_module(f"{room.__name__}.{module}")).values():
            if isinstance(value, FieldTable) and id(value) not in seen:
                seen.add(id(value))
                yield value


def with_tables(page: str) -> str:
    """Return the page with the tables between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return "\n".join([f"{before}{BEGIN}\n", *map(_section, tables()), f"{END}{after}"])


def _section(table: FieldTable) -> str:
    """Return a table; rows that say the same share a line."""
    lines: dict[tuple[object, ...], list[str]] = {}
    for row in table.fields:
        lines.setdefault((row.effect, row.meaning, _neutral(row), row.only, row.source), []).append(row.name)
    body = []
    for (effect, meaning, neutral, only, source), names in lines.items():
        listed = ", ".join(f"`{name}`" for name in names)
        said = f"{meaning}{neutral}".replace("|", "\\|")
        kinds = ", ".join(sorted(only)) if isinstance(only, frozenset) else ""
        body.append(f"| {listed} | {EFFECTS[str(effect)]} | {said} | {kinds or 'all'} | {source} |")
    return "\n".join([f"### {table.title}\n", HEAD, *body, ""])


def _neutral(row: Field) -> str:
    """Return the values with which a refused field passes."""
    values = dict.fromkeys("empty" if one in ({}, [], "") else json.dumps(one) for one in row.neutral)
    return f" (but for {', '.join(values)})" if values else ""
