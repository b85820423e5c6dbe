"""Fits the free parameters of the model of a Snapdragon 8 Gen 3 and prints every residual.

    python bench/fit_soc.py                 # the residuals of the committed file
    python bench/fit_soc.py --write         # the table in docs/soc-model.md
    python bench/fit_soc.py --fit --write   # fit, then write fitted values, power and the table
    python bench/fit_soc.py --ablate        # fit again without each mechanism
    python bench/fit_soc.py --plot          # docs/simulated_soc_stages.png

All times are modelled. The picture needs matplotlib; its panels have axes of their own, since CPU time of
emulation knows no memory traffic: only places of steps and the direction of the order effect compare.
Modelled times in it are without the fixed cost of a graph.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from conditions import script_parser
from emulator_stages import HERE, NAMES, SIZE, TOKENS, read_times
from numpy.typing import NDArray
from soc_chain import LLAMA_3_8B, NUMBERS, markdown, residuals, run

from heterollm.base import atomic_path
from heterollm.kernels.sim import SocParameters
from heterollm.kernels.sim.soc.npu_model import NpuWork, npu_time
from heterollm.kernels.sim.soc.parameters import load_soc
from heterollm.kernels.sim.soc.power_model import split_joules
from heterollm.kernels.sim.soc.quantities import PowerSplit, soc_parameters

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "kernels" / "sim" / "soc"
TABLE_FILE: Final = ROOT / "docs" / "soc-model.md"
PICTURE: Final = ROOT / "docs" / "simulated_soc_stages.png"
PAPER: Final = "snapdragon-8gen3-paper"

FREE: Final[Mapping[str, tuple[float, float, float]]] = {
    "gpu.dram_gbps": (43.3, 44.0, 45.0),
    "gpu.gemm_tflops": (0.5, 1.2, 2.8),
    "gpu.prepare_gweights_per_s": (1.0, 5.0, 40.0),
    "gpu.small_tflops": (0.05, 0.5, 1.2),
    "gpu.attention_tflops": (0.1, 0.44, 1.5),
    "npu.array_tflops": (2.0, 5.6, 36.0),
    "npu.tile_load_rows": (16.0, 500.0, 4000.0),
    "npu.dequantize_gweights_per_s": (5.0, 31.0, 120.0),
    "npu.dequantize_int8_gweights_per_s": (4.0, 14.0, 60.0),
    "npu.spill_gbps": (20.0, 50.0, 61.9),
    "npu.execute_us": (20.0, 110.0, 400.0),
    "memory.corun_slowdown": (1.0, 1.06, 1.5),
}
"""What the fit may change: the least value, where it starts, and the largest."""

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


# -- the fit ---------------------------------------------------------------------------------------------


def soc_of(values: Mapping[str, float]) -> SocParameters:
    """Return the parameters that hold these values of an 8 Gen 3 under the paper's conditions."""
    committed = load_soc(PAPER)
    return soc_parameters(PAPER, committed.description, values, dict(committed.sources))


def fit(fixed: Mapping[str, float]) -> tuple[dict[str, float], float]:
    """Return fitted values and the cost, the sum of squared weighted errors.

    Args:
        fixed: Values that take part in no fit, in place of those known.
    """
    from scipy.optimize import least_squares

    values = {**load_soc(PAPER).values(), **{name: start for name, (_, start, _) in FREE.items()}, **fixed}
    free = [name for name in FREE if name not in fixed]
    numbers = [number for number in NUMBERS if number.weight]
    lows, highs = (np.log([FREE[name][end] for name in free]) for end in (0, 2))
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
    _, cost = fit({})
    lines = ["| without | cost of the fit |", "|---|---:|", f"| (nothing left out) | {cost:.1f} |"]
    for name, fixed in MECHANISMS.items():
        start = time.monotonic()
        _, without = fit(fixed)
        lines.append(f"| {name} | {without:.1f} |")
        print(f"{name}: {without:.1f} ({time.monotonic() - start:.0f} s)", flush=True)
    return "\n".join(lines) + "\n"


# -- power -----------------------------------------------------------------------------------------------

LAYER_WATTS: Final = 2.23
"""Average power of a prefill of 256 tokens of Llama-3-8B at layer level (HeteroLLM, section 5.6)."""

ENERGY_RATIO: Final = 5.87
"""Energy of that prefill by PPL-OpenCL, on the GPU alone, over tensor level's (HeteroLLM, section 5.6)."""

SLOWER: Final = 2.99 * 1.244
"""Time of that prefill by PPL-OpenCL over tensor level's (HeteroLLM, sections 5.2.1 and 5.6): 3.72."""

TENSOR_WATTS: Final = 1.232 * LAYER_WATTS
PPL_WATTS: Final = TENSOR_WATTS / (1 - 0.367)
"""Average power at tensor level and of PPL-OpenCL (HeteroLLM, section 5.6)."""

