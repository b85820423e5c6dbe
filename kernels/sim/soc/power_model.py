"""Energy from the times that parts are busy, as a range, and the time that NPU graphs take to build.

A file states three splits of power into base, GPU, NPU and memory. They agree with two published numbers,
and results are the least, middle and most of the three: a range between assumptions, not an error bar.
HeteroLLM's section 5.6 publishes three powers, and no split meets all of them (docs/soc-model.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from heterollm.base import OptionError
from heterollm.kernels.sim.soc.quantities import PowerSplit, SocParameters


@dataclass(frozen=True, slots=True)
class Usage:
    """The activity of the processors during an interval.

    Args:
        elapsed_us: The time.
        gpu_busy_us: GPU busy.
        npu_busy_us: NPU busy.
        poll_us: A core polling.
        dram_bytes: Moved by all.

    Raises:
        OptionError: A part was busy for longer than the time, or a number is negative.
    """

    elapsed_us: float
    gpu_busy_us: float
    npu_busy_us: float
    poll_us: float = 0.0
    dram_bytes: float = 0.0

    def __post_init__(self) -> None:
        parts = (self.gpu_busy_us, self.npu_busy_us, self.poll_us)
        # A sum of many times may exceed the difference of two by rounding.
        if min(*parts, self.dram_bytes, self.elapsed_us) < 0 or max(parts) > self.elapsed_us * (1 + 1e-6):
            raise OptionError(f"These times cannot be: {self}.")


@dataclass(frozen=True, slots=True)
class EnergyRange:
    """Energy under three splits of power, in joules."""

    low_joules: float
    middle_joules: float
    high_joules: float
    elapsed_us: float

    @property
    def low_watts(self) -> float:
        """Average power, least."""
        return self._watts(self.low_joules)

    @property
    def middle_watts(self) -> float:
        """Average power, middle."""
        return self._watts(self.middle_joules)

    @property
    def high_watts(self) -> float:
        """Average power, most."""
        return self._watts(self.high_joules)

    def _watts(self, joules: float) -> float:
        return joules / (self.elapsed_us / 1e6) if self.elapsed_us > 0 else 0.0


def split_joules(split: PowerSplit, usage: Usage) -> float:
    """Return the energy of a usage under one split of power.

    Args:
        split: The split.
        usage: What the parts did.
    """
    busy = (
        split.base_watts * usage.elapsed_us
        + split.gpu_watts * usage.gpu_busy_us
        + split.npu_watts * usage.npu_busy_us
        + split.poll_watts * usage.poll_us
    )
    return busy / 1e6 + split.dram_joules_per_gbyte * usage.dram_bytes / 1e9


def energy(soc: SocParameters, usage: Usage) -> EnergyRange:
    """Return the energy of a usage as a range.

    Args:
        soc: The SoC.
        usage: What the parts did.
    """
    power = soc.power
    splits = (power.mostly_base, power.balanced, power.mostly_active)
    low, middle, high = sorted(split_joules(split, usage) for split in splits)
    return EnergyRange(low, middle, high, usage.elapsed_us)


def build_us(soc: SocParameters, length: int, graphs: int = 1, weights: int = 0) -> float:
    """Return how long it takes to build NPU graphs of one length: affine in it (HeteroLLM, figure 9).

    Args:
        soc: The SoC.
        length: Tokens, at least 1.
        graphs: How many.
        weights: Of each.

    Raises:
        OptionError: A number is not possible.
    """
    if length < 1 or graphs < 0:
        raise OptionError(f"Cannot build {graphs} graphs of {length} tokens.")
    own = soc.build
    one_us = own.graph_us + own.graph_us_per_token * length + own.graph_us_per_mweight * weights / 1e6
    return graphs * one_us
