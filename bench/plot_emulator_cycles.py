"""Draws the steps of 32 tokens and the effect of the order, from the cycle counts of emulator_cycles.py.

Points whose smallest counts do not agree yet are left out, and counted.

    python bench/plot_emulator_cycles.py --out docs/emulator_cycles.png
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

from emulator_cycles import RESULTS, Counts, read_counts, settled

from heterollm.plots import new_figure, save_png, step_curves

NAMES = {"weight_first": "W·x: weight first", "activation_first": "x·W: activation first"}
MILLION = 1e6


def settled_millions(counts: Counts) -> dict[tuple[int, int], dict[str, dict[int, float]]]:
    """Return millions of cycles by weight shape (rows, columns), order and tokens."""
    found: dict[tuple[int, int], dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for point, cycles in counts.items():
        if settled(cycles):
            found[point.rows, point.columns][NAMES[point.form]][point.tokens] = min(cycles) / MILLION
    return found


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--counts", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=Path("docs/emulator_cycles.png"))
    options = parser.parse_args()
    counts = read_counts(options.counts)
    found = settled_millions(counts)
    drawn = {shape: orders for shape, orders in found.items() if len(orders) == len(NAMES)}
    if not drawn:
        raise SystemExit(f"{options.counts} has no weight shape with settled counts in both orders.")
    # The smallest shape has the most settled points.
    shape = max(drawn, key=lambda shape: (sum(map(len, drawn[shape].values())), -shape[0] * shape[1]))
    title = "Steps of 32 tokens, and the effect of the order\nemulator, emulated cycles, fp16"
    figure, (both, scaled) = new_figure(title, panels=2)
    step_curves(both, drawn[shape], f"Mcycles, {shape[0]} x {shape[1]}", logarithmic=False)
    steps = {
        f"W·x, {rows} x {columns}": orders[NAMES["weight_first"]]
        for (rows, columns), orders in sorted(found.items())
        if rows == columns and len(orders[NAMES["weight_first"]]) > 1
    }
    step_curves(scaled, steps, "Mcycles", logarithmic=False)
    save_png(figure, options.out)
    left = sum(not settled(cycles) for cycles in counts.values())
    print(f"{options.out}: {len(counts) - left} settled points; {left} have not settled and are left out")


if __name__ == "__main__":
    main()