OVER_MNN: Final = 4.36
OVER_MLC: Final = 9.99
"""Prefill speed of tensor level over MNN's and MLC's (HeteroLLM, abstract): the most that was seen."""

OVER_MIDDLE: Final = 1.244 * math.sqrt(3.18 * 7.27)
"""Of that prefill over an engine between the two: tensor over layer level (HeteroLLM, end to end), times the
geometric mean of layer level over MNN and over MLC (section 1)."""


@dataclass(frozen=True, slots=True)
class Assumed:
    """What a split of power assumes beside the two published numbers.

    Args:
        base_share: Share of the base in 2.23 W.
        engine: How slow PPL-OpenCL, which took 5.87 times the energy, is taken to be, in words.
        slower: Time of its prefill over tensor level's by that assumption.
        dram_joules_per_gbyte: Of a gigabyte moved: 2 to 3 pJ a bit.
        poll_watts: Of a polling core.
    """

    base_share: float
    engine: str
    slower: float
    dram_joules_per_gbyte: float
    poll_watts: float


SPLITS: Final[Mapping[str, Assumed]] = {
    "mostly_base": Assumed(0.5, "as slow as MLC", OVER_MLC, 0.015, 0.1),
    "balanced": Assumed(0.3, "between MNN and MLC", OVER_MIDDLE, 0.02, 0.2),
    "mostly_active": Assumed(0.1, "as slow as MNN", OVER_MNN, 0.025, 0.3),
}
"""What was assumed before section 5.6 was at hand, which names PPL-OpenCL and publishes three powers. The
slower it is taken to be, the less the GPU draws, and so it does with a larger base: pairing the ends of both
spans the energy of GPU work. A power below zero is refused. No split is right: PPL-OpenCL takes
:data:`SLOWER`, which is less than all of them assume, and with the modelled shares of time the published
watts refute an additive model (:func:`additive_watts`)."""


def times_modelled(soc: SocParameters, assumed: Assumed) -> float:
    """Return the assumed time of PPL-OpenCL's prefill of 256 tokens over the modelled GPU-only one's."""
    tensor_us, alone_us = (run(soc, LLAMA_3_8B, 256, level).elapsed_us for level in ("tensor", "gpu"))
    return assumed.slower * tensor_us / alone_us


def with_power(values: Mapping[str, float]) -> dict[str, float]:
    """Return values with the three splits of power, each of which meets two published numbers."""
    soc, done = soc_of(values), dict(values)
    layer, tensor, alone = (run(soc, LLAMA_3_8B, 256, level).usage() for level in ("layer", "tensor", "gpu"))
    for name, assumed in SPLITS.items():
        base, longer = assumed.base_share * LAYER_WATTS, times_modelled(soc, assumed)
        dram, poll = assumed.dram_joules_per_gbyte, assumed.poll_watts
        known = PowerSplit(base, 0.0, 0.0, dram, poll)
        # Of PPL-OpenCL: the base runs and the GPU is busy for longer, and as many bytes move.
        other = split_joules(known, alone) + base * (longer - 1) * alone.elapsed_us / 1e6
        gpu_us = longer * alone.gpu_busy_us - ENERGY_RATIO * tensor.gpu_busy_us
        seconds = [
            [layer.gpu_busy_us / 1e6, layer.npu_busy_us / 1e6],
            [gpu_us / 1e6, -ENERGY_RATIO * tensor.npu_busy_us / 1e6],
        ]
        joules = [
            LAYER_WATTS * layer.elapsed_us / 1e6 - split_joules(known, layer),
            ENERGY_RATIO * split_joules(known, tensor) - other,
        ]
        gpu, npu = np.linalg.solve(seconds, joules).tolist()
        for field, value in zip(
            ("base_watts", "gpu_watts", "npu_watts", "dram_joules_per_gbyte", "poll_watts"),
            (base, gpu, npu, dram, poll),
            strict=True,
        ):
            done[f"power.{name}.{field}"] = float(f"{value:.4g}")
    return done


def additive_watts(soc: SocParameters) -> tuple[float, float, float]:
    """Return the watts of base, GPU and NPU that would meet all three published powers.

    Layer level, tensor level and the GPU alone, each busy for the modelled shares of its time.
    """
    used = [run(soc, LLAMA_3_8B, 256, level).usage() for level in ("layer", "tensor", "gpu")]
    shares = [[1.0, one.gpu_busy_us / one.elapsed_us, one.npu_busy_us / one.elapsed_us] for one in used]
    base, gpu, npu = np.linalg.solve(shares, [LAYER_WATTS, TENSOR_WATTS, PPL_WATTS]).tolist()
    return base, gpu, npu


# -- files -----------------------------------------------------------------------------------------------


