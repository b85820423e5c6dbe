"""Fits the free parameters of the model of a Snapdragon 8 Gen 3 and prints every residual.

    python bench/fit_soc.py                 # the residuals of the committed file
    python bench/fit_soc.py --write         # the YAML files again, with the committed fit
    python bench/fit_soc.py --fit --write   # fit, write the YAML files and the table in docs/soc-model.md
    python bench/fit_soc.py --ablate        # fit again without each mechanism
    python bench/fit_soc.py --plot          # docs/simulated_soc_stages.png

All times are modelled. The picture needs matplotlib.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray
from soc_files import PAPER, TABLE_FILE, soc_of, starting_values, with_power, write_files, write_table
from soc_numbers import NUMBERS, markdown, residuals
from soc_values import FREE

from heterollm.kernels.sim.soc.parameters import load_soc

STARTS: Final = 4
MECHANISMS: Final[Mapping[str, Mapping[str, float]]] = {
    "spill of long rows": {"npu.spill_gbps": 61.9, "npu.row_limit_columns": 1 << 24},
    "a cache for spilled rows (DRAM instead)": {"npu.spill_dram_fraction": 1.0},
    "unpacking of weights": {"npu.dequantize_gweights_per_s": 1e5},
    "loading of tiles (order)": {"npu.tile_load_rows": 0.0},
    "GPU kernel for few tokens": {"gpu.small_tflops": 1e-3},
    "GPU floor of many tokens": {"gpu.prepare_gweights_per_s": 1e5},
    "slowdown while both run": {"memory.corun_slowdown": 1.0},
    "hiding of the NPU's fixed cost": {"npu.execute_exposed_fraction": 1.0},
    "NPU's fixed cost": {"npu.execute_us": 0.0},
    "short gaps in a busy queue (15 us instead)": {"gpu.kernel_gap_us": 15.0},
    "limit of all memory traffic": {"memory.limit_gbps": 10_000.0},
}
"""What switches each mechanism off."""


def fit(fixed: Mapping[str, float]) -> tuple[dict[str, float], float]:
    """Return fitted values and the cost, the sum of squared weighted errors.

    Args:
        fixed: Values that take part in no fit, in place of those known.
    """
    from scipy.optimize import least_squares

    values = {**starting_values(), **fixed}
    free = [name for name in FREE if name not in fixed]
    numbers = [number for number in NUMBERS if number.weight]
    lows, highs = (np.log([FREE[name][end] for name in free]) for end in (0, 1))
    # Slowdowns and shares start inside of their bounds, not on them.
    start = np.clip(np.log([values[name] for name in free]), lows + 1e-3, highs - 1e-3)

    def errors(logarithms: NDArray[np.float64]) -> list[float]:
        changed = dict(zip(free, np.exp(logarithms).tolist(), strict=True))
        rows = residuals(soc_of({**values, **changed}), numbers)
        return [row.log_error for row in rows]

    # The choice of cuts puts kinks into the cost: starts beside the first find a lower one now and then.
    randoms = np.random.default_rng(0)
    starts = [start, *(start + 0.1 * randoms.standard_normal(len(free)) for _ in range(STARTS - 1))]
    found = [
        least_squares(errors, np.clip(first, lows + 1e-3, highs - 1e-3), bounds=(lows, highs), diff_step=1e-3)
        for first in starts
    ]
    done = min(found, key=lambda result: float(result.cost))
    fitted = {name: float(f"{np.exp(value):.5g}") for name, value in zip(free, done.x, strict=True)}
    return {**values, **fitted}, 2 * float(done.cost)


def ablate() -> str:
    """Return a table of the cost without each mechanism."""
    full, cost = fit({})
    lines = ["| without | cost of the fit |", "|---|---:|", f"| (nothing left out) | {cost:.1f} |"]
    for name, fixed in MECHANISMS.items():
        start = time.monotonic()
        _, without = fit(fixed)
        lines.append(f"| {name} | {without:.1f} |")
        print(f"{name}: {without:.1f} ({time.monotonic() - start:.0f} s)", flush=True)
    assert full
    return "\n".join(lines) + "\n"


def main() -> None:
    """Fit, write, draw or only print, as asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--fit", action="store_true", help="fit anew instead of reading the committed file")
    parser.add_argument("--write", action="store_true", help="write the YAML files and the table")
    parser.add_argument("--ablate", action="store_true", help="fit without each mechanism in turn")
    parser.add_argument("--plot", action="store_true", help="draw docs/simulated_soc_stages.png")
    parser.add_argument("--soc", default=PAPER, help="whose residuals to print without --fit")
    options = parser.parse_args()
    if options.plot:
        from soc_plot import draw

        print(draw(load_soc(options.soc)))
        return
    if options.ablate:
        table = ablate()
        if options.write:
            write_table("ablation", table)
        print(table)
        return
    if options.fit:
        values, cost = fit({})
        soc = soc_of(with_power(values))
        print(f"cost {cost:.2f}")
    else:
        soc = load_soc(options.soc)
    table = markdown(residuals(soc))
    if options.write:
        paths = write_files(soc)
        write_table("residuals", table)
        print("\n".join(str(path) for path in (*paths, TABLE_FILE)))
    print(table)
    for name in FREE:
        print(f"{name:38} {soc.values()[name]:10.5g}")


if __name__ == "__main__":
    main()
