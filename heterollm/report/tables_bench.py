"""Tables and sentences about the rows of a bench, for terminal and page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from heterollm.base import Section
from heterollm.benchmarks import best_of, groups_of, whole_device

if TYPE_CHECKING:
    from heterollm.benchmarks import BenchRow

PHASES: Final = {"prefill": "Prefill", "decode": "Decode", "both": "Prompt and tokens"}
BOUNDS: Final = {
    "memory": "bound by reading memory",
    "compute": "bound by arithmetic",
    "overhead": "bound by neither memory nor arithmetic: launches, waits, small operators",
}
LEGEND: Final = (
    "x all: rate over that of gpu on all cores. GPU: its share of linear layers' arithmetic. pad: padded "
    "tokens on the NPU. predicted: ms, and deviation from the measured. GB/s, GFLOP/s: reached, and fraction "
    "of these processors' rates in the profile. dist.: samples while other processes computed."
)


def runs_of(rows: Sequence[BenchRow]) -> list[list[BenchRow]]:
    """Return the rows of a file run by run: one model, machine and commit, and no test twice.

    Rows of different runs did not take turns, so their differences include the machine's drift.
    """
    runs: list[tuple[tuple[object, ...], set[tuple[object, ...]], list[BenchRow]]] = []
    for row in rows:
        key: tuple[object, ...] = (
            row.run,
            row.setup.model_filename,
            row.setup.cpu_info,
            row.setup.build_commit,
            row.setup.heterollm_version,
            row.asked.seed,
        )
        if row.modelled is not None:  # a virtual clock does not drift
            key = ("simulated",)
        test = (row.test, row.label)
        found = next((run for run in reversed(runs) if run[0] == key), None)
        if found is None or (test in found[1] and row.modelled is None):
            found = (key, set(), [])
            runs.append(found)
        found[1].add(test)
        found[2].append(row)
    return [run for _, _, run in runs]


def heading(rows: Sequence[BenchRow]) -> Iterator[str]:
    """Yield the first lines of a report: model, processors, device and commit."""
    first = telling_row(rows)
    description = first.setup.description
    yield f"{first.setup.model_filename}: {first.setup.model_type or 'not loaded'}"
    if "gpu" in description:
        yield f"GPU: {description['gpu']} ({description.get('gpu_driver', '')})"
        yield f"NPU: {description.get('npu') or 'none'}"
    commit = first.setup.build_commit or "unknown"
    machine = "" if first.time_kind == "simulated" else f"; {first.setup.cpu_info}"
    yield f"Device {first.setup.device}, {first.time_kind} time{machine}; commit {commit}"


def telling_row(rows: Sequence[BenchRow]) -> BenchRow:
    """Return the row with the most facts about the device: one of heterollm's own, with an NPU."""
    own = [row for row in rows if row.engine == "self" and row.setup.device]
    return next((row for row in own if row.setup.description.get("npu")), (own or rows)[0])


def rates_section(rows: Sequence[BenchRow], title: str = "") -> Section:
    """Return the rows of one test, with their ratios to ``gpu`` on all cores if the run has that row."""
    baseline = next(
        (row for row in rows if row.usable and (row.asked.baseline or _is_whole(rows, row))), None
    )
    columns = (
        "configuration", ">tokens/s", ">±", ">x all", ">GPU", ">pad", ">predicted", ">GB/s", ">GFLOP/s",
        ">logits", ">dist.",
    )  # fmt: skip
    return Section(title, columns, tuple(_rates(row, baseline, len(columns)) for row in rows))


def _rates(row: BenchRow, baseline: BenchRow | None, columns: int) -> tuple[str, ...]:
    if row.times.median_ts is None:
        return (short_label(row), "failed", *("" for _ in range(columns - 2)))
    ratio = ""
    if baseline is not None and row.usable and row.time_kind == baseline.time_kind:
        ratio = f"{row.times.median_ts / (baseline.times.median_ts or 1):.2f}"
    return (
        short_label(row),
        f"{row.times.median_ts:.1f}",
        "" if len(row.times.samples_ns) < 2 else f"{(row.times.stddev_ts or 0.0) / row.times.median_ts:.0%}",
        ratio,
        _percent(row.account.gpu_share),
        "" if row.account.padded_tokens is None else str(row.account.padded_tokens),
        _predicted(row),
        _rate(row.account.achieved_gbps, row.account.gbps_fraction),
        _rate(row.account.achieved_gflops, row.account.gflops_fraction),
        _quality(row),
        "" if row.times.disturbed_fraction is None else _percent(row.times.disturbed_fraction),
    )


def traces_section(rows: Sequence[BenchRow]) -> Section:
    """Return the traced runs: busy times of each processor, overlap, and synchronisations."""
    columns = (
        "test", "configuration", ">wall ms", ">GPU", ">NPU", ">both", ">overlap", ">syncs", ">ms",
    )  # fmt: skip
    cells = (
        (
            row.test,
            row.label,
            _ms(row.trace.traced_ms),
            _ms(row.trace.gpu_busy_ms),
            _ms(row.trace.npu_busy_ms),
            _ms(row.trace.overlap_ms),
            _percent(row.trace.overlap_fraction),
            str(row.trace.hand_overs or 0),
            _ms(row.trace.hand_over_ms),
        )
        for row in rows
    )
    return Section("One traced run of each", columns, tuple(cells))


