"""The HTML page of a bench: verdicts, rates, traced runs and conditions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from markupsafe import Markup

from heterollm.base import Section, format_bytes
from heterollm.benchmarks import COMPARED, best_of, groups_of, verdicts
from heterollm.report.page_parts import (
    Bar,
    bars_html,
    kind_word,
    list_html,
    page_html,
    section_html,
    sentences_html,
    title_html,
)
from heterollm.report.simulate import sweep_section
from heterollm.report.tables_bench import (
    LEGEND,
    bounds,
    energy_words,
    lacking_words,
    most_telling,
    operators_section,
    rates_section,
    short_label,
    telling_row,
    traces_section,
)

if TYPE_CHECKING:
    from heterollm.benchmarks import BenchRow

LEVELS: Final = {
    "gpu": "gpu",
    "npu": "npu",
    "layer": "npu",
    "tensor": "both",
    "block": "both",
    "fused": "both",
}
"""Style of a level's bar: the processor that computes its linear layers."""

LEVEL_KEYS: Final = (
    ("gpu", "on the GPU"),
    ("npu", "npu and layer: on the NPU"),
    ("both", "tensor and block: split between GPU and NPU"),
    ("other", "others"),
)
TRACE_KEYS: Final = (
    ("gpu", "only the GPU works"),
    ("both", "both work"),
    ("npu", "only the NPU works"),
    ("other", "neither"),
)
TRACK_KEYS: Final = (("gpu", "GPU"), ("npu", "NPU"), ("other", "engine thread"))


def bench_page(runs: Sequence[Sequence[BenchRow]], notes: Sequence[str] = ()) -> str:
    """Return benches as one HTML page. Times of different kinds never share a chart or a table.

    Args:
        runs: The rows of each run.
        notes: Remarks on all of them.
    """
    rows = [row for run in runs for row in run]
    kinds = dict.fromkeys(kind_word(row.time_kind) for row in rows if row.time_kind)
    names = dict.fromkeys(_name(run) for run in runs)
    body: list[Markup] = []
    for place, run in enumerate(runs):
        if len(runs) > 1:
            body.append(title_html(f"Run {place + 1} of {len(runs)}: {_name(run)}", 2))
        body += _run(run, level=3 if len(runs) > 1 else 2)
    body.append(sentences_html(notes))
    return page_html(f"Bench of {', '.join(names)}: {' and '.join(kinds) or 'nothing ran'}", body)


def _name(run: Sequence[BenchRow]) -> str:
    path = run[0].setup.model_filename.replace("\\", "/").rstrip("/")
    return path.rpartition("/")[2] or path or "a model"


def _run(rows: Sequence[BenchRow], level: int) -> Iterator[Markup]:
    if any(row.modelled is not None for row in rows):  # of a prompt and the tokens after it: several rates
        yield section_html(sweep_section(rows), "simulated", level=level)
        return
    yield title_html("Verdict", level)
    yield list_html(verdicts(rows))
    for (test, precision), group in groups_of(rows).items():
        by_kind = _by_kind(group)
        for kind, own in by_kind.items():
            if kind == kind_word(None) and len(by_kind) > 1:
                continue  # they are listed as failed
            yield title_html(f"{test}, {precision}: {kind}", level)
            usable = [row for row in own if row.usable]
            if usable:
                yield _rates_chart(usable, kind)
            yield section_html(rates_section(own), kind)
    yield sentences_html([LEGEND])
    for kind, traced in _by_kind([row for row in rows if row.trace.traced_ms is not None]).items():
        section = traces_section(traced)
        yield title_html(f"{section.title}: {kind}", level)
        yield from _traces_chart(traced, kind)
        yield section_html(Section("", section.columns, section.rows), kind)
        for row in most_telling(traced):
            yield from _operators(row, kind, level)
    found = list(bounds(rows))
    if found:
        yield title_html("What bounds each phase", level)
        yield list_html(found)
    failed = list(dict.fromkeys(f"{row.label}, {row.test}: {row.error}" for row in rows if row.error))
    if failed:
        yield title_html("Failed", level)
        yield list_html(failed)
    kinds = dict.fromkeys(kind_word(row.time_kind) for row in rows if row.time_kind)
    yield section_html(_conditions(rows), ", ".join(kinds) or "nothing ran", level=level)


def _by_kind(rows: Sequence[BenchRow]) -> dict[str, list[BenchRow]]:
    found: dict[str, list[BenchRow]] = {}
    for row in rows:
        found.setdefault(kind_word(row.time_kind), []).append(row)
    return found


