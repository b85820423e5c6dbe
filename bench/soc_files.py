"""Writes the YAML files of modelled SoCs, and tables into docs/soc-model.md."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from soc_chain import LLAMA_3_8B, run
from soc_values import ELITE_RATIOS, KNOWN, OWN_PATH

from heterollm.base import atomic_path
from heterollm.kernels.sim import SocParameters
from heterollm.kernels.sim.soc.parameters import TEMPLATE, file_text
from heterollm.kernels.sim.soc.power_model import split_joules
from heterollm.kernels.sim.soc.quantities import PowerSplit, Source, quantities, soc_parameters, unit_of

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "kernels" / "sim" / "soc"
TABLE_FILE: Final = ROOT / "docs" / "soc-model.md"
PAPER: Final = "snapdragon-8gen3-paper"
NAME: Final = "snapdragon-8gen3"
ELITE: Final = "snapdragon-8elite"

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

LAYER_OVER_MNN: Final = 3.18
LAYER_OVER_MLC: Final = 7.27
"""The same of layer level (HeteroLLM, section 1)."""

TENSOR_OVER_LAYER: Final = 1.244
"""Of that prefill of 256 tokens of Llama-3-8B (HeteroLLM, end to end)."""

OVER_MIDDLE: Final = TENSOR_OVER_LAYER * math.sqrt(LAYER_OVER_MNN * LAYER_OVER_MLC)
"""Of that prefill over an engine between the two: the geometric mean."""


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


def starting_values() -> dict[str, float]:
    """Return all values before the fit; power is set to zero until :func:`with_power` sets it."""
    return {name: KNOWN[name].value if name in KNOWN else 0.0 for name in quantities()}


def soc_of(values: Mapping[str, float]) -> SocParameters:
    """Return the parameters that hold these values of an 8 Gen 3 under the paper's conditions."""
    sources: dict[str, Source] = {
        name: KNOWN[name].source if name in KNOWN else "prior" for name in quantities()
    }
    return soc_parameters(PAPER, DESCRIPTION, values, sources)


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
        seconds = np.array(
            [
                [layer.gpu_busy_us, layer.npu_busy_us],
                [
                    longer * alone.gpu_busy_us - ENERGY_RATIO * tensor.gpu_busy_us,
                    -ENERGY_RATIO * tensor.npu_busy_us,
                ],
            ]
        )
        joules = np.array(
            [
                LAYER_WATTS * layer.elapsed_us / 1e6 - split_joules(known, layer),
                ENERGY_RATIO * split_joules(known, tensor) - other,
            ]
        )
        gpu, npu = np.linalg.solve(seconds / 1e6, joules).tolist()
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


DESCRIPTION: Final = (
    "A model of the Snapdragon 8 Gen 3 (SM8650: Adreno 750, Hexagon V75, LPDDR5X) under HeteroLLM's "
    "conditions: its kernels, its pool of shared memory and its graphs, which this program lacks. Fitted to "
    "published numbers, most of them HeteroLLM's of Llama-3-8B at W4A16, by bench/fit_soc.py, which prints "
    "what the model misses and by how much. Times that follow from it are simulated, never measured."
)
OWN_DESCRIPTION: Final = (
    "A model of the Snapdragon 8 Gen 3 as this program would use it: the fitted chip of "
    "snapdragon-8gen3-paper, with this program's kernels, graphs and memory in place of the paper's, by "
    "public reports of others and by assumptions. Nothing here was measured with this program, and times "
    "that follow are simulated."
)
ELITE_DESCRIPTION: Final = (
    "An EXTRAPOLATION to the Snapdragon 8 Elite (SM8750: Adreno 830, Hexagon V79, LPDDR5X-5300): the "
    "modelled 8 Gen 3 as this program would use it, times the ratios that Qualcomm states between the two, "
    "and otherwise equal to it. No measurement of an 8 Elite went into it, and none was compared with it."
)
HEAD: Final = (
    "Written by `python bench/fit_soc.py --fit --write`; change the script, not this file.\n"
    "Sources: published (by a paper or vendor), fitted (by the script), prior (an assumption), "
    "extrapolated (another SoC's value times a published ratio), user. Equations: docs/soc-model.md."
)
ELITE_HEAD: Final = (
    f"{HEAD}\nEXTRAPOLATED. Ratios: Qualcomm's announcement of the Snapdragon 8 Elite, October 2024 (Adreno "
    "40 % faster, Hexagon 45 % faster and 45 % more for each watt, LPDDR5X at up to 5300 MHz), beside the "
    "product brief of the 8 Gen 3 (LPDDR5X at up to 4800 MHz)."
)
TEMPLATE_HEAD: Final = (
    "A modelled SoC of your own: copy this file, rename `soc`, and give its path where a SoC is named.\n"
    "With `based_on`, state only what differs from that SoC. Without it, state every parameter below. Each "
    "has `value`, `unit` (as listed, so that a wrong one is refused), `source` (published, fitted, prior, "
    "extrapolated or user) and, if you like, `meaning` and `note`.\n\n"
    "All parameters:"
)


