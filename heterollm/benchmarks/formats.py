"""Rows as text: Markdown as llama-bench writes it, CSV, JSON, JSON lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from heterollm.base import CacheError, InputError, format_bytes, markdown_table, parse_json, read_file
from heterollm.benchmarks.rows import FIELD_NAMES, BenchRow, flat

COLUMNS: Final = (
    "model", "size", "params", "engine", "level", "lengths", "sync", "precision", "threads", "test", "t/s",
)  # fmt: skip
RIGHT: Final = {"size", "params", "threads", "test", "t/s"}
NEVER_LEFT_OUT: Final = {"model", "engine", "level", "precision", "threads", "test", "t/s"}


class Row(Protocol):
    """A row of any kind of result."""

    def to_dict(self) -> dict[str, Any]:
        """Return a form that JSON can hold, in the order of the fields."""
        ...


def to_markdown(rows: Sequence[BenchRow]) -> str:
    """Return a table like llama-bench's, of medians, without columns that have only defaults."""
    cells = [_cells(row) for row in rows]
    columns = [
        name
        for name in COLUMNS
        if name in NEVER_LEFT_OUT
        or name in ("size", "params")
        or {line[name] for line in cells} - {"", "auto"}
    ]
    return markdown_table(
        columns, [[line[name] for name in columns] for line in cells], right=RIGHT & set(columns)
    )


def to_csv(rows: Sequence[Row], names: Sequence[str] = FIELD_NAMES) -> str:
    """Return a header and a line for each row; lists and tables are JSON in their cells.

    Args:
        rows: The rows.
        names: Names of their fields.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        data = flat(row) if isinstance(row, BenchRow) else row.to_dict()
        writer.writerow([_plain(value) for value in data.values()])
    return buffer.getvalue()


def to_json(rows: Sequence[Row]) -> str:
    """Return one JSON list."""
    return json.dumps([row.to_dict() for row in rows], indent=2, allow_nan=False) + "\n"


def to_jsonl(rows: Sequence[Row]) -> str:
    """Return one JSON object a line."""
    return "".join(json.dumps(row.to_dict(), allow_nan=False) + "\n" for row in rows)


FORMATS: Final[dict[str, Callable[[Sequence[BenchRow]], str]]] = {
    "md": to_markdown,
    "csv": to_csv,
    "json": to_json,
    "jsonl": to_jsonl,
}
"""Writers of rows by the value of ``--format``."""


def append_jsonl(path: Path, rows: Sequence[Row]) -> None:
    """Append rows to a file of JSON lines.

    Raises:
        CacheError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(to_jsonl(rows))
    except OSError as error:
        raise CacheError(f"Cannot write {path}: {error.strerror or error}.") from error


def read_rows(path: Path) -> list[BenchRow]:
    """Read rows of ``heterollm bench``.

    Raises:
        InputError: It cannot be read, or a line is no row, such as one of a simulation.
    """
    items = read_json_items(path)
    if any(isinstance(item, dict) and item.get("simulated") for item in items):
        raise InputError(
            f"{path} has rows of simulations: modelled times are never read as measured ones.",
            fix="Give a file that `heterollm bench -o` wrote.",
        )
    return [BenchRow.from_dict(item, source=f"{path}: row {place}") for place, item in enumerate(items, 1)]


def read_json_items(path: Path) -> list[object]:
    """Return the items of a file of JSON lines, or of one JSON list.

    Raises:
        InputError: The file cannot be read, or is empty.
    """
    try:
        text = read_file(path).decode()
    except (OSError, ValueError) as error:  # such as bytes that are no text, or names that are no paths
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"Cannot read {str(path)!r}: {reason}.") from error
    try:
        if text.lstrip().startswith("["):
            found: list[object] = parse_json(text)
        else:
            found = [parse_json(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise InputError(f"{path} is neither JSON nor JSON lines: {error}.") from error
    if not found:
        raise InputError(f"{path} has no rows.")
    return found


def _cells(row: BenchRow) -> dict[str, str]:
    rate = (
        "failed"
        if row.times.median_ts is None
        else f"{row.times.median_ts:.2f} ± {row.times.stddev_ts or 0.0:.2f}"
    )
    if row.error is not None:
        rate = f"error: {row.error}".replace("|", "/").replace("\n", " ")
    elif row.quality.quality_passed is False:
        rate += " (wrong logits)"
    elif row.interrupted is not None:
        rate += f" ({len(row.times.samples_ns)} of {row.asked.repetitions} samples)"
    return {
        "model": row.setup.model_type or Path(row.setup.model_filename).name,
        "size": "" if row.setup.model_size is None else format_bytes(row.setup.model_size),
        "params": "" if row.setup.model_n_params is None else f"{row.setup.model_n_params / 1e9:.2f} B",
        "engine": row.engine,
        "level": row.plan_level,
        "lengths": row.asked.length_policy,
        "sync": row.asked.sync,
        "precision": row.precision,
        "threads": row.asked.threads,
        "test": row.test,
        "t/s": rate,
    }


def _plain(value: Any) -> Any:  # noqa: ANN401 - any value of a row
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, list | dict) else value
