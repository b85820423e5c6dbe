"""The style of all pictures, and the parts that several draw.

They suit a narrow screen: one column, few lines, colours that colour-blind people can distinguish (Okabe and
Ito), and different markers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from heterollm.base import OptionError
from heterollm.report.tables_npu import Curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
MARKERS: Final = ("o", "s", "^", "D", "v", "P")
WIDTH_IN: Final = 4.0
HEIGHT_IN: Final = 3.0
DPI: Final = 180
STAGE_TOKENS: Final = 32
"""Tokens of a stage of the NPU (HeteroLLM, section 3)."""

LONGEST_LINEAR_AXIS: Final = 300
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
