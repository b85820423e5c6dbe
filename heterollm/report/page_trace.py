"""The HTML page of a trace: a timeline to zoom into, and the tables of the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Final

from heterollm.report.page_parts import kind_word, page_html, part_html, report_html, sentences_html
from heterollm.report.trace import trace_report
from heterollm.report.trace_plots import COLOURS, LINEAR_GPU, LINEAR_NPU
from heterollm.trace import TRACKS, Category, Span, Trace, Track

NAMES: Final[Mapping[Track, str]] = {"gpu": "GPU queue", "npu": "NPU", "engine": "engine thread"}
IDLE: Final[Mapping[Category, str]] = {
    "pass": "var(--head)",
    "wait": "var(--track)",
    "sleep": "var(--line)",
    "poll": "var(--dim)",
    "signal": "var(--text)",
    "tracing": "var(--dim)",
}
"""Colours that follow the page's, of categories in which nothing is computed."""

DEEPEST: Final = 8
"""Rows of a track at most; spans within more others are left out, and the page says so."""

HELP: Final = (
    "Wheel, + and - zoom; dragging and the arrow keys move; a double click zooms to a bar; "
    "n and p go to the next pass and the one before; 0 shows all."
)


def trace_page(trace: Trace) -> str:
    """Return a trace as one HTML page, which needs no network and no other file."""
    kind = kind_word(trace.time_kind)
    data = timeline_data(trace)
    keys = [(words, colour) for words, colour in data["kinds"] if words != "pass"]
    left = len(trace.spans) - sum(len(row["time"]) for row in data["rows"])
    notes = [f"{left} spans lie within {DEEPEST} others, and are not drawn."] if left else []
    label = f"Timeline of {len(trace.passes)} passes, {kind}"
    drawn = part_html("timeline", label, keys, HELP)
    body = [drawn, sentences_html(notes), *report_html(trace_report(trace), kind)]
    script = files("heterollm.report").joinpath("timeline.js").read_text("utf-8")
    title = f"Trace of {trace.device}, plan {trace.plan}, {trace.precision}: {kind}"
    return page_html(title, body, script=script, data=data)


def timeline_data(trace: Trace) -> dict[str, Any]:
    """Return the spans for the timeline's script, with numbers in place of names and kinds.

    A row of a track has spans that do not overlap, in order; times of its spans are differences to the end of
    the one before, and durations, in ns, which keeps the page small.
    """
    names: dict[str, int] = {}
    kinds: dict[tuple[str, str], int] = {}
    works: dict[tuple[int, int], int] = {}
    begins = [*(one.begin_ns for one in trace.passes), *(span.begin_ns for span in trace.spans)]
    origin_ns = min(begins, default=0)
    rows = []
    for track in TRACKS:
        own = sorted(
            (span for span in trace.spans if span.track == track), key=lambda one: (one.begin_ns, -one.end_ns)
        )
        for depth, spans in enumerate(_nested(own)):
            columns: dict[str, list[int]] = {key: [] for key in ("gap", "time", "name", "kind", "work")}
            end_ns = origin_ns
            for span in spans:
                work = () if span.work is None else (span.work.weight_bytes, span.work.flops)
                columns["gap"].append(span.begin_ns - end_ns)
                columns["time"].append(span.end_ns - span.begin_ns)
                columns["name"].append(names.setdefault(_name(span), len(names)))
                columns["kind"].append(kinds.setdefault(_kind(span), len(kinds)))
                columns["work"].append(-1 if not work else works.setdefault(work, len(works)))
                end_ns = span.end_ns
            rows.append({"track": "" if depth else NAMES[track], **columns})
    passes = [
        [_pass_name(one.phase, one.tokens), one.begin_ns - origin_ns, one.end_ns - one.begin_ns]
        for one in trace.passes
    ]
    return {"names": [*names], "kinds": [*kinds], "works": [*works], "rows": rows, "passes": passes}


def _nested(spans: Sequence[Span]) -> list[list[Span]]:
    """Return rows of spans that do not overlap; a span within another lies on a row below."""
    rows: list[list[Span]] = [[] for _ in range(DEEPEST)]
    for span in spans:
        free = next((row for row in rows if not row or row[-1].end_ns <= span.begin_ns), None)
        if free is not None:
            free.append(span)
    return [row for row in rows if row]


def _name(span: Span) -> str:
    return f"{span.name} ({', '.join(span.merged)})" if span.merged else span.name


def _kind(span: Span) -> tuple[str, str]:
    """Return the words for a span's category and its colour."""
    if span.category == "linear":
        return ("linear, GPU", LINEAR_GPU) if span.track == "gpu" else ("linear, NPU", LINEAR_NPU)
    return span.category, IDLE.get(span.category) or COLOURS[span.category]


def _pass_name(phase: str, tokens: int) -> str:
    return f"{phase} {tokens}" if tokens > 1 else phase
