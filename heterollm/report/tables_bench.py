"""Tables and sentences about the rows of a bench, for the terminal and for the page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from heterollm.base import Section
from heterollm.benchmarks import best_of, groups_of, whole_device

if TYPE_CHECKING:
    from heterollm.benchmarks import BenchRow

__all__ = [
    "LEGEND",
    "bounds",
    "energy_words",
    "heading",
    "lacking_words",
    "most_telling",
    "operators_section",
    "rates_section",
    "runs_of",
    "short_label",
    "telling_row",
    "traces_section",
]

PHASES: Final = {"prefill": "Prefill", "decode": "Decode", "both": "Prompt and tokens"}
BOUNDS: Final = {
    "memory": "bound by reading memory",
    "compute": "bound by arithmetic",
    "overhead": "bound by neither memory nor arithmetic: launches, waits, small operators",
}
LEGEND: Final = (
    "x all: times the rate of gpu on all cores. GPU: its share of linear layers' arithmetic. pad: rows "
    "past the end that the NPU computes. predicted: ms, and how far from the measured. GB/s, GFLOP/s: "
    "reached, and the share of the profile's best rate. dist.: samples while other programs computed."
)


def runs_of(rows: Sequence[BenchRow]) -> list[list[BenchRow]]:
    """Return the rows of a file run by run: those of one model, machine and commit whose tests do not repeat.

    Rows of different runs did not take turns, so that a machine's drift is among their differences.
    """
    runs: list[tuple[tuple[object, ...], set[tuple[object, ...]], list[BenchRow]]] = []
    for row in rows:
        key = (row.run, row.model_filename, row.cpu_info, row.build_commit, row.heterollm_version, row.seed)
        test = (row.test, row.label)
        found = next((run for run in reversed(runs) if run[0] == key), None)
        if found is None or test in found[1]:
            found = (key, set(), [])
            runs.append(found)
        found[1].add(test)
        found[2].append(row)
    return [run for _, _, run in runs]


def heading(rows: Sequence[BenchRow]) -> Iterator[str]:
    """Yield model, parts, device and commit of the rows."""
    first = telling_row(rows)
    description = first.description
    yield f"{first.model_filename}: {first.model_type or 'not loaded'}"
    if "gpu" in description:
        yield f"GPU part: {description['gpu']} ({description.get('gpu_driver', '')})"
        yield f"NPU part: {description.get('npu') or 'none'}"
    commit = first.build_commit or "unknown"
    machine = "" if first.time_kind == "simulated" else f"; {first.cpu_info}"
    yield f"Device {first.device}, {first.time_kind} time{machine}; commit {commit}"


def telling_row(rows: Sequence[BenchRow]) -> BenchRow:
    """Return the row with the fullest description of the device: heterollm's own, with both parts."""
    own = [row for row in rows if row.engine == "self" and row.device]
    return next((row for row in own if row.description.get("npu")), (own or rows)[0])


def rates_section(rows: Sequence[BenchRow], title: str = "") -> Section:
    """Return the rows of one test, with the ratio to ``gpu`` on all cores where it was measured."""
    baseline = next((row for row in rows if row.usable and (row.baseline or _is_whole(rows, row))), None)
    columns = (
        "configuration", ">tokens/s", ">±", ">x all", ">GPU", ">pad", ">predicted", ">GB/s", ">GFLOP/s",
        ">logits", ">dist.",
    )  # fmt: skip
    return Section(title, columns, tuple(_rates(row, baseline, len(columns)) for row in rows))


def _rates(row: BenchRow, baseline: BenchRow | None, columns: int) -> tuple[str, ...]:
    if row.median_ts is None:
        return (short_label(row), "failed", *("" for _ in range(columns - 2)))
    ratio = ""
    if baseline is not None and row.usable and row.time_kind == baseline.time_kind:
        ratio = f"{row.median_ts / (baseline.median_ts or 1):.2f}"
    return (
        short_label(row),
        f"{row.median_ts:.1f}",
        "" if len(row.samples_ns) < 2 else f"{(row.stddev_ts or 0.0) / row.median_ts:.0%}",
        ratio,
        _percent(row.gpu_share),
        "" if row.padded_tokens is None else str(row.padded_tokens),
        _predicted(row),
        _rate(row.achieved_gbps, row.gbps_fraction),
        _rate(row.achieved_gflops, row.gflops_fraction),
        _quality(row),
        "" if row.disturbed_fraction is None else _percent(row.disturbed_fraction),
    )


