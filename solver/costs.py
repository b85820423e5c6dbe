"""What a placement costs: the time of each part, how they slow each other, and what handing over adds.

For one group (HeteroLLM, section 4.3):
``max(T_gpu(its part), T_npu(its part)) + T_sync``, against either part computing all of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from heterollm.kernels.ops import Group, OpSpec

__all__ = ["Costs", "Overheads", "RememberedCosts", "Slowdown", "joint_time_us"]


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
        hand_over_us: From the end of a kernel to the start of an NPU graph that reads its output; below 0
            where more of the graph's start is hidden by the wait for the kernel than the hand-over takes.
        refill_us: More than in a busy queue until a kernel runs that is submitted to an empty one.
        map_us: To make a buffer visible to the other part, where memory is not coherent; paid twice.
        return_us: A copy of the NPU's output back through the queue, behind the GPU's own part; 0 where the
            parts share memory.
        empties_queue: Whether the wait is for all that is enqueued, so that the GPU's part begins when the
            NPU's does, in an empty queue; otherwise it follows the operator before.
        submit_us: Time of submitting a kernel to a busy queue; infinite where it is not known: then a refill
            counts however long the queue is still busy.
        hidden_us: What a wait hides of a graph's start, which ``hand_over_us`` counts as less; it does so
            where the NPU has been free for as long.
        kernels_before: By group, the GPU's kernels between the group before and it in a pass of one token;
            empty where they are not submitted one by one, so that submitting costs no more than computing.
    """

    hand_over_us: float = 0.0
    refill_us: float = 0.0
    map_us: float = 0.0
    return_us: float = 0.0
    empties_queue: bool = False
    submit_us: float = math.inf
    hidden_us: float = 0.0
    kernels_before: Mapping[Group, int] = field(default_factory=dict)


class Costs(Protocol):
    """Times of a model's groups on a device. Every time is of work in a busy queue, without hand-overs.

    A block is asked of the NPU only: the GPU's part of one is a few linears and an activation, which may have
    fewer columns than the model's own.
    """

    @property
    def overheads(self) -> Overheads:
        """What handing over costs."""
        ...

    def gpu_us(self, spec: OpSpec, member_rows: tuple[int, ...], tokens: int) -> float:
        """Return the GPU's time for some rows of each member; infinite where it cannot."""
        ...

    def npu_us(self, spec: OpSpec, member_rows: tuple[int, ...], length: int, form: str) -> float:
        """Return the time of one NPU graph, of a linear group or of a block; infinite where it cannot."""
        ...

    def slowdown(self, spec: OpSpec, tokens: int) -> Slowdown:
        """Return how much the parts slow each other in a cut of this group."""
        ...

    def between_us(self, spec: OpSpec, tokens: int) -> float:
        """Return the time of the GPU operators between the group before and this one.

        Before ``down`` that is the activation, as wide as the columns of ``spec``.
        """
        ...


class RememberedCosts:
    """Costs that ask others once for each slice, by the group's name: for the specs of one model.

    Args:
        costs: The others.
    """

    def __init__(self, costs: Costs) -> None:
        self.overheads = costs.overheads
        self._costs = costs
        self._gpu_us: dict[tuple[str, int, tuple[int, ...], int], float] = {}
        self._npu_us: dict[tuple[str, tuple[int, ...], int, str], float] = {}
        self._slowdowns: dict[tuple[str, int], Slowdown] = {}
        self._between_us: dict[tuple[str, int, int], float] = {}

    def gpu_us(self, spec: OpSpec, member_rows: tuple[int, ...], tokens: int) -> float:
        """See :class:`Costs`."""
        key = spec.group, spec.columns, member_rows, tokens
        found = self._gpu_us.get(key)
        if found is None:
            found = self._gpu_us[key] = self._costs.gpu_us(spec, member_rows, tokens)
        return found

    def npu_us(self, spec: OpSpec, member_rows: tuple[int, ...], length: int, form: str) -> float:
        """See :class:`Costs`."""
        key = spec.group, member_rows, length, form
        found = self._npu_us.get(key)
        if found is None:
            found = self._npu_us[key] = self._costs.npu_us(spec, member_rows, length, form)
        return found

    def slowdown(self, spec: OpSpec, tokens: int) -> Slowdown:
        """See :class:`Costs`."""
        key = spec.group, tokens
        found = self._slowdowns.get(key)
        if found is None:
            found = self._slowdowns[key] = self._costs.slowdown(spec, tokens)
        return found

    def between_us(self, spec: OpSpec, tokens: int) -> float:
        """See :class:`Costs`."""
        key = spec.group, spec.columns, tokens
        found = self._between_us.get(key)
        if found is None:
            found = self._between_us[key] = self._costs.between_us(spec, tokens)
        return found


def joint_time_us(
    gpu_us: float, npu_us: float, slowdown: Slowdown, npu_begin_us: float = 0.0
) -> tuple[float, float]:
    """Return when each part ends; each is slowed only while the other runs.

    Args:
        gpu_us: Time of the GPU's part alone, which begins at 0.
        npu_us: Time of the NPU's part alone.
        slowdown: Factors while both run.
        npu_begin_us: When the NPU's part begins.
    """
    if gpu_us <= npu_begin_us:
        return gpu_us, npu_begin_us + npu_us
    left_us = gpu_us - npu_begin_us
    gpu_end, npu_end = left_us * slowdown.gpu, npu_us * slowdown.npu
    if gpu_end <= npu_end:
        # What the NPU has done by then, in its own time alone.
        npu_end = gpu_end + npu_us - gpu_end / slowdown.npu
    else:
        gpu_end = npu_end + left_us - npu_end / slowdown.gpu
    return npu_begin_us + gpu_end, npu_begin_us + npu_end
