"""The picture of a trace: rows of bars for the GPU's queue, the NPU and the engine thread."""

from __future__ import annotations

import io
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from heterollm.base import OptionError
from heterollm.report.figures import require_matplotlib, save_png
from heterollm.trace import TRACKS, Category, Pass, Span, Trace, TraceSummary, Track, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN: Final = 9.0
PANEL_IN: Final = 1.55
LINEAR_GPU: Final = "#0072B2"
LINEAR_NPU: Final = "#D55E00"
COLOURS: Final[Mapping[Category, str]] = {
    "attention": "#56B4E9",
    "norm": "#009E73",
    "activation": "#66C2A5",
    "embedding": "#8DA0CB",
    "join": "#117733",
    "merged": "#3C6E91",
    "signal": "#444444",
    "other": "#999999",
    "launch": "#E69F00",
    "hand-over": "#CC79A7",
    "graph": "#F3C9B0",
    "wait": "#DDDDDD",
    "sleep": "#EFEFEF",
    "poll": "#BBBBBB",
    "bind": "#AA4499",
    "build": "#882255",
    "call": "#777777",
    "tracing": "#000000",
}
"""Colours of Okabe and Ito, and shades for the other categories."""

ROWS: Final[Mapping[Track, int]] = {"gpu": 2, "npu": 1, "engine": 0}
NAMES: Final[Mapping[Track, str]] = {"gpu": "GPU queue", "npu": "NPU", "engine": "engine\nthread"}
HALF: Final = 0.4
LEAST_LABEL_FRACTION: Final = 0.012
"""Fraction of the panel's width for each letter; narrower bars have no name."""

BEHIND: Final = frozenset({"pass", "bind", "wait"})
"""Engine spans that contain others."""

MOST_PASSES: Final = 12
"""The picture of all passes shows the first ones."""


@dataclass(frozen=True, slots=True)
class _Window:
    title: str
    begin_ns: int
    end_ns: int
    names: bool


def trace_png(trace: Trace) -> bytes:
    """Return the picture of a trace as PNG.

    Raises:
        OptionError: matplotlib is not installed, or the trace has no pass.
    """
    file = io.BytesIO()
    save_png(trace_figure(trace), file)
    return file.getvalue()


def trace_figure(trace: Trace) -> Figure:
    """Return a picture: the first passes, then a layer of prefill and a layer of decode.

    Raises:
        OptionError: matplotlib is not installed, or the trace has no pass.
    """
    require_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    windows = list(_windows(trace))
    if not windows:
        raise OptionError("The trace has no pass to draw.", fix="Record a run that generates tokens.")
    size = (WIDTH_IN, 0.9 + PANEL_IN * len(windows))
    figure = Figure(figsize=size, layout="constrained")
    panels: list[Axes] = list(figure.subplots(len(windows), 1, squeeze=False)[:, 0])
    shown: dict[str, str] = {}
    for axes, window in zip(panels, windows, strict=True):
        shown |= _draw(axes, trace.spans, window)
    where = f"{trace.device}, plan {trace.plan}, {trace.precision}, {trace.time_kind} time"
    figure.suptitle(where, fontsize=10)
    panels[-1].set_xlabel(f"ms ({trace.time_kind} time)", fontsize=9)
    handles = [Patch(color=colour, label=name) for name, colour in shown.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=8, fontsize=7, frameon=False)
    return figure


# -- pieces ------------------------------------------------------------------------------------------


def _windows(trace: Trace) -> Iterator[_Window]:
    passes = trace.passes
    if not passes:
        return
    first = _run_of(passes)[:MOST_PASSES]
    more = len(passes) - len(first)
    rest = f", {more} more not shown" if more else ""
    yield _Window(f"{_counted(first)}{rest}", first[0].begin_ns, first[-1].end_ns, False)
    for phase in ("prefill", "decode"):
        # The first decode step builds objects that the others reuse.
        found = [one for one in passes if one.phase == phase and not one.failed]
        if found:
            typical = _typical(found[1:] if phase == "decode" and len(found) > 1 else found)
            yield _zoom(trace, typical, summarise(trace.select(typical.__eq__)))


def _run_of(passes: Sequence[Pass]) -> list[Pass]:
    """Return the passes of the last answer that begins with a prefill."""
    starts = [
        place
        for place, one in enumerate(passes)
        if one.phase == "prefill" and (place == 0 or passes[place - 1].phase != "prefill")
    ]
    return list(passes[starts[-1] if starts else 0 :])


