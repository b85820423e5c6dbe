"""What a placement costs: the time of each part, how they slow each other, and what handing over adds.

For one group (HeteroLLM, section 4.3):
``max(T_gpu(its part), T_npu(its part)) + T_sync``, against either part computing all of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from heterollm.kernels.ops import OpSpec

__all__ = ["Costs", "Overheads", "Slowdown", "State", "joint_time_us"]

State: TypeAlias = Literal["fed", "drained"]
"""How a group leaves the GPU's queue: ``fed`` with work that the host did not wait for, or ``drained``."""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """Factors by which each part is slower while the other one runs."""

    gpu: float = 1.0
    npu: float = 1.0

    def __post_init__(self) -> None:
        if not (1.0 <= self.gpu < math.inf and 1.0 <= self.npu < math.inf):
            raise ValueError(f"slowdown factors {self.gpu} and {self.npu} must be at least 1")


@dataclass(frozen=True, slots=True)
class Overheads:
    """What handing over costs on a device, in microseconds.

    Args:
        hand_over_us: From the end of a kernel to the start of an NPU graph that reads its output.
        refill_us: More than in a busy queue until a kernel runs that is submitted to an empty one.
        map_us: To make a buffer visible to the other part, where memory is not coherent; paid twice.
    """

    hand_over_us: float = 0.0
    refill_us: float = 0.0
    map_us: float = 0.0


class Costs(Protocol):
    """Times of a model's groups on a device. Every time is of work in a busy queue, without hand-overs."""

    @property
    def overheads(self) -> Overheads:
        """What handing over costs."""
        ...

    def gpu_us(self, spec: OpSpec, member_rows: tuple[int, ...], tokens: int) -> float:
        """Return the GPU's time for some rows of each member; infinite where it cannot."""
        ...

    def npu_us(self, spec: OpSpec, member_rows: tuple[int, ...], length: int, form: str) -> float:
        """Return the time of one NPU graph; infinite where it cannot."""
        ...

    def slowdown(self, spec: OpSpec, tokens: int) -> Slowdown:
        """Return how much the parts slow each other in a cut of this group."""
        ...

    def between_us(self, spec: OpSpec, tokens: int) -> float:
        """Return the time of the GPU operators between the group before and this one."""
        ...


def joint_time_us(gpu_us: float, npu_us: float, slowdown: Slowdown) -> tuple[float, float]:
    """Return when each part ends if both begin together; each is slowed only while the other runs.

    Args:
        gpu_us: Time of the GPU's part alone.
        npu_us: Time of the NPU's part alone.
        slowdown: Factors while both run.
    """
    gpu_end, npu_end = gpu_us * slowdown.gpu, npu_us * slowdown.npu
    if gpu_end <= npu_end:
        # What the NPU has done by then, in its own time alone.
        return gpu_end, gpu_end + npu_us - gpu_end / slowdown.npu
    return npu_end + gpu_us - npu_end / slowdown.gpu, npu_end
