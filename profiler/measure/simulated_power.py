"""The power of a simulated SoC, read off its virtual clock as a gauge would."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from heterollm.kernels.device import Device
from heterollm.kernels.sim import (
    SimulatedClock,
    SimulatedTotals,
    SocParameters,
    Usage,
    clock_of,
    energy,
    soc_of,
)

VIRTUAL_S: Final = 0.05
"""Modelled power does not vary: a short stretch says as much as a long one."""


@dataclass(frozen=True, slots=True)
class SimulatedMeter:
    """The middle of the power that a SoC's parameters allow for.

    Args:
        soc: The parameters.
        clock: The clock.
    """

    soc: SocParameters
    clock: SimulatedClock

    @property
    def name(self) -> str:
        """The name of the source."""
        return f"model of {self.soc.name}, middle of its range"

    def average_watts(self, work: Callable[[], None], seconds: float) -> float:
        """Return the average power; see :class:`heterollm.profiler.measure.PowerSource`."""
        before, begin_us = self.clock.totals.copy(), self.clock.now_us
        end_us = begin_us + 1e6 * min(seconds, VIRTUAL_S)
        while self.clock.now_us < end_us:
            work()
        usage = usage_between(before, self.clock.totals, self.clock.now_us - begin_us)
        return energy(self.soc, usage).middle_watts

    def joules_since(self, before: SimulatedTotals, begin_us: float) -> float:
        """Return the energy since a moment of the clock at which so much had been used."""
        usage = usage_between(before, self.clock.totals, self.clock.now_us - begin_us)
        return energy(self.soc, usage).middle_joules


def simulated_meters(device: Device) -> list[SimulatedMeter]:
    """Return the gauge of a simulated device."""
    return [SimulatedMeter(soc_of(device), clock_of(device))]


def usage_between(before: SimulatedTotals, after: SimulatedTotals, elapsed_us: float) -> Usage:
    """Return the work of the processors between two moments; the GPU's work for a game counts as its work.

    Args:
        before: What was used until the first.
        after: What was used until the second.
        elapsed_us: Time between them.
    """

    def spent(processor: str) -> float:
        return min(elapsed_us, after.busy_us[processor] - before.busy_us[processor])  # type: ignore[index]

    return Usage(
        elapsed_us,
        min(elapsed_us, spent("gpu") + spent("game")),
        spent("npu"),
        spent("host"),
        after.dram_bytes - before.dram_bytes,
    )
