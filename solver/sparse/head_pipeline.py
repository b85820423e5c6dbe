"""The pipeline of sparse attention over heads: which key heads share a launch of the NPU, and in which order.

The NPU estimates the scores of a unit while the GPU selects keys for units before it and attends to them
(shadowAttn, section 3.4). Here selection and attention share one queue of the GPU. So the pipeline is a flow
shop of two machines, of which Johnson's rule finds a shortest order. In the paper's greedy search selection
has a lane of its own.

S. M. Johnson: Optimal two- and three-stage production schedules with setup times included. Naval Research
Logistics Quarterly 1 (1), 1954.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from heterollm.solver.costs import Slowdown
from heterollm.solver.sparse.attention import FUSED_HEADS

Order: TypeAlias = Sequence["PipelineUnit"]

UNDISTURBED: Final = Slowdown()


@dataclass(frozen=True, slots=True)
class PipelineUnit:
    """Key heads whose scores the NPU estimates in one launch.

    Args:
        heads: The key heads.
        exponent: The exponent that they share.
        npu_us: Time of the launch, the wait for it included.
        select_us: Time to select the keys of each head.
        attend_us: Time to attend to them.
    """

    heads: tuple[int, ...]
    exponent: int
    npu_us: float
    select_us: tuple[float, ...]
    attend_us: tuple[float, ...]

    @property
    def gpu_us(self) -> float:
        """Time of the GPU."""
        return sum(self.select_us) + sum(self.attend_us)


@dataclass(frozen=True, slots=True)
class HeadPipeline:
    """Units in the order in which the NPU runs them.

    Args:
        units: The units.
        time_us: Time from the first launch to the end of the last attention.
    """

    units: tuple[PipelineUnit, ...]
    time_us: float


def plan_pipeline(
    exponents: Sequence[int],
    npu_us: Callable[[int], float],
    select_us: Sequence[float],
    attend_us: Sequence[float],
    *,
    most_fused: Iterable[int] = FUSED_HEADS,
    ordered: bool = True,
    slowdown: Slowdown = UNDISTURBED,
) -> HeadPipeline:
    """Return the fastest pipeline of a layer.

    Fused heads save launches, but their first attention begins later. So each limit on fused heads is tried.

    Args:
        exponents: The exponent of each key head.
        npu_us: Returns the time of a launch of so many heads.
        select_us: Time to select the keys of each key head.
        attend_us: Time to attend to them.
        most_fused: Limits to try.
        ordered: Whether units are put into the best order; else they stay in that of their first heads.
        slowdown: Of both processors while both work.
    """

    def pipeline(fused: tuple[tuple[int, ...], ...]) -> HeadPipeline:
        units = [
            PipelineUnit(
                heads,
                exponents[heads[0]],
                npu_us(len(heads)),
                tuple(select_us[head] for head in heads),
                tuple(attend_us[head] for head in heads),
            )
            for heads in fused
        ]
        chosen = johnson_order(units) if ordered else units
        return HeadPipeline(tuple(chosen), two_lanes_us(chosen, slowdown))

    # Limits beyond the heads with one exponent fuse alike.
    ways = dict.fromkeys(fused_heads(tuple(exponents), limit) for limit in most_fused)
    return min(map(pipeline, ways), key=lambda found: found.time_us)


@functools.lru_cache
def fused_heads(exponents: tuple[int, ...], most: int = FUSED_HEADS[0]) -> tuple[tuple[int, ...], ...]:
    """Return the key heads of each unit: heads of equal exponent, as many together as may be.

    Args:
        exponents: The exponent of each key head.
        most: Most heads of a unit.
    """
    alike: dict[int, list[int]] = {}
    for head, exponent in enumerate(exponents):
        alike.setdefault(exponent, []).append(head)
    return tuple(sorted(unit for heads in alike.values() for unit in _parts(heads, most)))


def _parts(heads: list[int], most: int) -> Iterator[tuple[int, ...]]:
    first = 0
    for size in FUSED_HEADS:
        while size <= most and len(heads) - first >= size:
            yield tuple(heads[first : first + size])
            first += size


def johnson_order(units: Order) -> list[PipelineUnit]:
    """Return the order of units with the shortest time in two lanes, by Johnson's rule.

    The order is exact for processors that do not slow each other down.
    """
    fills = sorted((unit for unit in units if unit.npu_us <= unit.gpu_us), key=lambda unit: unit.npu_us)
    drains = sorted((unit for unit in units if unit.npu_us > unit.gpu_us), key=lambda unit: -unit.gpu_us)
    return fills + drains


def two_lanes_us(order: Order, slowdown: Slowdown = UNDISTURBED) -> float:
    """Return the time of units in an order, where selection and attention share the GPU."""
    return lanes_us(((unit.npu_us, unit.gpu_us) for unit in order), slowdown)


def lanes_us(times: Iterable[tuple[float, float]], slowdown: Slowdown = UNDISTURBED) -> float:
    """Return when the GPU ends.

    Args:
        times: Times of NPU and GPU of each unit in order, if the other one rests.
        slowdown: Of both processors while both work.
    """
    now_us = queued_us = 0.0
    for npu_us, gpu_us in times:
        both_us = min(npu_us * slowdown.npu, queued_us * slowdown.gpu)
        now_us += both_us + npu_us - both_us / slowdown.npu
        queued_us += gpu_us - both_us / slowdown.gpu
    return now_us + queued_us
