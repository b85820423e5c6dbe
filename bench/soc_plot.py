"""Draws the modelled NPU's steps and order effect beside the CPU time of Qualcomm's emulator.

Modelled times and CPU times of emulation are different things: each panel has an axis of its own, and
only the places of the steps and the direction of the order effect are to be compared. Modelled times are
without the fixed cost of a graph.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from emulator_stages import HERE, NAMES, SIZE, TOKENS, read_times

from heterollm.kernels.sim import SocParameters
from heterollm.kernels.sim.soc.npu_model import NpuWork, npu_time
from heterollm.report.figures import new_figure, save_png, step_curves

LONG: Final = tuple(tokens for tile in range(8) for tokens in (32 * tile + 1, 32 * tile + 32))
PICTURE: Final = HERE.parent / "docs" / "simulated_soc_stages.png"
COUNTS: Final = HERE / "results" / "emulator_stages.jsonl"


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
    return {
        name: {
            tokens: npu_time(soc, NpuWork(14336, 4096, tokens, 4, 128, form)).busy_us / 1e3 for tokens in LONG
        }
        for form, name in NAMES.items()
    }


def emulated_curves() -> dict[str, dict[int, float]]:
    """Return the CPU time of emulation in ms by tokens in both orders: the smallest of each point."""
    times_us = read_times(COUNTS)
    return {
        name: {tokens: min(times_us[form, tokens]) / 1e3 for tokens in TOKENS if times_us[form, tokens]}
        for form, name in NAMES.items()
    }


def draw(soc: SocParameters) -> Path:
    """Draw three panels and return the picture's path."""
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
    return PICTURE
