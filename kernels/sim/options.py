"""How a simulated SoC is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from heterollm.base import OptionError
from heterollm.kernels.sim.game import GpuLoad

__all__ = ["SIMULATED", "Simulation", "is_simulated", "name_in_words"]

SIMULATED: Final = "sim:"
"""What the names of simulated devices begin with."""


def is_simulated(device: object) -> bool:
    """Return whether this is the name of a simulated device."""
    return isinstance(device, str) and device.startswith(SIMULATED)


def name_in_words(device: str) -> str:
    """Return a device's name; that of a simulated one says that it is in a word."""
    return f"simulated {device.removeprefix(SIMULATED)}" if is_simulated(device) else device


@dataclass(frozen=True, slots=True)
class Simulation:
    """How to simulate.

    Args:
        numerics: Whether what is asked for is computed as well, on this machine and in its own time.
        overrides: Parameters of the SoC by dotted name, in place of its file's.
        load: A game beside the model.
        lengths: Lengths of NPU graphs beside the standard ones.
        every_form: Whether the NPU offers forms of graphs that HeteroLLM does not have.
    """

    numerics: bool = False
    overrides: Mapping[str, float] = field(default_factory=dict)
    load: GpuLoad | None = None
    lengths: tuple[int, ...] = ()
    every_form: bool = True

    def __post_init__(self) -> None:
        if any(type(length) is not int or length < 1 for length in self.lengths):
            raise OptionError(f"NPU graphs cannot have the lengths {self.lengths}.", fix="Give at least 1.")
