"""Rows as text: Markdown as llama-bench writes it, CSV, JSON, JSON lines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from heterollm.base import InputError, format_bytes, markdown_table, parse_json, read_file
from heterollm.benchmarks.rows import BenchRow, Modelled, flat

RATES: Final = ("ttft ms", "prefill t/s", "decode t/s", "prefill J", "J a token", "W")
"""Columns of simulated rows alone, whose times share no column with measured ones."""

RIGHT: Final = {"size", "params", "threads", "test", "t/s", *RATES}
NEVER_LEFT_OUT: Final = {"model", "size", "params", "engine", "level", "precision", "threads", "test", "t/s"}
"""Columns that tables with a measured row have even if they are empty."""


def table_of(rows: Sequence[BenchRow]) -> tuple[list[str], list[list[str]]]:
    """Return columns and cells like llama-bench's, of medians, without columns of defaults alone."""
    cells = [_cells(row) for row in rows]
    needed = set() if all(row.modelled is not None for row in rows) else NEVER_LEFT_OUT
    columns = [
        name
        for name in (cells[0] if cells else ())
        if name in needed or {line[name] for line in cells} - {"", "auto"}
    ]
    return columns, [[line[name] for name in columns] for line in cells]


def to_markdown(rows: Sequence[BenchRow]) -> str:
    """Return the table of :func:`table_of`."""
    columns, cells = table_of(rows)
    return markdown_table(columns, cells, right=RIGHT & set(columns))


def to_csv(rows: Sequence[BenchRow]) -> str:
    """Return a header and a line for each row; lists and tables are JSON in their cells."""
    buffer = io.StringIO()
    lines = [flat(row) for row in rows]
    if all(row.modelled is None for row in rows):
        own = Modelled.__struct_fields__
        lines = [{name: value for name, value in line.items() if name not in own} for line in lines]
    writer = csv.DictWriter(buffer, list(lines[0]) if lines else (), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _plain(value) for name, value in line.items()} for line in lines)
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
"""Writers of rows by the value of ``--format``."""


def read_rows(path: Path) -> list[BenchRow]:
    """Read rows of ``heterollm bench`` and ``heterollm simulate``.

    Raises:
        InputError: It cannot be read, or a line is no row.
    """
    items = read_json_items(path)
    if any(isinstance(item, dict) and item.get("simulated") for item in items):
        raise InputError(f"{path} has rows that an older version simulated.", fix="Simulate them again.")
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
    own = row.modelled
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
    if own is not None and row.error is None:
        rate = ""
    return {
        "model": row.setup.model_type or Path(row.setup.model_filename).name,
        "time": "" if row.time_kind in (None, "real") else row.time_kind,
        "soc": "" if own is None else Path(own.soc).stem,
        "size": "" if row.setup.model_size is None else format_bytes(row.setup.model_size),
        "params": "" if row.setup.model_n_params is None else f"{row.setup.model_n_params / 1e9:.2f} B",
        "engine": row.engine if own is None else "",
        "level": row.plan_level,
        "technique": row.asked.technique,
        "at once": "" if own is None or own.lanes in (None, 1) else f"{own.lanes} of {own.chunk_tokens}",
        "game": "" if own is None else own.gpu_load or "",
        "lengths": row.asked.length_policy,
        "sync": row.asked.sync,
        "precision": row.precision,
        "threads": row.asked.threads,
        "test": row.test,
        "t/s": rate,
        **dict.fromkeys(RATES, ""),
        **({} if own is None else _rates(own)),
    }


def _rates(own: Modelled) -> dict[str, str]:
    values = (
        (own.ttft_ms, 1),
        (own.prefill_tokens_per_second, 1),
        (own.decode_tokens_per_second, 2),
        (own.prefill_joules, 2),
        (own.decode_joules_per_token, 3),
        (own.average_watts, 2),
    )
    cells = ("" if value is None else f"{value:,.{digits}f}" for value, digits in values)
    return dict(zip(RATES, cells, strict=True))


def _plain(value: Any) -> Any:  # noqa: ANN401 - any value of a row
    if value is None:
        return ""
    return json.dumps(value) if isinstance(value, list | dict) else value
