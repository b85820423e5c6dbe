"""Tables of the public speeds beside the model, and of the forecast beside the best of them."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from tables.table import Lines, Row, rows_of, table

FLOATS: Final = "AI Hub, float activations"
KINDS: Final[dict[str, Callable[[Row], bool]]] = {
    "NPU, AI Hub's integer graphs": lambda row: row["engine"] == "AI Hub",
    "NPU, AI Hub's float graphs": lambda row: row["engine"] == FLOATS,
    "NPU, other engines": lambda row: not (row["engine"].startswith("AI Hub") or "GPU" in row["engine"]),
    "GPU, 4 bits": lambda row: "GPU" in row["engine"] and _bits(row) == 4,
    "GPU, 8 and 16 bits, reads": lambda row: "GPU" in row["engine"] and _bits(row) != 4,
}
"""Kinds of anchors by their rows."""


def _bits(row: Row) -> int:
    named = any(words in row["engine"] for words in ("F16", "8 bits", "reads"))
    return 16 if named else 4


def ratio(row: Row) -> float:
    """Return the modelled speed over the measured one."""
    return float(row["simulated"] / row["measured"])


def _spread(rows: Sequence[Row]) -> str:
    found = sorted(map(ratio, rows))
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})" if found else ""


@table(
    "simulation",
    "anchors by kind",
    "simulated over measured: median (least to most) | speeds used | prefill, predicted | decode, predicted",
)
def kinds() -> Lines:
    """Yield how far the model agrees with the speeds that it was not fitted to."""
    for name, own in KINDS.items():
        rows = [row for row in rows_of("anchors") if own(row)]
        predicted = [[row for row in rows if row["phase"] == phase and not row["used"]] for phase in PHASES]
        yield name, str(sum(row["used"] for row in rows)), *map(_spread, predicted)


PHASES: Final = ("prefill", "decode")


@table(
    "simulation",
    "anchors",
    "anchor | engine, model | prefill: measured | simulated | ratio | decode: measured | simulated | ratio | source",
    "llrrrrrrl",
    tight=True,
)
def anchors() -> Lines:
    """Yield every public speed beside the model's; in bold those that the fit used."""
    lines: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows_of("anchors"):
        place = tuple(row[name] for name in ("chip", "anchor", "engine", "model", "source"))
        lines.setdefault(place, {})[row["phase"]] = row
    for (chip, name, engine, model, source), found in lines.items():
        cells = (cell for phase in PHASES for cell in _cells(found.get(phase)))
        yield f"{name}, {chip}", f"{engine}, {model}", *cells, source


def _cells(row: Row | None) -> Iterator[str]:
    if row is None:
        yield from ("", "", "")
        return
    shown = f"{ratio(row):.2f}"
    yield from (f"{row['measured']:g}", f"{row['simulated']:.3g}", f"**{shown}**" if row["used"] else shown)