def _rates_chart(rows: Sequence[BenchRow], kind: str) -> Markup:
    best = best_of(rows)
    drawn = [
        Bar(
            short_label(row),
            ((row.times.median_ts or 0.0, _colour(row)),),
            f"{row.times.median_ts or 0.0:.1f}",
            (min(row.times.samples_ts), max(row.times.samples_ts)) if len(row.times.samples_ts) > 1 else None,
            best=row is best and len(rows) > 1 and row.time_kind in COMPARED,
        )
        for row in rows
    ]
    used = {_colour(row) for row in rows}
    keys = [(style, words) for style, words in LEVEL_KEYS if style in used]
    caption = f"Tokens a second, {kind}: medians; the thin line goes from the slowest to the fastest sample."
    return bars_html(drawn, caption, keys)


def _colour(row: BenchRow) -> str:
    return LEVELS.get(row.plan_level, "other") if row.engine == "self" else "other"


def _traces_chart(rows: Sequence[BenchRow], kind: str) -> Iterator[Markup]:
    """Yield a chart for each test: time in which one processor, both, or neither worked."""
    for test in dict.fromkeys(row.test for row in rows):
        drawn = []
        for row in rows:
            if row.test == test:
                wall, both = row.trace.traced_ms or 0.0, row.trace.overlap_ms or 0.0
                gpu, npu = (row.trace.gpu_busy_ms or 0.0) - both, (row.trace.npu_busy_ms or 0.0) - both
                pieces = ((gpu, "gpu"), (both, "both"), (npu, "npu"), (wall - gpu - both - npu, "other"))
                drawn.append(Bar(row.label, pieces, f"{wall:.1f} ms"))
        yield bars_html(drawn, f"Milliseconds of one traced run of {test}, {kind}", TRACE_KEYS)


def _operators(row: BenchRow, kind: str, level: int) -> Iterator[Markup]:
    section = operators_section(row)
    if not section.rows:
        return
    yield title_html(f"{section.title}: {kind}", level)
    styles = {style: style for style, _ in TRACK_KEYS}
    drawn = []
    for item in row.trace.operators or ():
        pieces = ((item.time_ms, styles.get(item.part, "other")),)
        drawn.append(Bar(item.operator, pieces, f"{item.time_ms:.2f} ms"))
    used = {style for bar in drawn for _, style in bar.pieces}
    keys = [(style, words) for style, words in TRACK_KEYS if style in used]
    yield bars_html(drawn, f"Milliseconds of one traced run, {kind}", keys)
    yield section_html(Section("", section.columns, section.rows), kind)


def _conditions(rows: Sequence[BenchRow]) -> Section:
    """Return machine, libraries, model and devices of the rows; different values are listed."""
    first = telling_row(rows)
    own = [row for row in rows if row.engine == "self"] or rows
    description = first.setup.description
    size = None if first.setup.model_size is None else format_bytes(first.setup.model_size)
    versions = ", ".join(f"{name} {version}" for name, version in first.setup.versions.items())
    others = dict.fromkeys(
        f"{row.engine} {row.setup.engine_version or ''}" for row in rows if row.engine != "self"
    )
    disturbed = [own for row in rows for own in row.times.samples_disturbed if own is not None]
    times = sorted(row.setup.test_time for row in rows if row.setup.test_time)
    facts: tuple[tuple[str, object], ...] = (
        ("model", first.setup.model_filename),
        ("weights", ", ".join(word for word in (first.setup.model_type, size) if word)),
        (
            "device",
            _several(f"{row.setup.device}, {kind_word(row.time_kind)}" for row in own if row.setup.device),
        ),
        ("GPU", description.get("gpu")),
        ("GPU driver", description.get("gpu_driver")),
        ("NPU", description.get("npu")),
        (
            "bits of the KV cache",
            _several(
                f"{row.engine} {row.setup.description['kv_bits']}"
                for row in rows
                if "kv_bits" in row.setup.description
            ),
        ),
        ("fingerprint", _several(row.setup.fingerprint for row in own)),
        ("threads, GPU + NPU", _several(row.asked.threads for row in own)),
        ("machine", first.setup.cpu_info),
        ("load before", None if first.setup.load_average is None else f"{first.setup.load_average:.1f}"),
        ("disturbed", f"{sum(disturbed)} of {len(disturbed)} samples" if disturbed else "not known"),
        ("samples of each", _several(str(len(row.times.samples_ns)) for row in rows if row.times.samples_ns)),
        ("seed", _several(str(row.asked.seed) for row in rows)),
        ("begun", " to ".join(dict.fromkeys((times[0], times[-1]))) if times else None),
        ("heterollm", f"{first.setup.heterollm_version}, commit {first.setup.build_commit or 'unknown'}"),
        ("other engines", ", ".join(others)),
        ("libraries", versions),
    )
    cells = tuple((name, str(value)) for name, value in facts if value not in (None, ""))
    notes = (energy_words(rows), *dict.fromkeys(lacking_words(rows)))
    return Section("Conditions", rows=cells, notes=notes)


def _several(words: Iterator[str | None]) -> str:
    return ", ".join(dict.fromkeys(word for word in words if word))
