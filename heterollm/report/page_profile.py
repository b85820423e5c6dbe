"""The HTML page of a profile: rates, bandwidths, predictions against measurements, and all tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from markupsafe import Markup

from heterollm.profiler import HeldOut, held_out
from heterollm.report.charts import Curve, curves_html, named_curves
from heterollm.report.page_parts import (
    Bar,
    bars_html,
    kind_word,
    page_html,
    section_html,
    side_by_side_html,
    title_html,
)
from heterollm.report.tables_npu import EMULATED_COST, column_curves, is_emulated, order_ratios, stage_curves
from heterollm.report.tables_profile import sections

if TYPE_CHECKING:
    from heterollm.profiler import ProfileSummary
    from heterollm.profiler.records import Processor

KEYS = (("gpu", "GPU"), ("npu", "NPU"))


def profile_page(summary: ProfileSummary) -> str:
    """Return a profile as one HTML page."""
    kind = kind_word(summary.time_kind)
    first, *rest = sections(summary)
    body = [section_html(first, kind)]
    if charts := list(_charts(summary, kind)):
        body += [title_html("Charts", 2), side_by_side_html(charts)]
    body += [section_html(section, kind) for section in rest]
    return page_html(f"Profile of {summary.device}, {kind}", body)


def _charts(summary: ProfileSummary, kind: str) -> Iterator[Markup]:
    processors: tuple[Processor, ...] = ("gpu", "npu")
    for processor in processors:
        yield from _rates(summary, processor, kind)
    if summary.bandwidth:
        yield _bandwidths(summary, kind)
    if points := held_out(summary):
        yield _accuracy(points, kind)
    cost = EMULATED_COST if summary.sweeps and is_emulated(summary) else kind
    if stages := stage_curves(summary):
        caption = f"NPU: cost of a square weight by tokens, {cost}."
        yield curves_html(named_curves(stages), caption, ("tokens", "ms"), logarithmic=(False, False))
    if ratios := order_ratios(summary):
        caption = f"NPU: cost of x\N{MULTIPLICATION SIGN}W over W\N{MULTIPLICATION SIGN}x, {cost}."
        yield curves_html(named_curves(ratios), caption, ("tokens", "quotient"))
    if columns := column_curves(summary):
        caption = f"NPU: cost of 1000 weights by inputs, for matrices of one size, {cost}."
        yield curves_html(named_curves(columns), caption, ("inputs k", "ns"))


def _rates(summary: ProfileSummary, processor: Processor, kind: str) -> Iterator[Markup]:
    """Yield the rates of a processor in whole groups by tokens, of the fastest form of each."""
    emulated = processor == "npu" and summary.time_kind == "emulated"
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    for row in summary.linear:
        point = row.point
        if row.processor != processor or not row.whole or (emulated and not row.cpu_us):
            continue
        rate = point.flops / (row.cpu_us * 1e3) if emulated and row.cpu_us else row.gflops
        own = curves[f"{point.group} {point.shape}, {point.weight}"]
        own[point.tokens] = max(rate, own.get(point.tokens, 0.0))
    if curves:
        how = f"{kind}, by {EMULATED_COST}" if emulated else kind
        caption = f"{processor.upper()}: rates of linear layers by tokens, {how}."
        yield curves_html(named_curves(curves), caption, ("tokens", "GFLOP/s"))


def _bandwidths(summary: ProfileSummary, kind: str) -> Markup:
    """Return bars of the memory bandwidth of both processors, alone and at once."""
    bars = [
        Bar(
            f"{row.processor.upper()} {'with the other' if row.together else 'alone'}",
            ((row.gbps, row.processor),),
            f"{row.gbps:.3g} GB/s",
        )
        for row in sorted(summary.bandwidth, key=lambda row: row.together)
    ]
    both = [(row.gbps, row.processor) for row in summary.bandwidth if row.together]
    if len(both) == len(KEYS):
        bars.append(Bar("both at once", tuple(both), f"{sum(rate for rate, _ in both):.3g} GB/s"))
    return bars_html(bars, f"Memory bandwidth, {kind}.", KEYS)


def _accuracy(points: list[HeldOut], kind: str) -> Markup:
    """Return predicted against measured times of weight shapes left out of the fit."""
    curves = []
    for processor, name in KEYS:
        for known in (True, False):
            own = [one for one in points if (one.processor, one.known) == (processor, known)]
            if own:
                placed = tuple((one.measured_us / 1e3, one.predicted_us / 1e3) for one in own)
                words = name if known else f"{name}, extrapolated"
                curves.append(Curve(words, placed, processor, line=False, hollow=not known))
    caption = f"Predicted against measured times of weight shapes left out of the fit, {kind}; dashed: equal."
    return curves_html(curves, caption, ("measured ms", "predicted ms"), logarithmic=(True, True), equal=True)
