"""Options of a simulated SoC."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from heterollm.base import OptionError
from heterollm.kernels.sim.game import GpuLoad

SIMULATED: Final = "sim:"
"""Prefix of the names of simulated devices."""


def is_simulated(device: object) -> bool:
    """Return whether a value is the name of a simulated device."""
    return isinstance(device, str) and device.startswith(SIMULATED)


def name_in_words(device: str) -> str:
    """Return a device's name for messages; a simulated one is marked as such."""
    return f"simulated {device.removeprefix(SIMULATED)}" if is_simulated(device) else device


@dataclass(frozen=True, slots=True)
class Simulation:
    """Options of a simulation.

    Args:
        numerics: Whether this machine also computes the values, outside the simulated time.
        overrides: Parameters of the SoC by dotted name, which replace those of its file.
        load: A game beside the model.
        lengths: Additional lengths of NPU graphs.
        every_form: Whether the NPU offers graph forms that HeteroLLM does not have.
    """

    numerics: bool = False
    overrides: Mapping[str, float] = field(default_factory=dict)
    load: GpuLoad | None = None
    lengths: tuple[int, ...] = ()
    every_form: bool = True

    def __post_init__(self) -> None:
        if any(type(length) is not int or length < 1 for length in self.lengths):
            raise OptionError(f"NPU graphs cannot have the lengths {self.lengths}.", fix="Give at least 1.")
