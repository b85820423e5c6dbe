"""The tables of a profile, for the terminal and for the page."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from msgspec import structs

from heterollm.base import Section, format_bytes, format_duration, format_moment
from heterollm.model import ALL_GROUPS
from heterollm.profiler import GraphRow, LinearRow, ProfileSummary, RecordTimes, RunRow
from heterollm.profiler.records import LinearPoint
from heterollm.report.tables_npu import npu_sections

MOST_TOKEN_COLUMNS: Final = 8
TOKEN_COLUMNS: Final = (1, 8, 32, 64, 128, 256, 512, 1024)
LISTED_FAILURES: Final = 20
PROCESSORS: Final = {"gpu": "GPU", "npu": "NPU"}

DOUBTFUL: Final = " !"
"""Mark of a figure whose samples lie far apart, or that lies far off its neighbours."""

FACTS: Final = {
    "gpu": "GPU",
    "gpu_driver": "GPU driver",
    "npu": "NPU",
    "npu_versions": "NPU versions",
    "gpu_threads": "GPU threads",
    "npu_threads": "NPU threads",
    "activation_dtype": "activations",
}


def sections(summary: ProfileSummary, *, everything: bool = False) -> Iterator[Section]:
    """Yield the tables of a profile.

    Args:
        summary: The profile.
        everything: Whether to list splits of groups, too.
    """
    yield _device(summary)
    yield _runs(summary.runs)
    yield from _linear(summary, everything=everything)
    yield from npu_sections(summary)
    yield _layers(summary)
    yield from _sparse(summary)
    yield from _experts(summary)
    yield _bandwidth(summary)
    yield _contention(summary)
    yield _launches(summary)
    yield _syncs(summary)
    yield _copies(summary)
    yield _graphs(summary, everything=everything)
    yield _power(summary)
    yield _accuracy(summary)
    yield _failures(summary)


def format_us(time_us: float | None) -> str:
    """Return a time with three digits and its unit."""
    if time_us is None:
        return ""
    if time_us < 1e3:
        return f"{time_us:.3g} us" if time_us < 100 else f"{time_us:.0f} us"
    if time_us < 1e6:
        return f"{time_us / 1e3:.1f} ms" if time_us < 1e5 else f"{time_us / 1e3:.0f} ms"
    return f"{time_us / 1e6:.1f} s"


def format_spread(times: RecordTimes) -> str:
    """Return a median with its spread, marked where it is doubtful."""
    return f"{format_us(times.median_us)} ±{times.spread_fraction / 2:.0%}{_mark(times)}"


def _mark(times: RecordTimes) -> str:
    return DOUBTFUL if times.doubtful else ""


def _every_time(summary: ProfileSummary) -> list[RecordTimes]:
    found = [row.times for row in summary.linear]
    found += [row.times for row in summary.layers]
    found += [row.times for row in summary.sparse]
    found += [row.times for row in summary.experts]
    found += [row.times for row in summary.launches]
    found += [row.times for row in summary.hand_overs]
    found += [row.times for row in summary.copies]
    return found + [row.times for row in summary.bandwidth if row.times is not None]


def _device(summary: ProfileSummary) -> Section:
    rows = [("device", f"{summary.device}, {summary.time_kind} time"), ("fingerprint", summary.fingerprint)]
    for name, title in FACTS.items():
        value = summary.description.get(name)
        if isinstance(value, dict):
            value = ", ".join(f"{key} {version}" for key, version in value.items())
        if value not in (None, "", 0):  # a modelled processor has no threads
            rows.append((title, str(value)))
    notes: tuple[str, ...] = ()
    if summary.time_kind != "real":
        how = "they come from a model" if summary.time_kind == "simulated" else "the emulator's own duration"
        notes = (f"Times are {summary.time_kind}: {how}, and no claim about a real device.",)
    every = _every_time(summary)
    if doubtful := sum(times.doubtful for times in every):
        disturbed = sum(times.expected_us > 0.0 for times in every)
        notes += (
            f"{doubtful} of {len(every)} figures are marked with !: their samples lie far apart, or they lie "
            f"far off their neighbours ({disturbed}). Plans count on none of the latter, and "
            "`heterollm profile MODEL --update` measures these again.",
        )
    return Section("Device", rows=tuple(rows), notes=notes)


def _runs(runs: Sequence[RunRow]) -> Section:
    rows = []
    for run in runs:
        drift = ", ".join(f"{name} {fraction:.0%}" for name, fraction in run.drift_fraction.items())
        ended = "" if run.finished else ", stopped"
        counts = (run.measured, run.failed, run.known, run.left, sum(run.skipped.values()))
        took = f"{format_duration(run.seconds)}{ended}"
        rows.append((format_moment(run.started_s), took, *map(str, counts), drift, ", ".join(run.models)))
    columns = ("begun", ">took", ">measured", ">failed", ">known", ">left", ">skipped", "drift", "models")
    return Section(
        "Runs",
        columns,
        tuple(rows),
        ("Drift: the slowest run of a processor's reference operator over the fastest.",),
    )


# -- linear layers -----------------------------------------------------------------------------------


def _linear(summary: ProfileSummary, *, everything: bool) -> Iterator[Section]:
    by_table: dict[str, list[LinearRow]] = defaultdict(list)
    splits: Counter[str] = Counter()
    for row in summary.linear:
        point = row.point
        inputs = ", int8 inputs" if point.integer_inputs else ""
        where = "memory" if point.streamed else "a cache"
        what = "Feed-forward networks" if point.is_ffn else "Linear layers"
        title = f"{what}, {PROCESSORS[row.processor]}, {point.weight}{inputs}, weights from {where}"
        splits[title] += not row.whole
        if row.whole or everything:
            by_table[title].append(row)
    if not by_table:
        yield Section("Linear layers", notes=("None was measured.",))
    for title, rows in by_table.items():
        yield _matrix(title, rows, 0 if everything else splits[title])


def _matrix(title: str, rows: Sequence[LinearRow], splits: int) -> Section:
    """Return the times of shapes by tokens."""
    measured, tokens = _token_columns(row.point.tokens for row in rows)
    lines: dict[tuple[int, LinearPoint], dict[int, str]] = defaultdict(dict)
    for row in rows:
        point = row.point
        order = (*ALL_GROUPS, point.group).index(point.group)  # others last
        lines[order, structs.replace(point, tokens=0)][point.tokens] = format_spread(row.times)
    forms = any(point.form for _, point in lines)
    ffns = any(point.is_ffn for _, point in lines)
    made = [
        (
            point.group,
            point.shape,
            *((point.form.replace("_", " "),) if forms else ()),
            *(cells.get(count, "") for count in tokens),
        )
        for (_, point), cells in sorted(lines.items())
    ]
    shape = "outputs x width x inputs" if ffns else "rows x inputs"
    heads = ("group", shape, *(("form",) if forms else ()), *(f">{count}" for count in tokens))
    notes = ["Columns are tokens; ± is half the distance between the quartiles."]
    if ffns:
        notes.append("One graph each: gate, up, the activation, and down with as many inputs as the width.")
    if len(tokens) < len(measured):
        others = ", ".join(str(count) for count in measured if count not in tokens)
        notes.append(f"Also measured at {others} tokens; `heterollm profile show --json` has them.")
    if splits:
        notes.append(f"{splits} points of splits are left out; `heterollm profile show --all` lists them.")
    return Section(title, heads, tuple(made), tuple(notes))


def _token_columns(counts: Iterable[int]) -> tuple[list[int], list[int]]:
    """Return all numbers of tokens, and those that the table shows."""
    measured = sorted(set(counts))
    if len(measured) <= MOST_TOKEN_COLUMNS:
        return measured, measured
    return measured, [count for count in measured if count in TOKEN_COLUMNS][:MOST_TOKEN_COLUMNS]


def _layers(summary: ProfileSummary) -> Section:
    _, tokens = _token_columns(row.tokens for row in summary.layers)
    lines: dict[tuple[str, str, int], dict[int, str]] = defaultdict(dict)
    for row in summary.layers:
        heads = f"{row.heads}/{row.kv_heads} heads of {row.head_dim}" if row.heads else ""
        size = heads or str(row.hidden or "")
        line = lines[row.operator.replace("_", " "), size, row.context]
        line[row.tokens] = format_us(row.times.median_us) + _mark(row.times)
    rows = tuple(
        (operator, size, str(context or ""), *(cells.get(count, "") for count in tokens))
        for (operator, size, context), cells in sorted(lines.items())
    )
    heads_row = ("operator", "size", ">context", *(f">{count}" for count in tokens))
    notes = ("Columns are tokens.",) if rows else ("None was measured.",)
    return Section("Other operators of a layer, GPU", heads_row, rows, notes)


def _sparse(summary: ProfileSummary) -> Iterator[Section]:
    """Yield the times of sparse attention, and of attention on the NPU, if there are any."""
    _, tokens = _token_columns(row.tokens for row in summary.sparse)
    lines: dict[tuple[str, str, str, int], dict[int, str]] = defaultdict(dict)
    for row in summary.sparse:
        heads = f"{row.group * row.heads}/{row.heads} heads of {row.head_dim}"
        kept = f"{row.keep:.0%}" if row.keep else ""
        line = lines[row.operator.replace("_", " "), heads, kept, row.keys]
        line[row.tokens] = format_spread(row.times)
    rows = tuple(
        (*words, str(keys), *(cells.get(count, "") for count in tokens))
        for (*words, keys), cells in sorted(lines.items())
    )
    if rows:
        heads_row = ("operator", "size", ">kept", ">keys", *(f">{count}" for count in tokens))
        note = (
            "Columns are tokens. One launch each: scores and attention graph on the NPU, the rest on the GPU."
        )
        yield Section("Attention, sparse or on the NPU", heads_row, rows, (note,))


def _experts(summary: ProfileSummary) -> Iterator[Section]:
    """Yield the times of mixtures of experts, if there are any."""
    _, tokens = _token_columns(row.tokens for row in summary.experts)
    lines: dict[tuple[str, str, int], dict[int, str]] = defaultdict(dict)
    for row in summary.experts:
        name = f"{row.operator} {row.form}".rstrip()
        size = f"{row.columns} x {row.width}, {row.weight}"
        lines[name, size, row.experts][row.tokens] = format_spread(row.times)
    rows = tuple(
        (name, size, str(experts), *(cells.get(count, "") for count in tokens))
        for (name, size, experts), cells in sorted(lines.items())
    )
    if rows:
        head = ("operator", "size", ">experts", *(f">{count}" for count in tokens))
        note = (
            "Columns are rows of each expert, and tokens of the pass for moves. Graphs run on the NPU, the "
            "others on the GPU."
        )
        yield Section("Mixture of experts", head, rows, (note,))


# -- memory and links --------------------------------------------------------------------------------


def _bandwidth(summary: ProfileSummary) -> Section:
    rows = tuple(
        (
            PROCESSORS[row.processor],
            "both at once" if row.together else "alone",
            format_bytes(row.size_bytes),
            f"{row.gbps:.3g} GB/s",
            "" if row.times is None else f"±{row.times.spread_fraction / 2:.0%}{_mark(row.times)}",
        )
        for row in summary.bandwidth
    )
    notes = [] if rows else ["It was not measured."]
    for together in (False, True):
        rates = [row.gbps for row in summary.bandwidth if row.together is together]
        if together and len(rates) > 1:
            notes.append(f"Both at once read {sum(rates):.3g} GB/s in total.")
    return Section("Memory bandwidth", ("on", "how", ">read", ">rate", ">spread"), rows, tuple(notes))


def _contention(summary: ProfileSummary) -> Section:
    rows = tuple(
        (PROCESSORS[row.processor], f"{row.bound}-bound", f"{row.beside}-bound", f"{row.slowdown:.2f} x")
        for row in summary.contention
    )
    notes = () if rows else ("It was not measured: it needs GPU and NPU.",)
    heads = ("on", "its job", "the other processor's job", ">time over alone")
    return Section("Contention", heads, rows, notes)


def _spread_cells(times: RecordTimes) -> tuple[str, str, str]:
    quartiles = f"{format_us(times.low_us)} to {format_us(times.high_us)}"
    return format_us(times.median_us) + _mark(times), quartiles, format_us(times.high_tail_us)


def _launches(summary: ProfileSummary) -> Section:
    rows = tuple((row.measure.replace("_", " "), *_spread_cells(row.times)) for row in summary.launches)
    notes = () if rows else ("They were not measured.",)
    return Section("Launches", ("time of", ">median", ">quartiles", ">9 in 10 below"), rows, notes)


def _syncs(summary: ProfileSummary) -> Section:
    rows = tuple(
        (
            row.strategy.replace("_", " "),
            format_us(row.kernel_us),
            *_spread_cells(row.times),
            "" if row.processor_fraction is None else f"{row.processor_fraction:.0%}",
        )
        for row in summary.hand_overs
    )
    heads = ("strategy", ">kernel", ">latency", ">quartiles", ">9 in 10 below", ">core")
    notes = ("Core: fraction of the wait in which the waiting thread kept its core busy.",)
    title = "Synchronisation, GPU to host"
    return Section(title, heads, rows, notes if rows else ("It was not measured.",))


def _copies(summary: ProfileSummary) -> Section:
    rows = tuple(
        (row.method, format_bytes(row.size_bytes), *_spread_cells(row.times)) for row in summary.copies
    )
    notes = ("write and read copy; acquire and release are the zero-copy way.",)
    heads = ("method", ">size", ">median", ">quartiles", ">9 in 10 below")
    return Section("Copies", heads, rows, notes if rows else ("They were not measured.",))


def _graphs(summary: ProfileSummary, *, everything: bool) -> Section:
    shown = [row for row in summary.graphs if row.whole or everything]
    rows = tuple(_graph(row) for row in shown)
    notes = []
    if not summary.graphs:
        notes.append("None was built or loaded.")
    elif len(shown) < len(summary.graphs):
        left = len(summary.graphs) - len(shown)
        notes.append(f"{left} graphs of splits are left out; `heterollm profile show --all` lists them.")
    if any(row.point.is_ffn for row in shown):
        notes.append("The shape of a feed-forward network (ffn) is outputs x width x inputs.")
    heads = ("group", "rows x inputs", "weights", "form", ">tokens", ">build", ">load", ">size")
    return Section("NPU graphs", heads, rows, tuple(notes))


def _graph(row: GraphRow) -> tuple[str, ...]:
    point = row.point
    size = "" if row.size_bytes is None else format_bytes(row.size_bytes)
    names = (point.group, point.shape, str(point.weight), point.form.replace("_", " "))
    return (*names, str(point.tokens), format_us(row.build_us), format_us(row.load_us), size)


def _power(summary: ProfileSummary) -> Section:
    rows = tuple((row.source, row.load, f"{row.watts:.2f} W") for row in summary.power)
    notes = () if rows else ("Not measured: this system shows neither a RAPL counter nor a battery's gauge.",)
    return Section("Power", ("source", "load", ">average"), rows, notes)


# -- accuracy ----------------------------------------------------------------------------------------


def _accuracy(summary: ProfileSummary) -> Section:
    rows = []
    for row in summary.accuracy:
        score = row.score
        role = "in use" if row.used else ""
        regret = "" if score.regret is None else f"{score.regret:.1%} of {score.choices}"
        errors = (f"{score.median_error:.1%}", f"{score.high_error:.1%}")
        rows.append((PROCESSORS[score.processor], score.model, role, *errors, regret, str(score.samples)))
    heads = ("on", "model", "", ">median error", ">9 in 10 below", ">regret of choices", ">points")
    notes: tuple[str, ...] = (
        "On weight shapes left out of the fit. Regret: time lost by choosing from predictions.",
    )
    if summary.accuracy_reason:
        notes = (f"Not judged: {summary.accuracy_reason}.".replace("..", "."),)
    return Section("Predicted against measured", heads, tuple(rows), notes)


def _failures(summary: ProfileSummary) -> Section:
    rows = tuple((row.kind, str(row.count), row.error) for row in summary.failures[:LISTED_FAILURES])
    more = len(summary.failures) - len(rows)
    notes = [] if rows else ["None."]
    if more:
        notes.append(f"{more} more errors; `heterollm profile show --json` lists all.")
    return Section("Failed measurements", ("kind", ">times", "error"), rows, tuple(notes))
