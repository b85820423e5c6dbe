"""Takes simulated rows of bench/results again, and says where they or the tables of the pages differ.

Rows of ``heterollm simulate`` hold their whole request, so that the rows are their own commands. Wall time is
that of the simulation alone: no device is needed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rungs import RUNGS, RungRequest, run_rung
from simulated_rows import NAIVE, lines, view

from heterollm.benchmarks import run_sweep
from heterollm.cli.simulate import parse_load
from heterollm.solver import AttentionRequest, ExpertsRequest

RESULTS: Final = Path(__file__).parent / "results"
FAST: Final = ("simulated_path", "simulated_prior")
"""Files behind the tables of docs/simulation.md, which take a few minutes on two cores."""

REPEATABLE: Final = (
    *FAST,
    *("simulated_paper", "simulated_flights", "simulated_shadow_attention"),
    *("simulated_experts", "simulated_llm_npu", "process_domains", "simulated_conclusions"),
)
"""Files of rows of ``heterollm simulate``."""

FIGURES: Final = (
    *("ttft_ms", "prefill_tokens_per_second", "decode_tokens_per_second"),
    *("prefill_joules", "decode_joules_per_token"),
)
DIGITS: Final = 3
"""Significant digits of a figure that must be the same: as many as a table shows."""

SAME: Final = (
    *("model", "soc", "plan_for", "in_flight", "sync", "head_bits", "every_form", "calibrated", "pruned"),
    *("imbalance", "head_imbalance", "resolve", "gpu_share"),
)
"""Values that a row and its request have by the same names."""

Row = Mapping[str, Any]


def request_of(row: Row) -> RungRequest:
    """Return the request of a row."""
    rung = next((name for name in row["techniques"] if name in RUNGS), "")
    names = () if rung == NAIVE else (name.partition(":")[0] for name in row["techniques"])
    return RungRequest(
        **{name: row[name] for name in SAME},
        prompt=row["prompt_tokens"],
        decode=row["decode_tokens"],
        level=row["plan_level"],
        length_policy="online" if rung == NAIVE else row["length_policy"],
        load=None if row["gpu_load"] is None else parse_load(row["gpu_load"]),
        overrides=row["what_if"],
        rung=rung,
        left_out=tuple(row["left_out"]),
        techniques=tuple(names),  # type: ignore[arg-type]
        attention=AttentionRequest(**(row["attention"] or {})),
        experts=ExpertsRequest(row["overflow"] or "gpu"),
        **({} if row["outlier_share"] is None else {"outlier_share": row["outlier_share"]}),
    )


def rows_again(rows: Sequence[Row], jobs: int, progress: Callable[[str, int, int], None]) -> list[Row]:
    """Return the rows of the same requests by this version of the program."""
    return list(map(view, _again(rows, jobs, progress)))


def _again(rows: Sequence[Row], jobs: int, progress: Callable[[str, int, int], None]) -> list[Row]:
    return run_sweep([request_of(row) for row in rows], jobs=jobs, progress=progress, run=run_rung)


def take(name: str, jobs: int, progress: Callable[[str, int, int], None]) -> int:
    """Write rows of a file whose figures this version changes again, and return their number."""
    path = RESULTS / f"{name}.jsonl"
    kept = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    old = [view(row) for row in kept]
    changed = 0
    for at, found in enumerate(_again(old, jobs, progress)):
        if list(row_differences(name, [old[at]], [view(found)])):
            kept[at], changed = found, changed + 1
    path.write_text(lines(kept), "utf-8")
    return changed


def row_differences(name: str, old: Sequence[Row], new: Sequence[Row]) -> Iterator[str]:
    """Yield the figures of rows that are no longer the same, to the digits that tables show.

    Args:
        name: Name of the file.
        old: Its rows.
        new: The rows of the same requests.
    """
    for number, (before, after) in enumerate(zip(old, new, strict=True), 1):
        case = f"{name}, row {number} ({before['model']}, {before['plan_level']}, {before['prompt_tokens']})"
        if (before["error"] is None) != (after["error"] is None):
            yield f"{case}: {before['error'] or 'a result'} before, {after['error'] or 'a result'} now"
            continue
        for figure in FIGURES:
            texts = [_digits(row[figure]) for row in (before, after)]
            if texts[0] != texts[1]:
                yield f"{case}: {figure} {texts[0]} before, {texts[1]} now"


def cell_differences(place: str, page: str, made: str) -> Iterator[str]:
    """Yield the cells of a table that differ.

    Args:
        place: Page and name of the table.
        page: The table on the page.
        made: The table of fresh rows.
    """
    old, new = ([_cells(line) for line in text.strip().splitlines()] for text in (page, made))
    if [len(line) for line in old] != [len(line) for line in new]:
        yield f"{place}: the page has other rows or columns"
        return
    for before, after in zip(old, new, strict=True):
        for column, (one, other) in enumerate(zip(before, after, strict=True)):
            if one != other:
                yield f"{place}, {after[0]}, {new[0][column]}: {one} on the page, {other} now"


def _digits(value: float | None) -> str:
    return "none" if value is None else f"{value:.{DIGITS}g}"


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