def operators_section(row: BenchRow) -> Section:
    """Return the operators of a traced run by time."""
    columns = ("on", "operator", ">runs", ">ms", ">GB/s", ">GFLOP/s")
    cells = []
    for item in row.trace.operators or ():
        rates = ("" if rate is None else f"{rate:.1f}" for rate in (item.gbps, item.gflops))
        count = "" if item.count is None else str(item.count)
        cells.append((item.part, item.operator, count, f"{item.time_ms:.2f}", *rates))
    return Section(f"Operators of {row.test}, {row.label}", columns, tuple(cells))


def short_label(row: BenchRow) -> str:
    """Return a row's label without the precision, which is in the table's title."""
    return row.label.replace(f" {row.precision}", "", 1).removesuffix(" threads")


def most_telling(rows: Sequence[BenchRow]) -> Iterator[BenchRow]:
    """Yield the fastest configuration of each phase's first test that uses the NPU, else the fastest."""
    seen: set[str] = set()
    for row in rows:
        if row.phase in seen:
            continue
        seen.add(row.phase)
        alike = [other for other in rows if (other.test, other.precision) == (row.test, row.precision)]
        chosen = best_of([other for other in alike if other.trace.npu_busy_ms and other.usable]) or best_of(
            alike
        )
        if chosen is not None:
            yield chosen


def bounds(rows: Sequence[BenchRow]) -> Iterator[str]:
    """Yield for each phase the bound of heterollm's fastest configuration, by the profile's ceilings."""
    for (test, precision), group in groups_of(rows).items():
        known = [row for row in group if row.usable and row.account.bound is not None]
        best = best_of(known)
        if best is None or best.account.bound is None:
            continue
        rates = best.account
        yield (
            f"{PHASES[best.phase]} ({test} {precision}, {best.label}): {BOUNDS[best.account.bound]}; "
            f"{rates.achieved_gbps:.1f} of {rates.ceiling_gbps:.1f} GB/s, "
            f"{rates.achieved_gflops:.0f} of {rates.ceiling_gflops:.0f} GFLOP/s in these processors' profile."
        )


def energy_words(rows: Sequence[BenchRow]) -> str:
    """Return a sentence about the source of energies."""
    words = {
        "absent": "absent, as this system has no readable counter",
        "measured": "measured, of the whole processor package",
        "modelled": "modelled, the middle of the range that the SoC's parameters allow",
    }
    kinds = dict.fromkeys(row.account.energy for row in rows if row.times.samples_ns) or {"absent": None}
    return f"Energy: {'; '.join(words.get(kind, kind) for kind in kinds)}."


def lacking_words(rows: Sequence[BenchRow]) -> Iterator[str]:
    """Yield reasons for missing predictions and ceilings, and the engines' remarks, each text once."""
    own = dict.fromkeys(row.label for row in rows if row.engine == "self")
    lacking: dict[str, dict[str, dict[str, None]]] = {}
    for field, what in (("predicted_ms", "prediction"), ("ceilings", "ceilings")):
        for row in rows:
            reason = row.reasons.get(field)
            if reason and row.engine == "self":
                lacking.setdefault(reason, {}).setdefault(what, {})[row.label] = None
    for reason, found in lacking.items():
        kinds: dict[tuple[str, ...], list[str]] = {}
        for what, labels in found.items():
            kinds.setdefault(tuple(labels), []).append(what)
        for names, lacked in kinds.items():
            of = "" if len(own) > 1 and names == tuple(own) else f" of {', '.join(names)}"
            yield f"No {' and no '.join(lacked)}{of}: {reason}"
    remarks: dict[str, dict[str, None]] = {}
    for row in rows:
        for text in row.notes:
            remarks.setdefault(text, {})[row.label] = None
    every = dict.fromkeys(row.label for row in rows)
    for text, labels in remarks.items():
        yield text if len(every) > 1 and labels.keys() == every.keys() else f"{', '.join(labels)}: {text}"


def _is_whole(rows: Sequence[BenchRow], row: BenchRow) -> bool:
    return any(whole_device(rows, other) is row for other in rows if other.asked.npu_threads)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _predicted(row: BenchRow) -> str:
    if row.account.predicted_ms is None or row.times.measured_ms is None:
        return ""
    return f"{row.account.predicted_ms:.1f} ({row.account.predicted_ms / row.times.measured_ms - 1:+.0%})"


def _rate(value: float | None, fraction: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" + ("" if fraction is None else f" ({fraction:.0%})")


def _quality(row: BenchRow) -> str:
    if row.quality.quality_passed is None:
        return ""
    return "equal" if row.quality.logits_sqnr_db is None else f"{row.quality.logits_sqnr_db:.0f} dB"
