"""Pictures of a profile, one function each; a picture without data is None.

They suit a narrow screen: one column, few lines, colours that colour-blind people can distinguish (Okabe and
Ito), and different markers. Titles name the device and the kind of its times.
"""

from __future__ import annotations

import io
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from heterollm.base import OptionError
from heterollm.kernels.npu import K_SPLIT_COLUMNS
from heterollm.profiler import HeldOut, held_out
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

__all__ = [
    "PLOTS",
    "accuracy_plot",
    "bandwidth_plot",
    "columns_plot",
    "draw",
    "gpu_linearity_plot",
    "order_plot",
    "require_matplotlib",
    "save_png",
    "stage_plot",
    "step_curves",
]

COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS: Final = ("o", "s", "^", "D", "v", "P")
WIDTH_IN: Final = 4.0
HEIGHT_IN: Final = 3.0
DPI: Final = 180
STAGE_TOKENS: Final = 32
"""Tokens of a stage of the NPU (HeteroLLM, section 3)."""

LONGEST_LINEAR_AXIS: Final = 300
MOST_CURVES: Final = 6
FEW_CURVES: Final = 3
"""Largest number of curves whose names fit into the axes."""

LEGEND_ROW_IN: Final = 0.17
WIDE_RANGE: Final = 30.0


def require_matplotlib() -> None:
    """Check that plots can be drawn.

    Raises:
        OptionError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401, ICN001
    except ImportError as error:
        raise OptionError(
            "Plots need matplotlib, which is not installed.", fix="Run `pip install 'heterollm[plots]'`."
        ) from error


def save_png(figure: Figure, target: object) -> None:
    """Write a figure as PNG to a path or an open binary file."""
    figure.savefig(target, format="png", dpi=DPI)  # type: ignore[arg-type]


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


def step_curves(
    axes: Axes,
    curves: Curves,
    ylabel: str,
    *,
    xlabel: str = "tokens",
    logarithmic: bool | None = None,
    legend: bool = True,
) -> None:
    """Draw values against tokens, a line for each curve, with the NPU's stages as faint lines behind.

    Args:
        axes: The axes to draw on.
        curves: The values.
        ylabel: Quantity and unit of the values.
        xlabel: Quantity of the horizontal axis.
        logarithmic: Whether both axes are logarithmic; by default each whose values are far apart.
        legend: Whether to name the lines.
    """
    for (name, curve), colour, marker in zip(
        curves.items(), itertools.cycle(COLOURS), itertools.cycle(MARKERS), strict=False
    ):
        places = sorted(curve)
        values = [curve[place] for place in places]
        axes.plot(places, values, color=colour, marker=marker, markersize=4, linewidth=1.4, label=name)
    values = [value for curve in curves.values() for value in curve.values()]
    longest = max(place for curve in curves.values() for place in curve)
    far = max(values) > WIDE_RANGE * min(values)
    if far if logarithmic is None else logarithmic:
        _logarithmic(axes, values)
    if xlabel == "tokens":
        if longest > LONGEST_LINEAR_AXIS if logarithmic is None else logarithmic:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.0f}")
        else:
            axes.set_xticks(range(0, longest + STAGE_TOKENS, STAGE_TOKENS * (1 + longest // 200)))
            for stage in range(STAGE_TOKENS, longest + 1, STAGE_TOKENS):
                axes.axvline(stage + 0.5, color="0.88", linewidth=0.8, zorder=0)
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        _name_curves(axes, len(curves))


def _name_curves(axes: Axes, count: int) -> None:
    """Add the legend; for many curves above the axes, in a taller figure."""
    from matplotlib.figure import Figure

    if count <= FEW_CURVES:
        axes.legend(fontsize=8)
        return
    axes.legend(
        fontsize=7, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2, frameon=False, borderaxespad=0.2
    )
    figure = axes.figure
    if isinstance(figure, Figure):
        figure.set_figheight(figure.get_figheight() + LEGEND_ROW_IN * -(-count // 2))


def _logarithmic(axes: Axes, values: Sequence[float]) -> None:
    """Make the vertical axis logarithmic, with at least three plain numbers."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(values) < 100 * min(values) else (1,)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter("{x:g}")


def _figure(
    summary: ProfileSummary, title: str, detail: str, *, panels: int = 1, height_in: float = HEIGHT_IN
) -> tuple[Figure, list[Axes]]:
    lines = [title, f"{summary.device}, {summary.time_kind} time", *([detail] if detail else [])]
    return new_figure("\n".join(lines), panels=panels, height_in=height_in)


def new_figure(title: str, *, panels: int = 1, height_in: float = HEIGHT_IN) -> tuple[Figure, list[Axes]]:
    """Return a figure of one column, and its panels from the top.

    Raises:
        OptionError: matplotlib is not installed.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_IN, height_in * (1 + 0.8 * (panels - 1))), layout="constrained")
    grid = figure.subplots(panels, 1, squeeze=False)
    figure.suptitle(title, fontsize=10)
    axes: list[Axes] = list(grid[:, 0])
    for panel in axes:
        panel.tick_params(labelsize=9)
        panel.xaxis.label.set_fontsize(9)
        panel.yaxis.label.set_fontsize(9)
    return figure, axes


def _few(curves: Curves) -> Curves:
    """Return the curves with most points, in their order."""
    chosen = sorted(curves, key=lambda name: -len(curves[name]))[:MOST_CURVES]
    return {name: curve for name, curve in curves.items() if name in chosen}


def _scaled(curves: Curves, factor: float) -> Curves:
    return {name: {at: value * factor for at, value in curve.items()} for name, curve in curves.items()}
