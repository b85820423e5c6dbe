"""Rows of a sweep as a table and in other formats, all labelled as simulated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from heterollm.base import LABEL, InputError, OptionError, Section, check_target, labelled
from heterollm.benchmarks import append_jsonl, read_json_items, to_csv, to_json, to_jsonl
from heterollm.simulate import ROW_FIELDS, SimulatedRow

CHOICES: Final = ("soc", "plan", "technique", "at once", "lengths", "sync", "game", "prompt", "decode")
"""Columns that the table omits if all rows have the same value."""


def sweep_table(rows: Sequence[SimulatedRow]) -> Section:
    """Return the rows as one table; values that all rows share are in the title."""
    cells = [_cells(row) for row in rows]
    names = list(cells[0]) if cells else []
    shared = [name for name in CHOICES if len({line[name] for line in cells}) == 1]
    columns = [name for name in names if name not in shared]
    words = ", ".join(f"{name} {cells[0][name]}" for name in shared if cells[0][name])
    right = {
        "prompt",
        "decode",
        "ttft ms",
        "prefill t/s",
        "decode t/s",
        "prefill J",
        "J a token",
        "W",
    }
    return Section(
        f"Simulated, nothing here was measured{f': {words}' if words else ''}",
        tuple(f">{name}" if name in right else name for name in columns),
        tuple(tuple(line[name] for name in columns) for line in cells),
        (
            "Times are modelled. Energy is the middle of a range between assumptions; JSON has its ends.",
            *_failures(rows),
        ),
    )


SWEEP_FORMATS: Final[dict[str, Callable[[Sequence[SimulatedRow]], str]]] = {
    "md": lambda rows: sweep_table(rows).to_markdown(),
    "csv": lambda rows: to_csv(rows, ROW_FIELDS),
    "json": to_json,
    "jsonl": to_jsonl,
}
"""Writers of rows by the value of ``--format``."""


def append_simulated(path: Path, rows: Sequence[SimulatedRow]) -> None:
    """Append rows to a file of JSON lines.

    Raises:
        OptionError: The name of the file lacks the word simulated, or the file cannot be written.
        CacheError: The disk is full.
    """
    if LABEL not in path.name.lower():
        raise OptionError(
            f"{path.name!r:.200} lacks the word {LABEL}.",
            fix=f"Name it {labelled(path).name}: files of simulated times carry the word in their names.",
        )
    check_target(path, "result")
    append_jsonl(path, rows)


def read_simulated(path: Path) -> list[SimulatedRow]:
    """Read a file that :func:`append_simulated` wrote.

    Raises:
        InputError: It cannot be read, or a line is no row of a simulation.
    """
    items = read_json_items(path)
    try:
        return [SimulatedRow.from_dict(item) for item in items]
    except InputError as error:
        raise InputError(f"{path}: {error.message}", fix=error.fix) from error


def _failures(rows: Sequence[SimulatedRow]) -> list[str]:
    """Return why cases failed, each reason once."""
    reasons = [row.error for row in rows if row.error is not None]
    return [
        f"{reasons.count(reason)} failed: {' '.join(reason.split())}" for reason in dict.fromkeys(reasons)
    ]


def _cells(row: SimulatedRow) -> dict[str, str]:
    return {
        "model": Path(row.model).name,
        "soc": Path(row.soc).stem,
        "plan": row.plan_level,
        "technique": ", ".join(row.techniques),
        "at once": "" if row.lanes in (None, 1) else f"{row.lanes} of {row.chunk_tokens}",
        "lengths": row.length_policy,
        "sync": row.sync,
        "game": row.gpu_load or "",
        "prompt": str(row.prompt_tokens),
        "decode": str(row.decode_tokens),
        "ttft ms": "failed" if row.error is not None else number(row.ttft_ms, 1),
        "prefill t/s": number(row.prefill_tokens_per_second, 1),
        "decode t/s": number(row.decode_tokens_per_second, 2),
        "prefill J": number(row.prefill_joules, 2),
        "J a token": number(row.decode_joules_per_token, 3),
        "W": number(row.average_watts, 2),
    }


def number(value: float | None, digits: int) -> str:
    """Return a number with a fixed count of decimals; an empty text for None."""
    return "" if value is None else f"{value:,.{digits}f}"
