"""Rows as text for machines and for documents: Markdown as llama-bench writes it, CSV, JSON, JSON lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from heterollm.benchmarks.rows import FIELD_NAMES, BenchRow
from heterollm.errors import CacheError, InputError
from heterollm.units import format_bytes

__all__ = ["FORMATS", "append_jsonl", "read_rows", "to_csv", "to_json", "to_jsonl", "to_markdown"]

COLUMNS: Final = (
    "model", "size", "params", "engine", "level", "lengths", "sync", "precision", "threads", "test", "t/s",
)  # fmt: skip
RIGHT: Final = {"size", "params", "threads", "test", "t/s"}
NEVER_LEFT_OUT: Final = {"model", "engine", "level", "precision", "threads", "test", "t/s"}


def to_markdown(rows: Sequence[BenchRow]) -> str:
    """Return a table like llama-bench's; columns in which nothing differs from the default are left out."""
    cells = [_cells(row) for row in rows]
    columns = [
        name
        for name in COLUMNS
        if name in NEVER_LEFT_OUT
        or name in ("size", "params")
        or {line[name] for line in cells} - {"", "auto"}
    ]
    lines = [" | ".join(columns), " | ".join("---:" if name in RIGHT else "---" for name in columns)]
    lines += [" | ".join(line[name] for name in columns) for line in cells]
    return "".join(f"| {line} |\n" for line in lines)


def to_csv(rows: Sequence[BenchRow]) -> str:
    """Return one header and one line a row; what is a list or a table there is JSON in its cell."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(FIELD_NAMES)
    for row in rows:
        writer.writerow([_plain(value) for value in row.to_dict().values()])
    return buffer.getvalue()


def to_json(rows: Sequence[BenchRow]) -> str:
    """Return one JSON list."""
    return json.dumps([row.to_dict() for row in rows], indent=2, allow_nan=False) + "\n"


def to_jsonl(rows: Sequence[BenchRow]) -> str:
    """Return one JSON object a line."""
    return "".join(json.dumps(row.to_dict(), allow_nan=False) + "\n" for row in rows)


FORMATS: Final[dict[str, Callable[[Sequence[BenchRow]], str]]] = {
    "md": to_markdown,
    "csv": to_csv,
    "json": to_json,
    "jsonl": to_jsonl,
}
"""How rows can be written, by the names of ``-o``."""


def append_jsonl(path: Path, rows: Sequence[BenchRow]) -> None:
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
    """Read a file of JSON lines, or of one JSON list.

    Raises:
        InputError: It cannot be read, or a line is no row.
    """
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"Cannot read {path}: {error}.") from error
    try:
        if text.lstrip().startswith("["):
            found = json.loads(text)
        else:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise InputError(f"{path} is neither JSON nor JSON lines: {error}.") from error
    rows = [BenchRow.from_dict(item) for item in found]
    if not rows:
        raise InputError(f"{path} has no rows.")
    return rows


def _cells(row: BenchRow) -> dict[str, str]:
    rate = "failed" if row.avg_ts is None else f"{row.avg_ts:.2f} ± {row.stddev_ts or 0.0:.2f}"
    if row.error is not None:
        rate = f"error: {row.error}".replace("|", "/").replace("\n", " ")
    elif row.quality_passed is False:
        rate += " (wrong logits)"
    threads = str(row.n_threads) if row.n_threads is not None else ""
    if row.gpu_threads is not None:
        threads = f"{row.gpu_threads}+{row.npu_threads}"
    return {
        "model": row.model_type or Path(row.model_filename).name,
        "size": "" if row.model_size is None else format_bytes(row.model_size),
        "params": "" if row.model_n_params is None else f"{row.model_n_params / 1e9:.2f} B",
        "engine": row.engine,
        "level": row.plan_level,
        "lengths": row.length_policy,
        "sync": row.sync,
        "precision": row.precision,
        "threads": threads,
        "test": row.test,
        "t/s": rate,
    }


def _plain(value: Any) -> Any:  # noqa: ANN401 - whatever a row holds
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, list | dict) else value