def texts(soc: SocParameters) -> dict[str, str]:
    """Return the text of each YAML file by name, given the 8 Gen 3 fitted under the paper's conditions."""
    values = soc.values()
    notes = {name: known.note for name, known in KNOWN.items()}
    for name, assumed in SPLITS.items():
        told = (
            f"Assumed: the base is {assumed.base_share:.0%} of {LAYER_WATTS} W, and PPL-OpenCL is "
            f"{assumed.engine}: its prefill takes {assumed.slower:.2f} times tensor level's time (published: "
            f"{SLOWER:.2f}), {times_modelled(soc, assumed):.2f} times that of the modelled GPU alone. "
            f"Watts of GPU and NPU then follow from {LAYER_WATTS} W at layer level and an energy ratio of "
            f"{ENERGY_RATIO} (HeteroLLM, section 5.6)."
        )
        notes[f"power.{name}.base_watts"] = told
        notes[f"power.{name}.dram_joules_per_gbyte"] = "Assumed: 2 to 3 pJ for each bit."
    own: dict[str, float] = {name: known.value for name, known in OWN_PATH.items()}
    own_sources: dict[str, Source] = {name: known.source for name, known in OWN_PATH.items()}
    own_notes = {name: known.note for name, known in OWN_PATH.items()}
    ours = {**values, **own}
    elite = {name: _rounded(ours[name] * ELITE_RATIOS.get(name, (1.0, ""))[0]) for name in ours}
    ratios = {
        name: f"{ELITE_RATIOS[name][0]:.3g} times the 8 Gen 3. {ELITE_RATIOS[name][1]}"
        if name in ELITE_RATIOS
        else "As the 8 Gen 3: no ratio is published."
        for name in values
    }
    extrapolated: dict[str, Source] = dict.fromkeys(values, "extrapolated")
    return {
        PAPER: file_text(PAPER, DESCRIPTION, values, dict(soc.sources), notes, head=HEAD),
        NAME: file_text(NAME, OWN_DESCRIPTION, own, own_sources, own_notes, head=HEAD, based_on=PAPER),
        ELITE: file_text(ELITE, ELITE_DESCRIPTION, elite, extrapolated, ratios, head=ELITE_HEAD),
        TEMPLATE: _template(values),
    }


def _template(values: Mapping[str, float]) -> str:
    listed = "\n".join(
        f"{name} ({unit_of(quantity)}, {quantity.ge:g} to {quantity.le:g}): {quantity.description}"
        for name, quantity in quantities().items()
    )
    example = {"npu.dequantize_gweights_per_s": 2 * values["npu.dequantize_gweights_per_s"]}
    return file_text(
        "my-soc",
        "Say what it stands for and how far to trust it. This example unpacks weights twice as fast.",
        example,
        dict.fromkeys(example, "user"),
        {},
        head=f"{TEMPLATE_HEAD}\n{listed}",
        based_on=NAME,
    )


def _rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.5g}")


def write_files(soc: SocParameters) -> list[Path]:
    """Write all YAML files and return their paths."""
    paths = []
    for name, text in texts(soc).items():
        path = FOLDER / f"{name}.yaml"
        with atomic_path(path) as unfinished:
            unfinished.write_text(text, "utf-8")
        paths.append(path)
    return paths


def write_table(name: str, table: str) -> None:
    """Replace a table in the documentation, between its marks."""
    begin, end = f"<!-- {name}: written by bench/fit_soc.py -->\n", f"<!-- end of {name} -->"
    text = TABLE_FILE.read_text("utf-8")
    if begin not in text or end not in text:
        raise SystemExit(f"{TABLE_FILE} has no place for {name}.")
    before, rest = text.split(begin)
    with atomic_path(TABLE_FILE) as unfinished:
        unfinished.write_text(f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}", "utf-8")
