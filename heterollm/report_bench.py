"""Benches on the terminal: rows, bars, what bounds each phase, and a verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from heterollm.benchmarks.verdict import best_of, groups_of, verdicts, whole_device
from heterollm.report import note, table

if TYPE_CHECKING:
    from heterollm.benchmarks.rows import BenchRow
    from heterollm.benchmarks.run import BenchResult

__all__ = ["bars", "bench_report", "operators_table", "rows_table", "traces_table"]

BAR_WIDTH: Final = 40
PHASES: Final = {"prefill": "Prefill", "decode": "Decode", "both": "Prompt and tokens"}
BOUNDS: Final = {
    "memory": "bound by reading memory",
    "compute": "bound by arithmetic",
    "overhead": "bound by neither memory nor arithmetic: launches, waits, small operators",
}


def bench_report(result: BenchResult) -> RenderableType:
    """Return everything that a bench found."""
    rows = result.rows
    parts: list[RenderableType] = [Text(line) for line in _heading(rows)]
    for (test, precision), group in groups_of(rows).items():
        parts += [Text(), rows_table(group, title=f"{test}, {precision}")]
        for kind in dict.fromkeys(row.time_kind for row in group if row.usable):
            drawn = [row for row in group if row.usable and row.time_kind == kind]
            if len(drawn) > 1:
                parts.append(Padding(bars(drawn), (0, 0, 0, 2)))
    traced = [row for row in rows if row.traced_ms is not None]
    if traced:
        parts += [Text(), traces_table(traced)]
        parts += [operators_table(row) for row in _most_telling(traced)]
    bounds = list(_bounds(rows))
    if bounds:
        parts += [Text(), Text("What bounds each phase", "bold")]
        parts += [Text(f"• {line}") for line in bounds]
    parts += [Text(), Text("Verdict", "bold")]
    parts += [Text(f"• {line}") for line in verdicts(rows)]
    failed = {f"{row.label}: {row.error}": None for row in rows if row.error}
    if failed:
        parts += [Text(), Text("Failed", "bold red")]
        parts += [Text(f"• {line}") for line in failed]
    parts += [Text()] + [note(text) for text in dict.fromkeys([*result.notes, *_remarks(rows)])]
    return Group(*parts)


def rows_table(rows: Sequence[BenchRow], *, title: str = "") -> Table:
    """Return the rows of one test, with the ratio to ``gpu`` on all cores where it was measured."""
    baseline = next((row for row in rows if row.usable and (row.baseline or _is_whole(rows, row))), None)
    made = table(
        "configuration", ">tokens/s", ">±", ">x all", ">GPU", ">pad", ">predicted", ">GB/s", ">GFLOP/s",
        ">logits", ">dist.",
        title=title,
    )  # fmt: skip
    _tighten(made)
    for row in rows:
        if row.median_ts is None:
            made.add_row(short_label(row), Text("failed", "red"))
            continue
        ratio = ""
        if baseline is not None and row.usable and row.time_kind == baseline.time_kind:
            ratio = f"{row.median_ts / (baseline.median_ts or 1):.2f}"
        made.add_row(
            short_label(row),
            f"{row.median_ts:.1f}",
            f"{(row.stddev_ts or 0.0) / row.median_ts:.0%}",
            ratio,
            _percent(row.gpu_share),
            "" if row.padded_tokens is None else str(row.padded_tokens),
            _predicted(row),
            _rate(row.achieved_gbps, row.gbps_fraction),
            _rate(row.achieved_gflops, row.gflops_fraction),
            _quality(row),
            "" if row.disturbed_fraction is None else _percent(row.disturbed_fraction),
        )
    return made


def traces_table(rows: Sequence[BenchRow]) -> Table:
    """Return what one traced run of each test showed: how long each part worked, both, and hand-overs."""
    made = table(
        "test", "configuration", ">wall ms", ">GPU", ">NPU", ">both", ">overlap", ">hand-overs", ">ms",
        title="One traced run of each",
    )  # fmt: skip
    _tighten(made)
    for row in rows:
        made.add_row(
            row.test,
            row.label,
            _ms(row.traced_ms),
            _ms(row.gpu_busy_ms),
            _ms(row.npu_busy_ms),
            _ms(row.overlap_ms),
            _percent(row.overlap_fraction),
            str(row.hand_overs or 0),
            _ms(row.hand_over_ms),
        )
    return made


def operators_table(row: BenchRow) -> Table:
    """Return where the time of a traced run went, operator by operator."""
    made = table(
        "part", "operator", ">runs", ">ms", ">GB/s", ">GFLOP/s", title=f"Operators of {row.test}, {row.label}"
    )
    for item in row.operators or ():
        rates = ["" if item[name] is None else f"{item[name]:.1f}" for name in ("gbps", "gflops")]
        made.add_row(item["part"], item["operator"], str(item["count"]), _ms(item["time_ms"]), *rates)
    return made


def _tighten(made: Table) -> None:
    """Save room: labels may wrap, numbers may not."""
    made.pad_edge, made.collapse_padding = False, True
    for column in made.columns:
        column.no_wrap = column.header != "configuration"


def short_label(row: BenchRow) -> str:
    """Return a row's label without the precision, which stands over the table."""
    return row.label.replace(f" {row.precision}", "", 1).removesuffix(" threads")