def _counted(passes: Sequence[Pass]) -> str:
    prefills = [one for one in passes if one.phase == "prefill"]
    decodes = len(passes) - len(prefills)
    parts = []
    if prefills:
        parts.append(f"prefill of {sum(one.tokens for one in prefills)} tokens")
    if decodes:
        parts.append(f"{decodes} decode step{'s' if decodes > 1 else ''}")
    return " and ".join(parts)


def _typical(passes: Sequence[Pass]) -> Pass:
    """Return the pass of median time among the longest passes."""
    longest = max(one.tokens for one in passes)
    found = sorted(
        (one for one in passes if one.tokens == longest), key=lambda one: one.end_ns - one.begin_ns
    )
    return found[(len(found) - 1) // 2]


def _zoom(trace: Trace, one: Pass, summary: TraceSummary) -> _Window:
    """Return the window of a layer in the middle of a pass, or of the pass if kernels span layers."""
    spans = [span for span in trace.spans if span.number == one.number]
    layers = sorted({span.layer for span in spans if span.layer is not None and span.track != "engine"})
    what = f"{one.phase} of {one.tokens} token{'s' if one.tokens > 1 else ''}"
    both = f"; GPU and NPU at once for {summary.overlap_fraction:.0%} of the shorter busy time"
    if not (summary.gpu_busy_us and summary.npu_busy_us):
        both = f"; the {'GPU' if summary.gpu_busy_us else 'NPU'} alone"
    of_layer: list[Span] = []
    if layers:
        of_layer = [
            span for span in spans if span.layer == layers[len(layers) // 2] and span.track != "engine"
        ]
    lengths = [span.end_ns - span.begin_ns for span in spans if span.track != "engine"]
    # Kernels that are merged over layers have no layer, and the picture of a layer would be empty.
    if len(of_layer) < 3 or statistics.median(lengths) > (one.end_ns - one.begin_ns) / 10:
        return _Window(f"{what}{both}", one.begin_ns, one.end_ns, True)
    begin = min(span.begin_ns for span in of_layer)
    end = max(span.end_ns for span in of_layer)
    margin = (end - begin) // 50
    title = f"layer {layers[len(layers) // 2]} of {layers[0]} to {layers[-1]}, {what}{both}"
    return _Window(title, begin - margin, end + margin, True)


def _draw(axes: Axes, spans: Sequence[Span], window: _Window) -> dict[str, str]:
    """Draw the spans of a window, and return their colours by meaning."""
    shown: dict[str, str] = {}
    width_ns = window.end_ns - window.begin_ns
    for track in TRACKS:
        bars: dict[str, list[tuple[float, float]]] = {}
        for span in spans:
            if span.track != track or span.category == "pass":
                continue
            begin, end = max(span.begin_ns, window.begin_ns), min(span.end_ns, window.end_ns)
            if begin >= end:
                continue
            name, colour = _style(span)
            shown[name] = colour
            bar = ((begin - window.begin_ns) / 1e6, (end - begin) / 1e6)
            # A span that contains others is drawn first, so that they lie on it.
            bars.setdefault(f"{span.category not in BEHIND:d}{colour}", []).append(bar)
            label = span.operator if span.layer is None or not span.merged else span.name
            fits = (end - begin) / width_ns > LEAST_LABEL_FRACTION * len(label)
            if window.names and track != "engine" and fits:
                middle = bar[0] + bar[1] / 2
                axes.text(middle, ROWS[track], label, ha="center", va="center", fontsize=7, color="white")
        for key in sorted(bars):
            low = ROWS[track] - HALF
            # Edges would hide narrow bars.
            axes.broken_barh(bars[key], (low, 2 * HALF), facecolors=key[1:], linewidth=0)
    axes.set_xlim(0, width_ns / 1e6)
    axes.set_ylim(-0.55, 2.55)
    axes.set_yticks(list(ROWS.values()), [NAMES[track] for track in ROWS], fontsize=8)
    axes.tick_params(labelsize=8)
    axes.set_title(window.title, fontsize=8.5, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    return shown


def _style(span: Span) -> tuple[str, str]:
    if span.category == "linear":
        return ("linear, GPU", LINEAR_GPU) if span.track == "gpu" else ("linear, NPU", LINEAR_NPU)
    names = {"merged": "merged kernels", "graph": "in the NPU's run", "signal": "flag"}
    return names.get(span.category, span.category), COLOURS[span.category]
