"""Charts of pages: curves and strips as SVG that follows the page's colours, without scripts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from heterollm.report.page_parts import part_html

WIDTH: Final = 640
HEIGHT: Final = 300
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 44
"""Room for labels around the curves, in units of the picture."""

SHADES: Final = 6
"""Colours of curves, from which styles ``c0`` to ``c5`` take them."""

WIDE_RANGE: Final = 20.0
"""A quotient of the largest and the least value beyond which an axis is logarithmic."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart, or its points alone.

    Args:
        name: Words for the key.
        points: Places and values.
        style: Style class of the colour.
        line: Whether a line joins the points.
        hollow: Whether the points have no filling.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    style: str
    line: bool = True
    hollow: bool = False


@dataclass(frozen=True, slots=True)
class Strip:
    """A row of shares over lengths.

    Args:
        name: Label.
        pieces: First and last length, the share from 0 to 1, and words for it.
    """

    name: str
    pieces: tuple[tuple[int, int, float, str], ...]


class _Axis:
    """Places values between two ends of a picture.

    Args:
        values: All values.
        ends: Places of the least and the largest value.
        logarithmic: Whether equal factors have equal lengths; None where values lie far apart.
        base: Of the ticks of a logarithmic axis.
    """

    def __init__(
        self, values: Sequence[float], ends: tuple[float, float], *, logarithmic: bool | None, base: int = 10
    ) -> None:
        least, most = min(values), max(values)
        wide = least > 0 and most > WIDE_RANGE * least
        self.logarithmic = least > 0 and (wide if logarithmic is None else logarithmic)
        self._begin, self._end = ends
        if self.logarithmic:
            self.ticks = _powers(least, most, base)
            least, most = min(least, *self.ticks) / 1.05, max(most, *self.ticks) * 1.05
        else:
            self.ticks = _steps(most or 1.0)
            least, most = 0.0, max(most, *self.ticks) * 1.02
        self._least, self._most = self._scaled(least), self._scaled(most)

    def _scaled(self, value: float) -> float:
        return math.log(value) if self.logarithmic else value

    def place(self, value: float) -> float:
        """Return the place of a value."""
        share = (self._scaled(value) - self._least) / ((self._most - self._least) or 1.0)
        return self._begin + share * (self._end - self._begin)


def _steps(most: float) -> list[float]:
    """Return four to eight round numbers from 0 to one."""
    raw = most / 5
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    return [step * number for number in range(round(most / step) + 1)]


def _powers(least: float, most: float, base: int) -> list[float]:
    """Return powers of a base, or 1, 2 and 5 times them where a range has few."""
    first, last = math.floor(math.log(least, base) + 1e-9), math.ceil(math.log(most, base) - 1e-9)
    powers = [float(base) ** power for power in range(first, last + 1)]
    if base == 10 and len(powers) < 4:
        found = [factor * power for power in powers for factor in (1, 2, 5)]
        return [one for one in found if least / 2 <= one <= most * 2] or powers
    every = max(1, len(powers) // 11)
    return powers[::every]


def curves_html(
    curves: Sequence[Curve],
    caption: str,
    axes: tuple[str, str],
    *,
    logarithmic: tuple[bool | None, bool | None] = (None, None),
    equal: bool = False,
) -> Markup:
    """Return a chart of curves.

    Args:
        curves: With at least one point in all.
        caption: Sentence below the chart.
        axes: Quantities of the places and of the values, with units; places named ``tokens`` are powers of 2.
        logarithmic: Of both axes; None where the values lie far apart.
        equal: Whether both axes have the same scale, with a line of equal values.
    """
    places, values = ([point[side] for curve in curves for point in curve.points] for side in (0, 1))
    if equal:
        places = values = [*places, *values]
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    base = 2 if axes[0] == "tokens" else 10
    across = _Axis(places, (LEFT, right), logarithmic=logarithmic[0], base=base)
    up = _Axis(values, (bottom, TOP), logarithmic=logarithmic[1])
    drawn = [
        (
            curve,
            " ".join(f"{across.place(x):.1f},{up.place(y):.1f}" for x, y in sorted(curve.points)),
            [
                (across.place(x), up.place(y), f"{curve.name}, {axes[0]} {x:.4g}: {y:.4g}")
                for x, y in curve.points
            ],
        )
        for curve in curves
    ]
    low, high = min(places), max(places)
    diagonal = [(across.place(end), up.place(end)) for end in (low, high)] if equal else None
    frame = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": right, "top": TOP, "bottom": bottom}
    return part_html(
        "curves",
        drawn,
        [(across.place(tick), _number(tick)) for tick in across.ticks],
        [(up.place(tick), _number(tick)) for tick in up.ticks],
        frame,
        axes,
        caption,
        diagonal,
    )


def _number(value: float) -> str:
    return f"{value:g}" if value < 1e6 else f"{value:.0e}"


def named_curves(curves: Mapping[str, Mapping[int, float]]) -> list[Curve]:
    """Return curves by name with the page's colours in turn; those with most points, where there are many."""
    chosen = sorted(curves, key=lambda name: -len(curves[name]))[:SHADES]
    return [
        Curve(name, tuple(sorted(curves[name].items())), f"c{place}")
        for place, name in enumerate(name for name in curves if name in chosen)
    ]


def strips_html(
    strips: Sequence[Strip], caption: str, lengths: tuple[int, int], keys: Sequence[tuple[str, str]]
) -> Markup:
    """Return rows of shares over lengths, on a logarithmic axis.

    Args:
        strips: From the top.
        caption: Sentence below.
        lengths: The least and the largest.
        keys: Style classes with the meaning of their colours.
    """
    least, most = lengths
    scale = 100 / math.log((most + 1) / least)

    def place(length: float) -> float:
        return scale * math.log(length / least)

    drawn = [(strip, list(_boxes(strip, place))) for strip in strips]
    ticks = [2**power for power in range(most.bit_length()) if least <= 2**power <= most]
    every = max(1, -(-len(ticks) // 7))
    shown = [(place(tick), str(tick)) for tick in ticks[::every]]
    return part_html("strips", drawn, shown, caption, keys)


def _boxes(strip: Strip, place: Callable[[float], float]) -> Iterator[tuple[float, float, float, str]]:
    """Yield left edge, width, share and words of each piece, with 100 as the whole width."""
    for first, last, share, words in strip.pieces:
        yield place(first), place(last + 1) - place(first), share, words
