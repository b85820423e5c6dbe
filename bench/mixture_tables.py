"""The tables of bench/trained_experts.py's rows, which bench/figures.py writes into docs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Row = dict[str, Any]
Lines = list[tuple[str, ...]]

TEXTS: Final = ("code", "prose")
PAIRS: Final = {("code", "prose"): "code and prose", ("code", "code"): "two halves of the code"}
PAIRS |= {("prose", "prose"): "two halves of the prose"}


def popularity_lines(rows: Sequence[Row]) -> tuple[list[str], Lines]:
    """Return the columns, and a line of shares of the tokens, by falling popularity, for text and layer."""
    lines: Lines = []
    for text in TEXTS:
        for row in _of(rows, kind="popularity", text=text):
            counts = np.sort(row["counts"])[::-1]
            shares = "  ".join(f"{share:.0f}" for share in 100 * counts / counts.sum())
            tiers = ", ".join(map(str, row["tiers"]))
            lines.append((text, f"{row['layer']}", shares, f"{row['imbalance']:.2f}", tiers))
    return ["text", "layer", "choices of each expert, %", "imbalance", "tiers"], lines


def overlap_lines(rows: Sequence[Row]) -> tuple[list[str], Lines]:
    """Return the columns, and a line of the mean Overlap@K over the layers for each two texts."""
    numbers = sorted({row["experts"] for row in _of(rows, kind="overlap")})
    lines: Lines = []
    for (one, other), name in PAIRS.items():
        found = [_of(rows, kind="overlap", one=one, other=other, experts=number)[-1] for number in numbers]
        lines.append((name, *(f"{np.mean(row['by_layer']):.0%}" for row in found)))
    return ["texts", *(f"K = {number}" for number in numbers)], lines


def capacity_lines(rows: Sequence[Row]) -> tuple[list[str], Lines]:
    """Return the columns, and a line of padding and overflow for each capacity, without any run."""
    asked: list[tuple[str, dict[str, str]]] = [(text, {"calibration": text, "text": text}) for text in TEXTS]
    asked += [
        (f"{text}, calibrated on {other}", {"calibration": other, "text": text})
        for text, other in (TEXTS, TEXTS[::-1])
    ]
    capacities = dict.fromkeys(row["capacity"] for row in _of(rows, kind="capacity"))
    lines: Lines = []
    for capacity in capacities:
        cells = []
        for _, texts in asked:
            found = _of(rows, kind="capacity", capacity=capacity, **texts)
            row = found[-1] if found else None
            cells.append("" if row is None else f"{row['padding_share']:.0%}, {row['overflow_share']:.1%}")
        lines.append((f"{capacity}", *cells))
    return ["capacity", *(name for name, _ in asked)], lines


def overflow_lines(rows: Sequence[Row]) -> tuple[list[str], Lines]:
    """Return the columns, and a line of perplexities for each capacity and fate of the overflow."""
    own = _of(rows, kind="overflow")
    lines: Lines = []
    for capacity, fate in dict.fromkeys((row["capacity"], row["overflow"]) for row in own):
        cells: list[str] = []
        for text in TEXTS:
            gpu = _of(own, capacity=0, text=text)[-1]
            row = _of(own, capacity=capacity, overflow=fate, text=text)[-1]
            if capacity:
                rises = _losses(row) - _losses(gpu)
                error = rises.std(ddof=1) / len(rises) ** 0.5
                cells += [f"{row['npu_share']:.1%}", f"{row['dropped_share']:.1%}"]
                cells.append(f"{row['perplexity']:.2f} ({round(rises.mean(), 3) + 0.0:+.3f} ± {error:.3f})")
            else:
                cells += ["", "", f"{row['perplexity']:.2f}"]
        name = f"{capacity}, `{fate}`" if capacity else "level `gpu`"
        lines.append((name, *cells))
    columns = [f"{text}: {what}" for text in TEXTS for what in ("NPU", "dropped", "perplexity (loss, nats)")]
    return ["capacity, overflow", *columns], lines


def bytes_lines(rows: Sequence[Row]) -> tuple[list[str], Lines]:
    """Return the columns, and a line of what a decoded token reads for each model."""
    lines: Lines = []
    for model in dict.fromkeys(row["model"] for row in _of(rows, kind="bytes")):
        row = _of(rows, kind="bytes", model=model)[-1]
        read, whole, active = row["read_bytes"], row["all_bytes"], row["active_parameters"]
        lines.append(
            (
                model,
                f"{row['all_parameters'] / 1e6:,.0f}",
                f"{active / 1e6:,.1f}",
                f"{whole / 1e6:,.1f}",
                f"{read / 1e6:,.1f}",
                f"{read / whole:.1%}",
                f"{read / active:.2f}",
                f"{row['counted']}",
            )
        )
    columns = ["model", "parameters, M", "active, M", "weights, MB", "read for a token, MB", "of all"]
    return [*columns, "bytes for an active parameter", "counted by"], lines


def _of(rows: Sequence[Row], **asked: object) -> list[Row]:
    return [row for row in rows if all(row.get(key) == value for key, value in asked.items())]


def _losses(row: Row) -> NDArray[np.float64]:
    return np.array(row["mean_losses"])