def traces_section(rows: Sequence[BenchRow]) -> Section:
    """Return the times of one traced run of each test: each part, both at once, and hand-overs."""
    columns = (
        "test", "configuration", ">wall ms", ">GPU", ">NPU", ">both", ">overlap", ">hand-overs", ">ms",
    )  # fmt: skip
    cells = (
        (
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
        for row in rows
    )
    return Section("One traced run of each", columns, tuple(cells))


def operators_section(row: BenchRow) -> Section:
    """Return where the time of a traced run went, operator by operator."""
    columns = ("part", "operator", ">runs", ">ms", ">GB/s", ">GFLOP/s")
    cells = []
    for item in row.operators or ():
        rates = [_plain(item.get(name), ".1f") for name in ("gbps", "gflops")]
        names = (str(item["part"]), str(item["operator"]), str(item.get("count", "")))
        cells.append((*names, _plain(item["time_ms"], ".2f"), *rates))
    return Section(f"Operators of {row.test}, {row.label}", columns, tuple(cells))


def short_label(row: BenchRow) -> str:
    """Return a row's label without the precision, which stands over the table."""
    return row.label.replace(f" {row.precision}", "", 1).removesuffix(" threads")


def most_telling(rows: Sequence[BenchRow]) -> Iterator[BenchRow]:
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


def bounds(rows: Sequence[BenchRow]) -> Iterator[str]:
    """Yield the bound of the fastest configuration of each phase, by the profile's ceilings."""
    for (test, precision), group in groups_of(rows).items():
        known = [row for row in group if row.usable and row.bound is not None]
        best = best_of(known)
        if best is None or best.bound is None:
            continue
        yield (
            f"{PHASES[best.phase]} ({test} {precision}, {best.label}): {BOUNDS.get(best.bound, best.bound)}; "
            f"{best.achieved_gbps:.1f} of {best.ceiling_gbps:.1f} GB/s, "
            f"{best.achieved_gflops:.0f} of {best.ceiling_gflops:.0f} GFLOP/s that these parts reached."
        )


def energy_words(rows: Sequence[BenchRow]) -> str:
    """Say whether energy was measured."""
    words = {
        "absent": "absent, as this system has no readable counter of it",
        "measured": "measured, of the whole processor package",
        "modelled": "modelled, the middle of the range that the SoC's parameters allow for",
    }
    kinds = dict.fromkeys(row.energy for row in rows if row.samples_ns) or {"absent": None}
    return f"Energy: {'; '.join(words.get(kind, kind) for kind in kinds)}."


def lacking_words(rows: Sequence[BenchRow]) -> Iterator[str]:
    """Yield the values that heterollm's own rows lack, with reasons, and the notes of their engines."""
    for field, what in (("predicted_ms", "prediction"), ("ceilings", "ceilings")):
        lacking: dict[str, dict[str, None]] = {}
        for row in rows:
            reason = row.reasons.get(field)
            if reason and row.engine == "self":
                lacking.setdefault(reason, {})[row.label] = None
        for reason, labels in lacking.items():
            yield f"No {what} of {', '.join(labels)}: {reason}"
    remarks: dict[str, dict[str, None]] = {}
    for row in rows:
        for text in row.notes:
            remarks.setdefault(text, {})[row.label] = None
    for text, labels in remarks.items():
        yield f"{', '.join(labels)}: {text}"


def _is_whole(rows: Sequence[BenchRow], row: BenchRow) -> bool:
    return any(whole_device(rows, other) is row for other in rows if other.npu_threads)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _plain(value: Any, form: str) -> str:  # noqa: ANN401 - a value of a file
    return format(float(value), form) if isinstance(value, int | float) else ""


def _predicted(row: BenchRow) -> str:
    if row.predicted_ms is None or row.measured_ms is None:
        return ""
    return f"{row.predicted_ms:.1f} ({row.predicted_ms / row.measured_ms - 1:+.0%})"


def _rate(value: float | None, fraction: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" + ("" if fraction is None else f" ({fraction:.0%})")


def _quality(row: BenchRow) -> str:
    if row.quality_passed is None:
        return ""
    return "equal" if row.logits_sqnr_db is None else f"{row.logits_sqnr_db:.0f} dB"