def fitted_text(soc: SocParameters) -> str:
    """Return the text of the YAML file with the values of the fitted 8 Gen 3."""
    return with_values((FOLDER / f"{PAPER}.yaml").read_text("utf-8"), soc.values())


def with_values(text: str, values: Mapping[str, float]) -> str:
    """Return the text of a YAML file with other values of the parameters that it states."""
    path: list[str] = []
    lines = text.splitlines()
    for at, line in enumerate(lines):
        if found := re.fullmatch(r"( *)(\w+):(?: .*)?", line):
            path[len(found[1]) // 2 :] = [found[2]]
            name = ".".join(path[:-1])
            if found[2] == "value" and name in values:
                lines[at] = f"{found[1]}value: {_number(values[name])}"
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    """Write a number that any reader of YAML takes as one: with a decimal point and no exponent."""
    if value == int(value):
        return str(int(value)) if isinstance(value, int) else f"{value:.1f}"
    return f"{value:.10f}".rstrip("0")


def write_table(name: str, table: str) -> None:
    """Replace a table in the documentation, between its marks."""
    begin, end = f"<!-- {name}: written by bench/fit_soc.py -->\n", f"<!-- end of {name} -->"
    text = TABLE_FILE.read_text("utf-8")
    if begin not in text or end not in text:
        raise SystemExit(f"{TABLE_FILE} has no place for {name}.")
    before, rest = text.split(begin)
    _save(TABLE_FILE, f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}")


def _save(path: Path, text: str) -> None:
    with atomic_path(path) as unfinished:
        unfinished.write_text(text, "utf-8")
    print(path)


# -- the picture -----------------------------------------------------------------------------------------


def modelled_curves(soc: SocParameters, rows: int, columns: int) -> dict[str, dict[int, float]]:
    """Return microseconds by tokens in both orders, FP16 weights."""
    return {
        name: {
            tokens: npu_time(soc, NpuWork(rows, columns, tokens, 16, 0, form)).busy_us for tokens in TOKENS
        }
        for form, name in NAMES.items()
    }


def coded_curves(soc: SocParameters) -> dict[str, dict[int, float]]:
    """Return milliseconds by tokens in both orders: the gate's weight of Llama-3-8B in 4-bit codes."""
    lengths = [tokens for tile in range(8) for tokens in (32 * tile + 1, 32 * tile + 32)]
    return {
        name: {
            tokens: npu_time(soc, NpuWork(14336, 4096, tokens, 4, 128, form)).busy_us / 1e3
            for tokens in lengths
        }
        for form, name in NAMES.items()
    }


def emulated_curves() -> dict[str, dict[int, float]]:
    """Return the CPU time of emulation in ms by tokens in both orders: the smallest of each point."""
    times_us = read_times(HERE / "results" / "emulator_stages.jsonl")
    return {
        name: {tokens: min(times_us[form, tokens]) / 1e3 for tokens in TOKENS if times_us[form, tokens]}
        for form, name in NAMES.items()
    }


def draw(soc: SocParameters) -> None:
    """Draw steps and order effect of the modelled NPU beside the CPU time of Qualcomm's emulator."""
    from heterollm.report.figures import new_figure, save_png, step_curves

    figure, panels = new_figure(
        f"Orders and steps of 32 tokens\n{soc.name}, simulated time\nand CPU time of emulation", panels=3
    )
    step_curves(panels[0], coded_curves(soc), "simulated ms, int4, 14336 x 4096", logarithmic=False)
    float_curves = modelled_curves(soc, SIZE, SIZE)
    step_curves(panels[1], float_curves, f"simulated us, fp16, {SIZE} x {SIZE}", logarithmic=False)
    step_curves(panels[2], emulated_curves(), f"CPU ms, fp16, {SIZE} x {SIZE}", logarithmic=False)
    for panel in panels:
        panel.set_ylim(bottom=0)
    save_png(figure, PICTURE)
    print(PICTURE)


def main() -> None:
    """Fit, write, draw or only print, as asked."""
    parser = script_parser(__doc__, out=False)
    parser.add_argument("--fit", action="store_true", help="fit anew instead of reading the committed file")
    parser.add_argument("--write", action="store_true", help="write the YAML file and the table")
    parser.add_argument("--ablate", action="store_true", help="fit without each mechanism in turn")
    parser.add_argument("--plot", action="store_true", help="draw docs/simulated_soc_stages.png")
    parser.add_argument("--soc", default=PAPER, help="whose residuals to print without --fit")
    options = parser.parse_args()
    if options.plot:
        draw(load_soc(options.soc))
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
        _save(FOLDER / f"{PAPER}.yaml", fitted_text(soc))
        write_table("residuals", table)
    print(table)
    for name in FREE:
        print(f"{name:38} {soc.values()[name]:10.5g}")


if __name__ == "__main__":
    main()
