"""Passes whose kernels take no longer than submitting them: the chain with the control thread in it.

In a pass of one token the GPU's small kernels end sooner than the control thread submits the next one, and
while it waits for the NPU it submits none. A cut whose own price is lower can then make the pass longer: the
queue runs empty behind it. So the chain is followed with both clocks, the control thread's and the queue's,
and what is taken is what makes a layer cheapest that follows upon another one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from heterollm.kernels.ops import Group, OpSpec
from heterollm.solver.costs import Costs, Overheads
from heterollm.solver.objective import Objective
from heterollm.solver.pricing import UNSURE_FRACTION, Priced

__all__ = ["Place", "Settled", "layer_us", "priced_in_chain", "settled", "submits_singly"]

MOST_LAYERS: Final = 16
"""Layers that are followed until one is like those to come; else the later half is averaged."""

EQUAL_US: Final = 1e-6

MOST_TRIED: Final = 12
"""Candidates of a group that are tried, cheapest first, besides those on one part."""

SWEEPS: Final = 4


@dataclass(frozen=True, slots=True)
class Place:
    """A group's place in the chain.

    Args:
        spec: The group or block.
        before_us: Time of the GPU's kernels before it.
        before: How many those are.
        items: Placements that may be taken, cheapest first.
        kernels: How many the GPU's part is: of a block, both groups and the activation between them.
    """

    spec: OpSpec
    before_us: float
    before: int
    items: Sequence[Priced]
    kernels: int

    @classmethod
    def of(cls, spec: OpSpec, before_us: float, items: Sequence[Priced], overheads: Overheads) -> Place:
        """Return the place of a group behind operators that take so long."""
        counts = overheads.kernels_before
        if spec.then is None:
            return cls(spec, before_us, counts.get(spec.group, 0), items, 1)
        return cls(spec, before_us, counts.get("gate_up", 0), items, 2 + counts.get("down", 0))


class _Clocks:
    """The control thread's clock and the end of the GPU's queue, in microseconds; refills are counted."""

    def __init__(self, overheads: Overheads) -> None:
        self.host_us = 0.0
        self.queue_us = 0.0
        self._overheads = overheads
        self.refills = 0
        self._slack_us = 0.0
        self._npu_free_us = -math.inf

    def submit(self, duration_us: float, kernels: int) -> None:
        """Enqueue some kernels that take so long together."""
        overheads = self._overheads
        # The time until a kernel of an empty queue runs counts from before its submission.
        refill_us = max(0.0, overheads.refill_us - overheads.submit_us)
        for _ in range(kernels):
            self.host_us += overheads.submit_us
            begin_us, busy_us = self.queue_us, self.queue_us - self.host_us
            if busy_us <= 0.0:
                begin_us = self.host_us + refill_us
                self._slack_us = 0.0
                self.refills += 1
            elif busy_us < self._slack_us:
                begin_us += refill_us * (1.0 - busy_us / self._slack_us)
            self.queue_us = begin_us + duration_us / kernels

    def compute(self, item: Priced, kernels: int) -> None:
        """Run a group whose input's kernels are enqueued."""
        overheads = self._overheads
        if not item.placement.npu_lengths:
            self.submit(item.gpu_us, kernels)
            return
        input_us = self.queue_us
        if item.is_cut and not overheads.empties_queue:
            self.submit(item.gpu_us, kernels)
        latency_us = overheads.hand_over_us + overheads.hidden_us
        self.host_us = max(self.host_us, input_us) + latency_us + overheads.map_us
        if item.is_cut and overheads.empties_queue:
            # Its price has the refill in it.
            self.queue_us = self.host_us + item.gpu_us
        # Its price counts on an NPU that has been free for as long as the whole start takes.
        hidden_us = min(overheads.hidden_us, self.host_us - self._npu_free_us)
        graph_us = item.npu_us + max(0.0, -overheads.hand_over_us) - hidden_us
        self._npu_free_us = self.host_us + graph_us
        self.host_us = self._npu_free_us + overheads.map_us
        # A queue that is predicted to be busy for less than this may be empty: the less, the likelier.
        self._slack_us = UNSURE_FRACTION * graph_us
        if overheads.return_us:
            self.host_us = max(self.host_us, self.queue_us) + overheads.return_us


def submits_singly(tokens: int, overheads: Overheads) -> bool:
    """Return whether submitting may take longer than computing in a pass of so many tokens."""
    return tokens == 1 and bool(overheads.kernels_before) and math.isfinite(overheads.submit_us)