def bars(rows: Sequence[BenchRow]) -> Text:
    """Return a bar for each row, as long as its rate."""
    longest = max(row.median_ts or 0.0 for row in rows)
    width = max(len(short_label(row)) for row in rows)
    best = best_of(rows)
    text = Text()
    for row in rows:
        rate = row.median_ts or 0.0
        filled = round(BAR_WIDTH * rate / longest) if longest else 0
        text.append(f"{short_label(row):<{width}} ")
        text.append("█" * filled, "green" if row is best else "cyan")
        text.append(f" {rate:.1f}\n")
    text.rstrip()
    return text


def _most_telling(rows: Sequence[BenchRow]) -> Iterator[BenchRow]:
    """Yield the fastest configuration of each phase's first test that uses the NPU, else the fastest."""
    seen: set[str] = set()
    for row in rows:
        if row.phase in seen:
            continue
        seen.add(row.phase)
        alike = [other for other in rows if (other.test, other.precision) == (row.test, row.precision)]
        chosen = best_of([other for other in alike if other.npu_busy_ms and other.usable]) or best_of(alike)
        if chosen is not None:
            yield chosen


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _heading(rows: Sequence[BenchRow]) -> Iterator[str]:
    first = next((row for row in rows if row.engine == "self" and row.device), rows[0])
    description = first.description
    yield f"{first.model_filename}: {first.model_type or 'not loaded'}"
    if "gpu" in description:
        yield f"GPU part: {description['gpu']} ({description.get('gpu_driver', '')})"
        yield f"NPU part: {description.get('npu') or 'none'}"
    commit = first.build_commit or "unknown"
    yield f"Device {first.device}, {first.time_kind} time; {first.cpu_info}; commit {commit}"


def _is_whole(rows: Sequence[BenchRow], row: BenchRow) -> bool:
    return any(whole_device(rows, other) is row for other in rows if other.npu_threads)


def _bounds(rows: Sequence[BenchRow]) -> Iterator[str]:
    """Say for each phase what bounds the fastest configuration of its own, by the profile's ceilings."""
    for (test, precision), group in groups_of(rows).items():
        known = [row for row in group if row.usable and row.bound is not None]
        best = best_of(known)
        if best is None or best.bound is None:
            continue
        yield (
            f"{PHASES[best.phase]} ({test} {precision}, {best.label}): {BOUNDS[best.bound]}; "
            f"{best.achieved_gbps:.1f} of {best.ceiling_gbps:.1f} GB/s, "
            f"{best.achieved_gflops:.0f} of {best.ceiling_gflops:.0f} GFLOP/s that these parts reached."
        )


def _remarks(rows: Sequence[BenchRow]) -> Iterator[str]:
    yield (
        "x all: times the rate of gpu on all cores. GPU: its share of linear layers' arithmetic. pad: rows "
        "past the end that the NPU computes. predicted: ms, and how far from the measured. GB/s, GFLOP/s: "
        "reached, and of what these parts reached in the profile. dist.: samples while others computed."
    )
    if any(row.energy == "absent" for row in rows):
        yield "Energy: absent, as this system lets nobody read a counter of it."
    else:
        yield "Energy: measured, of the whole processor package."
    for field, what in (("predicted_ms", "prediction"), ("ceilings", "ceilings")):
        lacking: dict[str, dict[str, None]] = {}
        for row in rows:
            reason = row.reasons.get(field)
            if reason and row.engine == "self":
                lacking.setdefault(reason, {})[row.label] = None
        for reason, labels in lacking.items():
            yield f"No {what} of {', '.join(labels)}: {reason}"
    for row in rows:
        for text in row.notes:
            yield f"{row.label}: {text}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _predicted(row: BenchRow) -> str:
    if row.predicted_ms is None or row.measured_ms is None:
        return ""
    return f"{row.predicted_ms:.1f} ({row.predicted_ms / row.measured_ms - 1:+.0%})"


def _rate(value: float | None, fraction: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" + ("" if fraction is None else f" ({fraction:.0%})")


def _quality(row: BenchRow) -> Text:
    if row.quality_passed is None:
        return Text("")
    words = "equal" if row.logits_sqnr_db is None else f"{row.logits_sqnr_db:.0f} dB"
    return Text(words, "" if row.quality_passed else "red")
