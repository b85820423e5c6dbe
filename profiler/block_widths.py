"""Times of blocks between the widths that were measured: straight lines, instead of a model of few points.

A profile has three or four widths of a block at a length. A model that was fitted to them and to all other
lengths may lie below the time of a narrower one; between two measured widths the time is nearly linear, since
what is cut off the width is work alike.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from heterollm.profiler.records import LinearPoint
from heterollm.profiler.time_model import Prediction

__all__ = ["BlockWidths"]

SOURCE: Final = "widths"
KNOWN_FACTOR: Final = 2.0
"""Widths that lie so far outside of the measured ones are still known."""


class BlockWidths:
    """The measured widths of every block, length and form.

    Args:
        measured: What was measured; what is no block is left out.
    """

    def __init__(self, measured: Mapping[LinearPoint, Prediction]) -> None:
        self._found: dict[LinearPoint, list[tuple[int, Prediction]]] = {}
        for point, prediction in measured.items():
            if point.is_block:
                self._found.setdefault(_kind(point), []).append((point.member_rows[0], prediction))
        for widths in self._found.values():
            widths.sort(key=lambda item: item[0])

    def predict(self, point: LinearPoint) -> Prediction | None:
        """Return a block's time by its measured neighbours; None where its length has none."""
        widths = self._found.get(_kind(point)) if point.is_block else None
        if not widths:
            return None
        width = point.member_rows[0]
        place = bisect.bisect_left(widths, width, key=lambda item: item[0])
        if not 0 < place < len(widths):
            nearest, found = widths[min(place, len(widths) - 1)]
            share = width / nearest
            known = 1.0 / KNOWN_FACTOR <= share <= KNOWN_FACTOR
            return Prediction(found.us * share, found.low_us * share, found.high_us * share, known, SOURCE)
        (low, below), (high, above) = widths[place - 1], widths[place]
        share = (width - low) / (high - low)

        def line(first: float, second: float) -> float:
            return first + share * (second - first)

        times = (below.us, above.us), (below.low_us, above.low_us), (below.high_us, above.high_us)
        us, low_us, high_us = (line(*pair) for pair in times)
        return Prediction(us, low_us, high_us, True, SOURCE)


def _kind(point: LinearPoint) -> LinearPoint:
    """Return the point without its width."""
    return replace(point, member_rows=(0, 0))
