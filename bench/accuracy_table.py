"""The tables of bench/accuracy.py's rows, which bench/figures.py writes into docs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

Row = Mapping[str, Any]
BAND = 5
"""Layers of a line."""
WORST = 8
"""Operators whose losses are shown."""


def accuracy_lines(rows: Sequence[Row]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the columns, one for each model, strength, text and calibration, and a line for each method."""
    latest = {(_column(row), _name(row)): row for row in rows if row["kind"] == "accuracy"}
    found = list(dict.fromkeys(column for column, _ in latest))
    lines: list[tuple[str, ...]] = []
    for name in dict.fromkeys(name for _, name in latest):
        own = [latest.get((column, name)) for column in found]
        lines.append((name, *("" if row is None else _cell(row) for row in own)))
    several = [len(set(values)) > 1 for values in zip(*found, strict=True)]
    columns = ["method"]
    for model, strength, text, calibrating in found:
        outliers = f", outliers x{strength:g}" if strength != 1 else ""
        words = f", {text}" if several[2] else ""
        windows = f", {calibrating} windows calibrate" if several[3] else ""
        columns.append(f"{model}{outliers}{words}{windows}")
    return columns, lines


def _column(row: Row) -> tuple[str, float, str, int]:
    return row["model"], row["strength"], row.get("text", "held_out.txt"), row["calibration_windows"]


def outlier_lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the outlier channels of each kind of operator of a model: figures 10 and 11 of the paper."""
    operators = _operators(rows)
    lines = []
    for group in dict.fromkeys(one["group"] for one in operators):
        own = [one for one in operators if one["group"] == group]
        shares = [100 * one["outlier_channels"] / one["channels"] for one in own]
        ever = [100 * one["channels_ever"] / one["channels"] for one in own]
        hot = [100 * one["hot_channels"] / one["channels"] for one in own]
        lines.append(
            (
                f"`{group}`",
                str(own[0]["channels"]),
                f"{_mean([one['outlier_channels'] for one in own]):.1f} ({_mean(shares):.1f} %)",
                f"{_mean(ever):.1f} %",
                f"{_mean(hot):.1f} % ({max(hot):.1f} %)",
            )
        )
    return lines


def importance_lines(rows: Sequence[Row]) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the largest importance of each kind of operator in bands of layers: figure 12 of the paper."""
    operators = _operators(rows)
    groups = list(dict.fromkeys(one["group"] for one in operators))
    last = max(one["layer"] for one in operators)
    lines = []
    for first in range(0, last + 1, BAND):
        band = [one for one in operators if first <= one["layer"] < first + BAND]
        largest = [max(one["importance"] for one in band if one["group"] == group) for group in groups]
        lines.append((f"{first} to {min(first + BAND - 1, last)}", *(f"{value:,.0f}" for value in largest)))
    return ["layers", *(f"`{group}`" for group in groups)], lines


def loss_lines(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return the operators that lose most without their shadow, and their places in other orders.

    A loss is over the median of all: 8-bit grids everywhere else make each one uncertain by the same draw.
    """
    operators = _operators(rows)
    losses = [one["loss"] for one in operators]
    middle = median(losses)
    spread = median([abs(loss - middle) for loss in losses])
    orders = [sorted(operators, key=lambda one: one[name], reverse=True) for name in ("importance", "gain")]
    worst = sorted(operators, key=lambda one: one["loss"], reverse=True)[:WORST]
    return [
        (
            f"`{one['group']}` of layer {one['layer']}",
            f"{100 * math.expm1(one['loss'] - middle):+.1f} %",
            f"{(one['loss'] - middle) / spread:.0f}",
            *(str(order.index(one) + 1) for order in orders),
        )
        for one in worst
    ]


def _operators(rows: Sequence[Row]) -> list[Row]:
    found: list[Row] = [row for row in rows if row["kind"] == "outliers"][-1]["operators"]
    return found


def _name(row: Row) -> str:
    if row["method"] != "shadow":
        return str(row["method"])
    limit_db = row.get("int16_limit_db")
    wide = "" if limit_db is None else f", 16 bits below {limit_db:g} dB"
    if row["pruned"] == 0:
        return f"shadow, none pruned{wide}"
    ranking = "" if row["pruned"] == 100 else f" by {row['ranking']}"
    kind = ", clamped without it" if row["scale"] == "threshold" else ""
    return f"shadow, {row['pruned']} % pruned{ranking}{kind}{wide}"


def _cell(row: Row) -> str:
    if "change_percent" not in row:
        return f"{row['perplexity']:.3f}"
    change, error = row["change_percent"], row["standard_error_percent"]
    digits = 1 if abs(change) < 100 else 0
    return f"{change:+,.{digits}f} ({error:,.{digits}f}) %, {100 * row['top_1_agreement']:.0f} %"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
