"""Benches on the terminal: rows, bars, what bounds each phase, and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from heterollm.benchmarks import best_of, groups_of, verdicts
from heterollm.report.console import note, section_table
from heterollm.report.tables_bench import (
    LEGEND,
    bounds,
    energy_words,
    heading,
    lacking_words,
    most_telling,
    operators_section,
    rates_section,
    short_label,
    traces_section,
)

if TYPE_CHECKING:
    from heterollm.base import Section
    from heterollm.benchmarks import BenchResult, BenchRow

__all__ = ["bars", "bench_report", "bench_reports", "rows_table"]

BAR_WIDTH: Final = 40


def bench_report(result: BenchResult) -> RenderableType:
    """Return the report of a bench."""
    rows = result.rows
    parts: list[RenderableType] = [Text(line) for line in heading(rows)]
    for (test, precision), group in groups_of(rows).items():
        parts += [Text(), rows_table(group, title=f"{test}, {precision}")]
        for kind in dict.fromkeys(row.time_kind for row in group if row.usable):
            drawn = [row for row in group if row.usable and row.time_kind == kind]
            if len(drawn) > 1:
                parts.append(Padding(bars(drawn), (0, 0, 0, 2)))
    traced = [row for row in rows if row.trace.traced_ms is not None]
    if traced:
        parts += [Text(), _tightened(traces_section(traced))]
        parts += [_tightened(operators_section(row)) for row in most_telling(traced)]
    bound = list(bounds(rows))
    if bound:
        parts += [Text(), Text("What bounds each phase", "bold")]
        parts += [Text(f"• {line}") for line in bound]
    parts += [Text(), Text("Verdict", "bold")]
    parts += [Text(f"• {line}") for line in verdicts(rows)]
    failed = {f"{row.label}: {row.error}": None for row in rows if row.error}
    if failed:
        parts += [Text(), Text("Failed", "bold red")]
        parts += [Text(f"• {line}") for line in failed]
    remarks = (LEGEND, energy_words(rows), *lacking_words(rows))
    parts += [Text()] + [note(text) for text in dict.fromkeys([*result.notes, *remarks])]
    return Group(*parts)


def bench_reports(results: Sequence[BenchResult]) -> RenderableType:
    """Return the reports of some runs, which did not share rounds."""
    parts: list[RenderableType] = []
    for place, result in enumerate(results):
        if len(results) > 1:
            parts += [Text(), Text(f"Run {place + 1} of {len(results)}", "bold underline")]
        parts.append(bench_report(result))
    return Group(*parts)


def rows_table(rows: Sequence[BenchRow], *, title: str = "") -> Table:
    """Return the rows of one test, with the ratio to ``gpu`` on all cores where it was measured."""
    made = _tightened(rates_section(rows, title))
    for place, row in enumerate(rows):
        if row.times.median_ts is None or row.quality.quality_passed is False:
            made.rows[place].style = "red"
    return made


def _tightened(section: Section) -> Table:
    """Return a table that saves room: labels may wrap, numbers may not."""
    made = section_table(section)
    made.pad_edge, made.collapse_padding = False, True
    for column in made.columns:
        column.no_wrap = column.header != "configuration"
    return made


def bars(rows: Sequence[BenchRow]) -> Text:
    """Return a bar for each row, as long as its rate."""
    longest = max(row.times.median_ts or 0.0 for row in rows)
    width = max(len(short_label(row)) for row in rows)
    best = best_of(rows)
    text = Text()
    for row in rows:
        rate = row.times.median_ts or 0.0
        filled = round(BAR_WIDTH * rate / longest) if longest else 0
        text.append(f"{short_label(row):<{width}} ")
        text.append("█" * filled, "green" if row is best else "cyan")
        text.append(f" {rate:.1f}\n")
    text.rstrip()
    return text
