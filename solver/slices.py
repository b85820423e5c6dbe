"""The choice of resident slices: rows of a group in the NPU's memory, each for many lengths.

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
from heterollm.kernels.ops import Group, OpSpec
from heterollm.solver.candidates import Rows
from heterollm.solver.objective import Objective
from heterollm.solver.options import Option
from heterollm.solver.slice_sets import SliceCost, SliceSets, frontier, resident_bytes, weighted_sum

__all__ = [
    "Budget",
    "GroupCosts",
    "ResidentSlices",
    "Rows",
    "SliceChoices",
    "SliceCost",
    "Slices",
    "choose_slices",
    "pass_weights",
    "run_lengths",
    "slice_costs",
    "slice_lengths",
]

MAX_SLICES: Final = 3
MOST_TRIED: Final = 12
"""Slices up to which all sets of three are tried; of more slices, only the best of each length."""

Slices: TypeAlias = Mapping[Group, Mapping[Rows, tuple[int, ...]]]
"""Resident rows by group, each with the lengths of its graphs."""

GAIN_FRACTION: Final = 0.01
"""Fraction by which a further slice must make all passes of its group cheaper."""

OVER_CAP: Final = 1e3
"""Factor on the cost of options over the cap on the GPU's share: they win only without an alternative."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Limit of resident slices.

    Args:
        npu_bytes: Bytes of weights in all slices; None is no limit.
        copies_by_length: Whether each length of a slice needs its own copy of the weights.
    """

    npu_bytes: int | None = None
    copies_by_length: bool = False

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
        slices: Rows and lengths by group.
        size_bytes: Size of all slices.
        cost: Cost of all passes with these slices.
    """

    slices: Slices
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

    def slice_sets(self, standard_lengths: Sequence[int]) -> SliceSets:
        """Return the sets to consider with their costs, for all lengths of NPU graphs of any slice."""
        return SliceSets.of(
            self.costs,
            list(self.sets()),
            lambda rows: self.layers * self.spec.slice_bytes(rows),
            standard_lengths,
        )

    def resident_options(self, budget: Budget) -> list[ResidentSlices]:
        """See :class:`SliceChoices`."""
        standard_lengths = run_lengths(self)
        sets = self.slice_sets(standard_lengths)
        _, best, runs = sets.best(self.margin_fraction)
        weights = np.array([self.weights.get(length, 0.0) for length in sets.lengths])
        # Ignore lengths with zero weight that the GPU can run.
        needed = (weights > 0.0) | ~sets.on_gpu
        used = np.bitwise_or.reduce(runs[:, :, needed], axis=-1)
        sizes = resident_bytes(sets.sizes, used, budget.copies_by_length)
        factors = 1.0 + GAIN_FRACTION * np.maximum(0, sets.counts - 1)
        costs = self.layers * weighted_sum(best[:, needed], weights[needed]) * factors
        return [
            ResidentSlices(
                {self.spec.group: slice_lengths(sets.sets[place], used[place], standard_lengths)},
                int(sizes[place]),
                float(costs[place]),
            )
            for place in frontier(sizes.tolist(), costs.tolist())
            if math.isfinite(costs[place])
        ]


def run_lengths(*groups: GroupCosts) -> tuple[int, ...]:
    """Return all lengths that the NPU runs for any slice of some groups, ascending."""
    found = {
        length
        for group in groups
        for table in group.costs.values()
        for item in table.values()
        for length in (*item.whole_lengths, *item.split_lengths)
    }
    return tuple(sorted(found))


def slice_lengths(
    held: Sequence[Rows], used: Sequence[int], standard_lengths: Sequence[int]
) -> dict[Rows, tuple[int, ...]]:
    """Return slices with their lengths, decoded from one bit for each standard length."""
    return {
        rows: tuple(length for place, length in enumerate(standard_lengths) if bits >> place & 1)
        for rows, bits in zip(held, map(int, used), strict=False)
    }


def slice_costs(options: Iterable[Option], objective: Objective) -> dict[Rows, SliceCost]:
    """Return the least costs with each slice.

    Args:
        options: All options of a group at a length.
        objective: The objective; its margin is left out here, since it depends on all resident slices.
    """
    best: dict[tuple[Rows, bool], tuple[float, tuple[int, ...]]] = {}
    for item in options:
        cost = item.cost * (1.0 if objective.allows(item.gpu_us, item.time_us) else OVER_CAP)
        key = item.placement.npu_rows, item.is_split
        if key not in best or cost < best[key][0]:
            best[key] = cost, item.placement.npu_lengths
    found = {}
    for rows in dict.fromkeys(rows for rows, _ in best):
        whole, whole_lengths = best.get((rows, False), (math.inf, ()))
        split, split_lengths = best.get((rows, True), (math.inf, ()))
        found[rows] = SliceCost(whole, split, whole_lengths, split_lengths)
    return found


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


def choose_slices(groups: Sequence[SliceChoices], budget: Budget) -> Slices:
    """Return the cheapest resident slices of all groups within the budget.

    Raises:
        PlanError: The budget is too small for a group that only the NPU may compute.
    """
    best: list[ResidentSlices] = [ResidentSlices({}, 0, 0.0)]
    for group in groups:
        resident_options = group.resident_options(budget)
        combined = [
            ResidentSlices(
                {**held.slices, **own.slices}, held.size_bytes + own.size_bytes, held.cost + own.cost
            )
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
    return best[-1].slices
