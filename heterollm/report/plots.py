"""Pictures of a profile, one function each; a picture without data is None.

Titles name the device and the kind of its times.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from heterollm.kernels.npu import K_SPLIT_COLUMNS
from heterollm.profiler import HeldOut, held_out
from heterollm.report.figures import (
    COLOURS,
    HEIGHT_IN,
    LONGEST_LINEAR_AXIS,
    new_figure,
    require_matplotlib,
    save_png,
    step_curves,
)
from heterollm.report.tables_npu import (
    EMULATED_COST,
    Curves,
    column_curves,
    is_emulated,
    order_ratios,
    stage_curves,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from heterollm.profiler import LinearRow, ProfileSummary
    from heterollm.profiler.records import LinearPoint

MOST_CURVES: Final = 6


# -- the plots ---------------------------------------------------------------------------------------


def stage_plot(summary: ProfileSummary) -> Figure | None:
    """Return the NPU's time against tokens for the weight shape with most points, a line for each form."""
    if summary.sweeps:
        return _stages_of_sweeps(summary)
    groups: dict[LinearPoint, list[LinearRow]] = defaultdict(list)
    for row in summary.linear:
        point = row.point
        if row.processor == "npu" and row.whole and not point.is_ffn:
            groups[replace(point, tokens=0, form="")].append(row)
    if not groups:
        return None
    rows = max(groups.values(), key=lambda found: (len(found), found[0].point.weight.bits, found[0].point))
    if len({row.point.tokens for row in rows}) < 2:
        return None
    emulated = summary.time_kind == "emulated" and all(row.cpu_us for row in rows)
    curves: dict[str, dict[int, float]] = defaultdict(dict)
    for row in rows:
        name = row.point.form.replace("_", " ") or "only form"
        cost_us = (row.cpu_us or 0.0) if emulated else row.times.median_us
        curves[name][row.point.tokens] = cost_us / 1e3
    point = rows[0].point
    detail = f"{point.group} {point.shape}, {point.weight}"
    figure, axes = _figure(summary, "NPU: cost against tokens", detail)
    unit = f"{EMULATED_COST}, ms" if emulated else f"{summary.time_kind} time, ms"
    longest = max(row.point.tokens for row in rows)
    step_curves(axes[0], curves, unit, logarithmic=longest > LONGEST_LINEAR_AXIS)
    return figure


def _stages_of_sweeps(summary: ProfileSummary) -> Figure | None:
    """Return the same for the lengths of ``--characterise``, on and off the standard ones."""
    curves = stage_curves(summary)
    if not curves:
        return None
    figure, axes = _figure(summary, "NPU: stages", "")
    step_curves(axes[0], _few(curves), _npu_unit(summary), logarithmic=False)
    axes[0].set_ylim(bottom=0)
    return figure


def _npu_unit(summary: ProfileSummary) -> str:
    return f"{EMULATED_COST}, ms" if is_emulated(summary) else f"{summary.time_kind} time, ms"


def columns_plot(summary: ProfileSummary) -> Figure | None:
    """Return the NPU's cost of a weight against the inputs ``k``, for matrices of one size."""
    curves = column_curves(summary)
    if not curves:
        return None
    panels: dict[str, dict[str, Mapping[int, float]]] = defaultdict(dict)
    for name, curve in curves.items():  # costs differ much between tokens: a panel for each
        panels[name.partition(",")[0]][name] = curve
    figure, axes = _figure(summary, "NPU: effect of k", "4-bit weights of one size", panels=len(panels))
    unit = "CPU ns for 1000 weights" if is_emulated(summary) else "ns for 1000 weights"
    for panel, found in zip(axes, panels.values(), strict=True):
        step_curves(panel, found, unit, xlabel="inputs k", logarithmic=False)
        panel.set_ylim(bottom=0)
        panel.locator_params(axis="x", nbins=5)
        panel.axvline(K_SPLIT_COLUMNS, color="0.4", linewidth=1, linestyle=":")
    return figure


