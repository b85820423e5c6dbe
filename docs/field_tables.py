"""Prints the tables of model types for docs/checkpoints.md, and of fields for docs/checkpoint-fields.md."""

from __future__ import annotations

import importlib
import json
import pkgutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import heterollm.model.fields as room
from heterollm.model.families import CONFIG_FIELDS, FAMILIES
from heterollm.model.fields.table import Field, FieldTable
from heterollm.model.missing import MISSING
from heterollm.model.wrappers import WRAPPERS

TYPES_PAGE: Final = Path(__file__).parent / "checkpoints.md"
FIELDS_PAGE: Final = Path(__file__).parent / "checkpoint-fields.md"
BEGIN: Final = "<!-- {}: written by docs/generate.py -->"
END: Final = "<!-- end of {} -->"

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


def pages() -> dict[Path, str]:
    """Return both pages with the tables between their marks."""
    types, fields = (page.read_text("utf-8") for page in (TYPES_PAGE, FIELDS_PAGE))
    return {
        TYPES_PAGE: _between(types, "model types", [_model_types()]),
        FIELDS_PAGE: _between(fields, "fields", map(_section, tables())),
    }


def _between(page: str, name: str, parts: Iterable[str]) -> str:
    begin, end = BEGIN.format(name), END.format(name)
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return "\n".join([f"{before}{begin}\n", *parts, f"{end}{after}"])


def _model_types() -> str:
    """Return the table of supported model types, and what is missing for others."""
    rows = [f"| `{kind}` | {family.covers} |" for kind, family in FAMILIES.items()]
    for kind, wrapper in WRAPPERS.items():
        parts = ", ".join(f"`{text}`" for text, name in wrapper.families.items() if name in FAMILIES)
        rows.append(f"| `{kind}` | its text part ({parts}) |")
    table = "\n".join(["| `model_type` | models |", "|---|---|", *rows])
    missing: dict[str, list[str]] = {}
    for kind, what in MISSING.items():
        missing.setdefault(what, []).append(f"`{kind}`")
    lines = [f"| {what} | {', '.join(kinds)} |" for what, kinds in missing.items()]
    return "\n".join(
        [table, "", "Refused, with the reason:\n", "| missing | model types |", "|---|---|", *lines, ""]
    )


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
    return "\n".join([f"## {table.title}\n", HEAD, *body, ""])


def _neutral(row: Field) -> str:
    """Return the values with which a refused field passes."""
    values = dict.fromkeys("empty" if one in ({}, [], "") else json.dumps(one) for one in row.neutral)
    return f" (but for {', '.join(values)})" if values else ""
