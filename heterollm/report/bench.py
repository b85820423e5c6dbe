"""Benches on the terminal: rows, bars, the bound of each phase, and a verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from rich.bar import Bar
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from heterollm.benchmarks import best_of, groups_of, verdicts
from heterollm.report.console import note, section_table
from heterollm.report.simulate import sweep_report
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
    from heterollm.benchmarks import BenchResult, BenchRow

BAR_WIDTH: Final = 40


def bench_report(result: BenchResult) -> RenderableType:
    """Return the report of a bench."""
    rows = [row for row in result.rows if row.modelled is None]
    if len(rows) < len(result.rows):
        return sweep_report(result.rows)
    parts: list[RenderableType] = [Text(line) for line in heading(rows)]
    for (test, precision), group in groups_of(rows).items():
        parts += [Text(), rows_table(group, title=f"{test}, {precision}")]
        for kind in dict.fromkeys(row.time_kind for row in group if row.usable):
            drawn = [row for row in group if row.usable and row.time_kind == kind]
            if len(drawn) > 1:
                parts.append(Padding(bars(drawn), (0, 0, 0, 2)))
    traced = [row for row in rows if row.trace.traced_ms is not None]
    if traced:
        parts += [Text(), section_table(traces_section(traced))]
        parts += [section_table(operators_section(row)) for row in most_telling(traced)]
    failed = dict.fromkeys(f"{row.label}: {row.error}" for row in rows if row.error)
    for title, style, lines in (
        ("What bounds each phase", "bold", list(bounds(rows))),
        ("Verdict", "bold", verdicts(rows)),
        ("Failed", "bold red", list(failed)),
    ):
        if lines:
            parts += [Text(), Text(title, style), *(Text(f"• {line}") for line in lines)]
    remarks = (LEGEND, energy_words(rows), *lacking_words(rows))
    parts += [Text()] + [note(text) for text in dict.fromkeys([*result.notes, *remarks])]
    return Group(*parts)


def bench_reports(results: Sequence[BenchResult]) -> RenderableType:
    """Return the reports of several runs; their samples did not take turns."""
    parts: list[RenderableType] = []
    for place, result in enumerate(results):
        if len(results) > 1:
            parts += [Text(), Text(f"Run {place + 1} of {len(results)}", "bold underline")]
        parts.append(bench_report(result))
    return Group(*parts)


def rows_table(rows: Sequence[BenchRow], *, title: str = "") -> Table:
    """Return the rows of one test, with their ratios to ``gpu`` on all cores if the run has that row."""
    made = section_table(rates_section(rows, title))
    for place, row in enumerate(rows):
        if row.times.median_ts is None or row.quality.quality_passed is False:
            made.rows[place].style = "red"
    return made


def bars(rows: Sequence[BenchRow]) -> Table:
    """Return a bar for each row, as long as its rate."""
    rates = [row.times.median_ts or 0.0 for row in rows]
    best = best_of(rows)
    made = Table.grid(padding=(0, 1))
    made.add_column(overflow="fold")
    made.add_column(max_width=BAR_WIDTH)
    made.add_column(justify="right", no_wrap=True)
    for row, rate in zip(rows, rates, strict=True):
        bar = Bar(max(rates) or 1.0, 0, rate, color="green" if row is best else "cyan")
        made.add_row(short_label(row), bar, f"{rate:.1f}")
    return made
