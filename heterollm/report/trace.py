"""Traces on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from heterollm.report.console import note, table
from heterollm.trace import OperatorTime, Trace, TraceSummary, summarise_phases

OPERATORS: Final = 14
"""Rows of the table of operators; the other operators take little time."""


def trace_report(trace: Trace) -> Group:
    """Return the tables of a trace: each phase in numbers, then where its time went."""
    kind = f"{trace.time_kind} time"
    parts: list[RenderableType] = [
        Text(f"{trace.device}, plan {trace.plan}, {trace.precision}; {kind}"),
    ]
    phases = summarise_phases(trace)
    if not phases:
        parts.append(Text("No pass was recorded."))
    else:
        parts += [
            _phase_table(phases, kind),
            _share_table(
                f"Engine thread, {kind}: adds up to the wall",
                {name: (one.engine_us, one.wall_us) for name, one in phases.items()},
                "activity",
            ),
            _share_table(
                f"Critical path, {kind}: adds up to the passes",
                {name: (one.critical_us, one.passes_us) for name, one in phases.items()},
                "waiting for",
            ),
        ]
        parts += [_operator_table(name, summary, kind) for name, summary in phases.items()]
        parts += [Text(f"• {name}: {summary_text(summary)}") for name, summary in phases.items()]
    uncertainty = trace.clock_uncertainty_us
    if uncertainty:
        parts.append(note(f"Kernels may be shifted by {uncertainty:.1f} us against the rest."))
    parts += [note(text) for text in trace.notes]
    return Group(*parts)


def summary_text(summary: TraceSummary) -> str:
    """Return the overlap of GPU and NPU and the cost of synchronisation, in words."""
    if not summary.npu_busy_us:
        return "the GPU computed alone."
    overlap = f"{summary.overlap_fraction:.0%} of the shorter busy time"
    if not summary.overlap_us:
        together = "GPU and NPU never worked at once"
    else:
        together = f"GPU and NPU worked at once for {summary.overlap_us / 1e3:.2f} ms, {overlap}"
    share = summary.hand_over_us / summary.passes_us if summary.passes_us else 0.0
    changes = f"{summary.hand_overs} synchronisations cost {summary.hand_over_us / 1e3:.2f} ms"
    return f"{together}; {changes}, {share:.0%} of the passes."


# -- tables ------------------------------------------------------------------------------------------


def _phase_table(phases: Mapping[str, TraceSummary], kind: str) -> Table:
    made = table("", *(f">{name}" for name in phases), title=f"Passes, {kind}")

    def add(what: str, cell: Callable[[TraceSummary], str]) -> None:
        made.add_row(what, *(cell(summary) for summary in phases.values()))

    def add_time(what: str, time_us: Callable[[TraceSummary], float]) -> None:
        add(what, lambda one: f"{time_us(one) / 1e3:.2f} {_share(time_us(one), one.passes_us)}")

    add("passes", lambda one: f"{one.passes}" + (f" ({one.failed} failed)" if one.failed else ""))
    add("tokens", lambda one: str(one.tokens))
    add_time("ms", lambda one: one.passes_us)
    add_time("GPU busy", lambda one: one.gpu_busy_us)
    add_time("GPU idle", lambda one: one.gpu_idle_us)
    add_time("NPU busy", lambda one: one.npu_busy_us)
    add_time("NPU idle (bubbles)", lambda one: one.npu_idle_us)
    add_time("both busy", lambda one: one.overlap_us)
    add_time("both idle", lambda one: one.both_idle_us)
    add_time("synchronisation, critical path", lambda one: one.hand_over_us)
    return made


def _share_table(title: str, found: Mapping[str, tuple[Mapping[str, float], float]], what: str) -> Table:
    """Return a table of times by name, a column for each phase, the longest first."""
    made = table(what, *(f">{name} ms" for name in found), title=title)
    totals: dict[str, float] = {}
    for times, whole_us in found.values():
        for name, time_us in times.items():
            totals[name] = totals.get(name, 0.0) + time_us / max(whole_us, 1e-3)
    for name in sorted(totals, key=lambda name: -totals[name]):
        cells = []
        for times, whole_us in found.values():
            own_us = times.get(name)
            cells.append("" if own_us is None else f"{own_us / 1e3:.2f} {_share(own_us, whole_us)}")
        made.add_row(name, *cells)
    made.add_section()
    made.add_row("all", *(f"{whole_us / 1e3:.2f} {_share(1, 1)}" for _, whole_us in found.values()))
    return made


def _operator_table(name: str, summary: TraceSummary, kind: str) -> Table:
    title = f"Operators of {name}, {kind}"
    made = table("on", "operator", "kind", ">runs", ">ms", ">us a run", ">GB/s", ">GFLOP/s", title=title)
    for row in summary.operators[:OPERATORS]:
        made.add_row(*_operator_cells(row))
    left = summary.operators[OPERATORS:]
    if left:
        total_us = sum(row.time_us for row in left)
        made.add_row("", f"{len(left)} more", "", "", f"{total_us / 1e3:.2f}", "", "", "")
    return made


def _operator_cells(row: OperatorTime) -> tuple[str, ...]:
    return (
        row.track.upper(),
        row.operator,
        row.category,
        str(row.count),
        f"{row.time_us / 1e3:.2f}",
        f"{row.time_us / row.count:.1f}",
        "" if row.gbps is None else f"{row.gbps:.3g}",
        "" if row.gflops is None else f"{row.gflops:.3g}",
    )


def _share(time_us: float, whole_us: float) -> str:
    share = time_us / whole_us if whole_us else 0.0
    return f"{share:>4.0%}"
