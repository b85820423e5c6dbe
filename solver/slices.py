"""The choice of resident slices: rows of a group in the NPU's memory, each for all lengths.

The search considers sets of up to three slices of a group and combines the sets of all groups exactly under
the budget. Each further slice of a group must make its passes cheaper by :data:`GAIN_FRACTION`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np

from heterollm.base import OptionError, PlanError
from heterollm.kernels.ops import COUNTED_ONCE, GraphMemory, OpSpec
from heterollm.solver.candidates import Rows
from heterollm.solver.objective import Objective
from heterollm.solver.options import Option
from heterollm.solver.slice_sets import SliceCost, SliceSets, frontier, weighted_sum

MAX_SLICES: Final = 3
MOST_TRIED: Final = 12
"""Slices up to which all sets of three are tried; of more slices, only the best of each length."""

Slices: TypeAlias = Mapping[str, Mapping[Rows, tuple[int, ...]]]
"""Resident rows by place, each with the lengths of its graphs."""

GAIN_FRACTION: Final = 0.01
"""Fraction by which a further slice must make all passes of its group cheaper."""

OVER_CAP: Final = 1e3
"""Factor on the cost of options over the cap on the GPU's share: they win only without an alternative."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limit of resident slices.

    Args:
        npu_bytes: Bytes of all graphs of all slices; None is no limit.
        memory: How their memory counts.
    """

    npu_bytes: int | None = None
    memory: GraphMemory = COUNTED_ONCE

    def __post_init__(self) -> None:
        if self.npu_bytes is not None and self.npu_bytes < 0:
            raise OptionError(f"The NPU's budget is {self.npu_bytes} bytes.", fix="Give 0 or more.")

    def holds(self, size_bytes: int) -> bool:
        """Return whether ``size_bytes`` fit."""
        return self.npu_bytes is None or size_bytes <= self.npu_bytes


@dataclass(frozen=True, slots=True)
class ResidentSlices:
    """A set of resident slices of one or several groups.

    Args:
        rows: Rows of the slices by place.
        size_bytes: Size of all slices, with one copy of the weights.
        cost: Cost of all passes with these slices.
    """

    rows: Mapping[str, tuple[Rows, ...]]
    size_bytes: int
    cost: float


class SliceChoices(Protocol):
    """Choices of resident slices of one or several groups."""

    def resident_options(self, budget: Budget) -> list[ResidentSlices]:
        """Return the Pareto frontier of sets by size and cost, smallest first, the empty set included."""
        ...


@dataclass(frozen=True, slots=True)
class GroupCosts:
    """Costs of a group with each slice.

    Args:
        spec: The group or ffn.
        layers: Number of layers that have it.
        costs: Costs by length and rows; empty rows are the GPU alone.
        weights: Weights of lengths.
        margin_fraction: Fraction by which a split must be cheaper than one processor alone.
    """

    spec: OpSpec
    layers: int
    costs: Mapping[int, Mapping[Rows, SliceCost]]
    weights: Mapping[int, float]
    margin_fraction: float = 0.0

    def sets(self) -> Iterator[tuple[Rows, ...]]:
        """Yield the sets of slices to consider, the empty set first."""
        every = sorted(set().union(*self.costs.values()) - {()})
        for count in range(MAX_SLICES):
            yield from itertools.combinations(every, count)
        best = every
        if len(every) > MOST_TRIED:
            best = sorted({rows for table in self.costs.values() for rows in [self._best(table)] if rows})
        yield from itertools.combinations(best[:MOST_TRIED], MAX_SLICES)

    def _best(self, table: Mapping[Rows, SliceCost]) -> Rows:
        """Return the rows that a length uses if all slices are resident."""
        whole = min(table, key=lambda rows: (table[rows].whole, rows))
        split = min(table, key=lambda rows: (table[rows].split, rows))
        takes_split = table[split].split <= table[whole].whole * (1.0 - self.margin_fraction)
        return split if takes_split and math.isfinite(table[split].split) else whole

    def slice_sets(self) -> SliceSets:
        """Return the sets to consider with their costs."""
        return SliceSets.of(
            self.costs, list(self.sets()), lambda rows: self.layers * self.spec.slice_bytes(rows)
        )

    def resident_options(self, budget: Budget) -> list[ResidentSlices]:  # noqa: ARG002 - all sets are small
        """See :class:`SliceChoices`."""
        sets = self.slice_sets()
        _, best = sets.best(self.margin_fraction)
        weights = np.array([self.weights.get(length, 0.0) for length in sets.lengths])
        # Ignore lengths with zero weight that the GPU can run.
        needed = (weights > 0.0) | ~sets.on_gpu
        # A slice that no pass runs only makes a set larger: a smaller set has the same cost.
        sizes = sets.sizes.sum(axis=-1)
        factors = 1.0 + GAIN_FRACTION * np.maximum(0, sets.counts - 1)
        costs = self.layers * weighted_sum(best[:, needed], weights[needed]) * factors
        return [
            ResidentSlices({self.spec.place: sets.sets[place]}, int(sizes[place]), float(costs[place]))
            for place in frontier(sizes.tolist(), costs.tolist())
            if math.isfinite(costs[place])
        ]


def slice_costs(options: Iterable[Option], objective: Objective) -> dict[Rows, SliceCost]:
    """Return the least costs with each slice.

    Args:
        options: All options of a group at a length.
        objective: The objective; its margin is left out here, since it depends on all resident slices.
    """
    best: dict[tuple[Rows, bool], float] = {}
    for item in options:
        cost = item.cost * (1.0 if objective.allows(item.gpu_us, item.time_us) else OVER_CAP)
        key = item.placement.npu_rows, item.is_split
        if cost < best.get(key, math.inf):
            best[key] = cost
    return {
        rows: SliceCost(best.get((rows, False), math.inf), best.get((rows, True), math.inf))
        for rows in dict.fromkeys(rows for rows, _ in best)
    }


def pass_weights(prompts: Mapping[int, float], chunk_length: int) -> dict[int, float]:
    """Return the weights of passes by length.

    Args:
        prompts: Weights of prompts by length, and of decode under length 1.
        chunk_length: Longest pass; longer prompts run in chunks.

    Raises:
        OptionError: A length or a weight is out of range.
    """
    weights: dict[int, float] = {}
    for tokens, weight in prompts.items():
        if tokens < 1 or not 0.0 <= weight < math.inf:
            raise OptionError(
                f"Prompts of {tokens} tokens have weight {weight}.",
                fix="Lengths are at least 1 and weights at least 0.",
            )
        count, left = divmod(tokens, chunk_length)
        for length, times in ((chunk_length, count), (left, 1)):
            if length and times:
                weights[length] = weights.get(length, 0.0) + times * weight
    return weights


def choose_slices(groups: Sequence[SliceChoices], budget: Budget) -> Mapping[str, tuple[Rows, ...]]:
    """Return the rows of the cheapest resident slices of all groups, whose weights are within the budget.

    Raises:
        PlanError: The budget is too small for a group that only the NPU may compute.
    """
    best: list[ResidentSlices] = [ResidentSlices({}, 0, 0.0)]
    for group in groups:
        resident_options = group.resident_options(budget)
        combined = [
            ResidentSlices({**held.rows, **own.rows}, held.size_bytes + own.size_bytes, held.cost + own.cost)
            for held in best
            for own in resident_options
            if budget.holds(held.size_bytes + own.size_bytes)
        ]
        # A larger set must be cheaper.
        kept = frontier((held.size_bytes for held in combined), (held.cost for held in combined))
        best = [combined[place] for place in kept]
    if not best:
        raise PlanError(
            f"The NPU's budget of {budget.npu_bytes} bytes does not hold what only the NPU may compute.",
            fix="Raise the budget, or allow both processors.",
        )
    return best[-1].rows
