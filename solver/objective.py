"""The objective: the cost that the solver minimises, and its constraints."""

from __future__ import annotations

import math
from dataclasses import dataclass

from heterollm.base import OptionError
from heterollm.kernels.ops import OpSpec
from heterollm.solver.costs import Errors
from heterollm.solver.placements import Placement
from heterollm.solver.request import check_forbidden


@dataclass(frozen=True, slots=True)
class Power:
    """Power of a device in watts.

    Args:
        base_watts: Power while a pass runs.
        gpu_watts: Additional power while the GPU computes.
        npu_watts: Additional power while the NPU computes.
    """

    base_watts: float
    gpu_watts: float
    npu_watts: float

    @property
    def is_sound(self) -> bool:
        """Whether all numbers are finite and at least 0, and one is above 0."""
        watts = (self.base_watts, self.gpu_watts, self.npu_watts)
        return all(0.0 <= value < math.inf for value in watts) and any(watts)

    def energy_uj(self, time_us: float, gpu_us: float, npu_us: float) -> float:
        """Return the energy in microjoules of work, from its time and the times of both processors."""
        return self.base_watts * time_us + self.gpu_watts * gpu_us + self.npu_watts * npu_us


@dataclass(frozen=True, slots=True)
class Objective:
    """The cost that the solver minimises, and its constraints.

    Args:
        energy_weight: 0 minimises time alone, 1 energy alone.
        power: Power of the device; required where ``energy_weight`` is not 0.
        gpu_share: Largest fraction of an operator's time that the GPU may compute, so that a screen stays
            smooth; refills count as time of the operator.
        margin_fraction: Fraction by which a split must be cheaper than the best option on one processor.
        forbidden: Processors that must not compute linear layers, and kinds of splits to avoid.
        errors: Errors of the predicted times: a split must gain more than they can explain. None where times
            are exact.

    Raises:
        OptionError: A number is out of range, a name is unknown, or energy counts and power is not known.
    """

    energy_weight: float = 0.0
    power: Power | None = None
    gpu_share: float = 1.0
    margin_fraction: float = 0.03
    forbidden: tuple[str, ...] = ()
    errors: Errors | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.energy_weight <= 1.0 or not 0.0 < self.gpu_share <= 1.0:
            raise OptionError(
                f"The energy weight is {self.energy_weight} and the GPU's share {self.gpu_share}.",
                fix="Both lie between 0 and 1.",
            )
        if not 0.0 <= self.margin_fraction < 1.0:
            raise OptionError(f"The margin of a split is {self.margin_fraction}.", fix="Give 0 to 1.")
        if self.energy_weight and self.power is None:
            raise OptionError(
                "Energy counts, but the power of this device was not measured.",
                fix="Use energy weight 0, or a device whose profile has power.",
            )
        if self.energy_weight and self.power is not None and not self.power.is_sound:
            raise OptionError(
                f"Energy counts, but the power of this device is {self.power}.",
                fix="Use energy weight 0, or measure power again.",
            )
        check_forbidden(self.forbidden)

    def cost(self, time_us: float, gpu_us: float, npu_us: float) -> float:
        """Return the cost in microseconds; energy is converted at the power of all processors together."""
        if not self.energy_weight or self.power is None:
            return time_us
        watts = self.power.base_watts + self.power.gpu_watts + self.power.npu_watts
        energy_us = self.power.energy_uj(time_us, gpu_us, npu_us) / watts
        return (1.0 - self.energy_weight) * time_us + self.energy_weight * energy_us

    def allows(self, gpu_us: float, time_us: float) -> bool:
        """Return whether ``gpu_us`` of ``time_us`` keeps the cap on the GPU's share."""
        return self.gpu_share >= 1.0 or gpu_us <= self.gpu_share * time_us

    def allows_processors(self, placement: Placement, spec: OpSpec, tokens: int) -> bool:
        """Return whether a placement uses nothing that is forbidden."""
        if not self.forbidden:
            return True
        kind = placement.kind(spec, tokens)
        if kind in self.forbidden:
            return False
        # A split needs both processors.
        return kind in ("gpu", "npu") or not {"gpu", "npu"} & set(self.forbidden)