def order_plot(summary: ProfileSummary) -> Figure | None:
    """Return the effect of operand order and weight shape on the NPU's time, for float weights."""
    swept = order_ratios(summary)
    if swept:
        figure, axes = _figure(summary, "NPU: order of operands", "float weights")
        step_curves(axes[0], swept, "cost of x·W over W·x")
        axes[0].axhline(1.0, color="0.4", linewidth=1, linestyle=":")
        return figure
    slices: dict[LinearPoint, dict[str, float]] = defaultdict(dict)
    emulated = summary.time_kind == "emulated"
    for row in summary.linear:
        linear = row.whole and not row.point.is_ffn
        if row.processor == "npu" and linear and not row.point.weight.quantized:
            cost = row.cpu_us if emulated else row.times.median_us
            if cost:
                slices[replace(row.point, form="")][row.point.form] = cost
    pairs = {
        point: costs for point, costs in slices.items() if {"weight_first", "activation_first"} <= set(costs)
    }
    if not pairs:
        return None
    ratios: dict[str, dict[int, float]] = defaultdict(dict)
    for point, costs in sorted(pairs.items(), key=lambda item: item[0]):
        ratios[point.shape][point.tokens] = costs["activation_first"] / costs["weight_first"]
    figure, axes = _figure(summary, "NPU: order and shape of float weights", "", panels=2)
    unit = "CPU time" if emulated else "time"
    step_curves(axes[0], _few(ratios), f"{unit} of x·W over W·x")
    axes[0].axhline(1.0, color="0.4", linewidth=1, linestyle=":")
    rates: dict[str, dict[int, float]] = defaultdict(dict)
    for point, costs in sorted(pairs.items(), key=lambda item: item[0]):
        rates[point.shape][point.tokens] = point.flops / min(costs.values())
    step_curves(
        axes[1],
        _scaled(_few(rates), 1e-3),
        "GFLOP/s of emulation" if emulated else "GFLOP/s",
        legend=False,
    )
    return figure


