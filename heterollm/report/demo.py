"""The demonstration on the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from heterollm.benchmarks import groups_of
from heterollm.report.bench import rows_table
from heterollm.report.console import note

if TYPE_CHECKING:
    from heterollm.benchmarks import DemoResult, DemoWorkload

__all__ = ["demo_report"]


def demo_report(result: DemoResult) -> Group:
    """Return the tables of the plan levels, the verdicts and the notes."""
    device = result.device
    parts: list[RenderableType] = [
        Text(f"GPU: {device['gpu']} ({device['gpu_driver']}){_threads(device['gpu_threads'])}"),
        Text(f"NPU: {device['npu']}{_threads(device['npu_threads'])}"),
        Text(f"Device {device['device']}, {result.time} time"),
        Text(),
    ]
    for workload in result.workloads:
        parts += [*_tables(workload), *(Text(f"• {verdict}") for verdict in workload.verdicts), Text()]
    agreement = "write the same text" if result.levels_agree else "do NOT write the same text"
    parts.append(Text(f"• All plan levels {agreement}, token by token, when they take the likeliest token."))
    notes = dict.fromkeys([*result.notes, *(text for item in result.workloads for text in item.bench.notes)])
    parts += [Padding(note(text), (0, 0, 0, 2)) for text in notes]
    return Group(*parts)


def _threads(count: object) -> str:
    """Return the threads of a processor in words; a modelled one has none."""
    return f", {count} thread(s)" if count else ""


def _tables(workload: DemoWorkload) -> Iterator[RenderableType]:
    for (test, precision), rows in groups_of(workload.bench.rows).items():
        yield rows_table(rows, title=f"{workload.name}, {test}, {precision}")