def layer_us(places: Sequence[Place], chosen: Sequence[Priced], overheads: Overheads) -> float:
    """Return the time of a layer that follows upon others.

    Args:
        places: Its groups in order.
        chosen: The placement of each.
        overheads: What handing over and submitting cost.
    """
    clocks = _Clocks(overheads)
    half_us = end_us = ahead_us = 0.0
    for number in range(MOST_LAYERS):
        for place, item in zip(places, chosen, strict=True):
            clocks.submit(place.before_us, place.before)
            clocks.compute(item, place.kernels)
        if number == MOST_LAYERS // 2 - 1:
            half_us = clocks.host_us
        before_us, end_us = end_us, max(clocks.host_us, clocks.queue_us)
        was_ahead_us, ahead_us = ahead_us, clocks.queue_us - clocks.host_us
        # The layers to come are like this one if it began as it ends, or with a queue that only gets longer.
        if abs(ahead_us - was_ahead_us) < EQUAL_US or (ahead_us > was_ahead_us and not clocks.refills):
            return end_us - before_us
        clocks.refills = 0
    return (clocks.host_us - half_us) / (MOST_LAYERS - MOST_LAYERS // 2)


@dataclass(frozen=True, slots=True)
class Settled:
    """The placements of a layer's groups that make it cheapest.

    Args:
        places: Its groups in order.
        chosen: The placement of each.
        time_us: Time of the layer.
        cost: What the objective makes of it, without margins.
        overheads: What handing over and submitting cost.
        objective: What is small.
    """

    places: tuple[Place, ...]
    chosen: tuple[Priced, ...]
    time_us: float
    cost: float
    overheads: Overheads
    objective: Objective

    @classmethod
    def of(
        cls, places: Sequence[Place], chosen: Sequence[Priced], overheads: Overheads, goal: Objective
    ) -> Settled:
        """Return some placements with what they cost together."""
        time_us = layer_us(places, chosen, overheads)
        gpu_us, npu_us = sum(item.gpu_us for item in chosen), sum(item.npu_us for item in chosen)
        return cls(tuple(places), tuple(chosen), time_us, goal.cost(time_us, gpu_us, npu_us), overheads, goal)

    def instead(self, number: int, item: Priced) -> Settled:
        """Return the same with another placement of one group."""
        chosen = (*self.chosen[:number], item, *self.chosen[number + 1 :])
        return Settled.of(self.places, chosen, self.overheads, self.objective)

    def beside(self, number: int, item: Priced) -> Priced:
        """Return a placement of one group at the price that it has beside the others."""
        other, own = self.instead(number, item), self.chosen[number]
        time_us = own.time_us + other.time_us - self.time_us
        return replace(item, time_us=time_us, cost=own.cost + other.cost - self.cost)


def settled(places: Sequence[Place], overheads: Overheads, objective: Objective) -> Settled:
    """Return the placements of a layer's groups that make it cheapest.

    From each of a few beginnings one group after the other takes what is best beside the others, until none
    changes.

    Args:
        places: The groups of a layer, in order; each has a placement that may be taken.
        overheads: What handing over and submitting cost.
        objective: What is to be small; its margin counts for every cut.
    """
    offered = [_tried(place.items) for place in places]
    bars = [
        objective.margin_fraction * min((item.cost for item in items if not item.is_cut), default=0.0)
        for items in offered
    ]

    def rank(way: Settled) -> float:
        return way.cost + sum(bar for item, bar in zip(way.chosen, bars, strict=True) if item.is_cut)

    found: list[Settled] = []
    for first in (_cheapest, _on_gpu, _on_npu):
        best = Settled.of(places, [min(items, key=first) for items in offered], overheads, objective)
        for _ in range(SWEEPS):
            before = best
            for number, items in enumerate(offered):
                best = min((best, *(best.instead(number, item) for item in items)), key=rank)
            if best is before:
                break
        found.append(best)
    return min(found, key=rank)


def priced_in_chain(
    found: Mapping[Group, Sequence[Priced]],
    specs: Sequence[OpSpec],
    block: OpSpec | None,
    costs: Costs,
    objective: Objective,
) -> dict[Group, list[Priced]]:
    """Return candidates of a layer's groups in a pass of one token, each at its price beside the best others.

    Args:
        found: The candidates by group; each has some that keep the cap on the GPU's share, or all do not.
        specs: The groups of one layer, in order.
        block: The block that two of them may be placed as.
        costs: Times of the parts.
        objective: What is to be small.
    """
    before_us = {spec.group: costs.between_us(spec, 1) for spec in specs}

    def solved(way: Sequence[OpSpec]) -> tuple[Settled, dict[Group, list[Priced]]]:
        places = [
            Place.of(spec, before_us[spec.group], _allowed(found[spec.group], objective), costs.overheads)
            for spec in way
        ]
        best = settled(places, costs.overheads, objective)
        return best, {
            spec.group: [best.beside(number, item) for item in found[spec.group]]
            for number, spec in enumerate(way)
        }

    as_groups, priced = solved(specs)
    if block is None or not found[block.group]:
        return priced
    number = next(number for number, spec in enumerate(specs) if spec.group == "gate_up")
    before_us[block.group] = before_us["gate_up"]
    as_block, priced_there = solved([*specs[:number], block, *specs[number + 2 :]])
    # Both paths are compared by the cost of the whole layer.
    activation = objective.cost(before_us["down"], before_us["down"], 0.0)
    pair, own = as_groups.chosen[number : number + 2], as_block.chosen[number]
    time_us = sum(item.time_us for item in pair) + before_us["down"] + as_block.time_us - as_groups.time_us
    cost = sum(item.cost for item in pair) + activation + as_block.cost - as_groups.cost
    blocks = [
        replace(item, time_us=item.time_us - own.time_us + time_us, cost=item.cost - own.cost + cost)
        for item in priced_there[block.group]
    ]
    others = priced_there if as_block.cost < as_groups.cost else {}
    return {**priced, **others, block.group: blocks}


def _allowed(items: Sequence[Priced], objective: Objective) -> list[Priced]:
    """Return those that keep the cap on the GPU's share, cheapest first; all where none does."""
    ordered = sorted(items, key=_cheapest)
    return [item for item in ordered if objective.allows(item.gpu_us, item.time_us)] or ordered


def _tried(items: Sequence[Priced]) -> list[Priced]:
    whole = [item for item in items[MOST_TRIED:] if not item.is_cut]
    return [*items[:MOST_TRIED], *whole[:MOST_TRIED]]


def _cheapest(item: Priced) -> float:
    return item.cost


def _on_gpu(item: Priced) -> tuple[bool, float]:
    return bool(item.placement.npu_lengths), item.cost


def _on_npu(item: Priced) -> tuple[bool, float]:
    return not item.placement.npu_lengths or item.is_cut, item.cost