def gpu_linearity_plot(summary: ProfileSummary) -> Figure | None:
    """Return the GPU's time against tokens and, where splits were measured, against rows."""
    whole: dict[str, dict[int, float]] = defaultdict(dict)
    rows: dict[int, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for row in summary.linear:
        if row.processor != "gpu":
            continue
        point, time_ms = row.point, row.times.median_us / 1e3
        name = f"{point.group}, {point.columns} inputs"
        rows[point.tokens][name][point.rows] = time_ms
        if row.whole:
            whole[f"{point.group} {point.shape}"][point.tokens] = time_ms
    curves = {name: curve for name, curve in whole.items() if len(curve) > 1}
    if not curves:
        return None
    by_rows = {
        tokens: {name: curve for name, curve in found.items() if len(curve) > 2}
        for tokens, found in rows.items()
    }
    tokens = max(
        (count for count, found in by_rows.items() if found),
        key=lambda count: len(by_rows[count]),
        default=0,
    )
    panels = 2 if tokens else 1
    figure, axes = _figure(summary, "GPU: linear layers", "", panels=panels)
    step_curves(axes[0], _few(curves), f"{summary.time_kind} time, ms", logarithmic=True)
    if tokens:
        step_curves(
            axes[1], _few(by_rows[tokens]), f"ms at {tokens} token{'s' if tokens > 1 else ''}", xlabel="rows"
        )
        if axes[1].get_yscale() == "log":
            axes[1].set_xscale("log")
            axes[1].xaxis.set_major_formatter("{x:.0f}")
        else:
            axes[1].set_xlim(left=0)
            axes[1].set_ylim(bottom=0)
            axes[1].locator_params(axis="x", nbins=5)
    return figure


def bandwidth_plot(summary: ProfileSummary) -> Figure | None:
    """Return the memory bandwidth of GPU and NPU, alone and both at once."""
    rates = {(row.processor, row.together): row.gbps for row in summary.bandwidth}
    if not rates:
        return None
    bars: list[tuple[str, float, str]] = []
    for together, how in ((False, "alone"), (True, "with the other")):
        for processor, colour in (("gpu", COLOURS[0]), ("npu", COLOURS[1])):
            rate = next((found for key, found in rates.items() if key == (processor, together)), None)
            if rate is not None:
                bars.append((f"{processor.upper()} {how}", rate, colour))
    both = [rate for (_, together), rate in rates.items() if together]
    if len(both) == 2:
        bars.append(("both at once", sum(both), COLOURS[2]))
    figure, axes = _figure(summary, "Memory bandwidth", "", height_in=1.1 + 0.36 * len(bars))
    names, values, colours = zip(*reversed(bars), strict=True)
    drawn = axes[0].barh(names, values, color=colours)
    axes[0].bar_label(drawn, [f"{value:.3g}" for value in values], padding=3)
    axes[0].set_xlim(0, 1.15 * max(values))
    axes[0].set_xlabel(f"GB/s, {summary.time_kind} time")
    axes[0].spines[["top", "right"]].set_visible(False)
    return figure


def accuracy_plot(summary: ProfileSummary, points: Sequence[HeldOut]) -> Figure | None:
    """Return predicted against measured times of weight shapes left out of the fit."""
    if not points:
        return None
    figure, axes = _figure(
        summary, "Predicted against measured", "weight shapes left out of the fit", height_in=4.1
    )
    plot = axes[0]
    for processor, colour, marker in (("gpu", COLOURS[0], "o"), ("npu", COLOURS[1], "s")):
        for known in (True, False):
            chosen = [point for point in points if (point.processor, point.known) == (processor, known)]
            if chosen:
                plot.scatter(
                    [point.measured_us / 1e3 for point in chosen],
                    [point.predicted_us / 1e3 for point in chosen],
                    s=22,
                    marker=marker,
                    facecolors=colour if known else "none",
                    edgecolors=colour,
                    alpha=0.8,
                    label=processor.upper() + ("" if known else ", extrapolated"),
                )
    times = [time_us / 1e3 for point in points for time_us in (point.measured_us, point.predicted_us)]
    low, high = min(times) / 1.5, max(times) * 1.5
    plot.plot([low, high], [low, high], color="0.3", linewidth=1, label="equal")
    plot.fill_between(
        [low, high],
        [low / 1.2, high / 1.2],
        [low * 1.2, high * 1.2],
        color="0.88",
        zorder=0,
        label="20 % off",
    )
    plot.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    plot.set(xlabel=f"measured, ms ({summary.time_kind} time)", ylabel="predicted, ms")
    plot.legend(fontsize=8, loc="upper left")
    return figure


PLOTS: Final[Mapping[str, tuple[str, Callable[[ProfileSummary], Figure | None]]]] = {
    "stages": ("the NPU's stages", stage_plot),
    "order": ("order and shape at float weights", order_plot),
    "columns": ("the effect of k on the NPU", columns_plot),
    "gpu": ("the GPU's time against tokens and rows", gpu_linearity_plot),
    "bandwidth": ("memory bandwidth", bandwidth_plot),
    "accuracy": (
        "predicted against measured",
        lambda summary: accuracy_plot(summary, held_out(summary)),
    ),
}
"""Captions and functions of the plots by file name."""


def draw(summary: ProfileSummary) -> Iterator[tuple[str, str, bytes | None]]:
    """Yield file name, caption and PNG of each plot; None where the profile has no data for it.

    Raises:
        OptionError: matplotlib is not installed.
    """
    require_matplotlib()
    for name, (title, make) in PLOTS.items():
        figure = make(summary)
        if figure is None:
            yield name, title, None
            continue
        file = io.BytesIO()
        save_png(figure, file)
        yield name, title, file.getvalue()


# -- shared functions --------------------------------------------------------------------------------


def _figure(
    summary: ProfileSummary, title: str, detail: str, *, panels: int = 1, height_in: float = HEIGHT_IN
) -> tuple[Figure, list[Axes]]:
    lines = [title, f"{summary.device}, {summary.time_kind} time", *([detail] if detail else [])]
    return new_figure("\n".join(lines), panels=panels, height_in=height_in)


def _few(curves: Curves) -> Curves:
    """Return the curves with most points, in their order."""
    chosen = sorted(curves, key=lambda name: -len(curves[name]))[:MOST_CURVES]
    return {name: curve for name, curve in curves.items() if name in chosen}


def _scaled(curves: Curves, factor: float) -> Curves:
    return {name: {at: value * factor for at, value in curve.items()} for name, curve in curves.items()}
