"""Which slices the NPU holds: rows of a group in its memory, each serving many lengths.

Sets of up to three slices of a group are considered, and the sets of all groups are combined exactly under
the budget. A further slice of a group is held only where it pays.
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
from heterollm.solver.pricing import Priced
from heterollm.solver.slice_sets import SliceCost, SliceSets, frontier, held_bytes, weighed

__all__ = [
    "Budget",
    "GroupCosts",
    "Holding",
    "Holdings",
    "Rows",
    "SliceCost",
    "Slices",
    "choose_slices",
    "named",
    "pass_weights",
    "run_lengths",
    "slice_costs",
]

MAX_SLICES: Final = 3
MOST_TRIED: Final = 12
"""Slices of which sets of three are tried; of more, pairs, and sets of three among each length's best."""

Slices: TypeAlias = Mapping[Group, Mapping[Rows, tuple[int, ...]]]
"""By group, the rows that the NPU holds, each with the lengths at which it may run."""

GAIN_FRACTION: Final = 0.01
"""A further slice of a group must make all its passes together this much cheaper."""

OVER_CAP: Final = 1e3
"""How much more a placement counts that exceeds the cap on the GPU's share: only where nothing else fits."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What the NPU may hold.

    Args:
        npu_bytes: Bytes of weights in all its slices; None is no limit.
        copies_by_length: Whether every length of a slice holds weights of its own.
    """

    npu_bytes: int | None = None
    copies_by_length: bool = False

    def __post_init__(self) -> None:
        if self.npu_bytes is not None and self.npu_bytes < 0:
            raise OptionError(f"The NPU's budget is {self.npu_bytes} bytes.", fix="Give 0 or more.")

    def holds(self, size_bytes: int) -> bool:
        """Whether so many bytes fit."""
        return self.npu_bytes is None or size_bytes <= self.npu_bytes


@dataclass(frozen=True, slots=True)
class Holding:
    """A set of slices, of one group or several, that may be worth holding.

    Args:
        slices: By group, the rows with the lengths at which they run.
        size_bytes: Of all of them.
        cost: What all passes then cost.
    """

    slices: Slices
    size_bytes: int
    cost: float


class Holdings(Protocol):
    """What the NPU may hold of one or several groups."""

    def holdings(self, budget: Budget) -> list[Holding]:
        """Return the sets of slices that may be worth holding, smallest first, none included."""
        ...


@dataclass(frozen=True, slots=True)
class GroupCosts:
    """What the slices of a group make possible.

    Args:
        spec: The group, or a block.
        layers: How many layers have it.
        costs: By length and rows; the empty rows are the GPU's.
        weights: By length, how often it is computed.
        margin_fraction: A cut is taken if it costs this much less than the best whole placement.
    """

    spec: OpSpec
    layers: int
    costs: Mapping[int, Mapping[Rows, SliceCost]]
    weights: Mapping[int, float]
    margin_fraction: float = 0.0

    def sets(self) -> Iterator[tuple[Rows, ...]]:
        """Yield the sets of slices that are considered, the empty one first."""
        every = sorted(set().union(*self.costs.values()) - {()})
        for count in range(MAX_SLICES):
            yield from itertools.combinations(every, count)
        best = every
        if len(every) > MOST_TRIED:
            best = sorted({rows for table in self.costs.values() for rows in [self._best(table)] if rows})
        yield from itertools.combinations(best[:MOST_TRIED], MAX_SLICES)

    def _best(self, table: Mapping[Rows, SliceCost]) -> Rows:
        """Return the rows that are used at a length where all slices are held."""
        whole = min(table, key=lambda rows: (table[rows].whole, rows))
        cut = min(table, key=lambda rows: (table[rows].cut, rows))
        takes_cut = table[cut].cut <= table[whole].whole * (1.0 - self.margin_fraction)
        return cut if takes_cut and math.isfinite(table[cut].cut) else whole

    def slice_sets(self, standard_lengths: Sequence[int]) -> SliceSets:
        """Return the sets that are considered with what each makes possible.

        Args:
            standard_lengths: Every length that the NPU runs for any slice.
        """
        return SliceSets.of(
            self.costs,
            list(self.sets()),
            lambda rows: self.layers * self.spec.slice_bytes(rows),
            standard_lengths,
        )

    def holdings(self, budget: Budget) -> list[Holding]:
        """See :class:`Holdings`."""
        standard_lengths = run_lengths(self)
        sets = self.slice_sets(standard_lengths)
        _, best, runs = sets.best(self.margin_fraction)
        weights = np.array([self.weights.get(length, 0.0) for length in sets.lengths])
        # Ignore lengths of no weight that the GPU can run.
        needed = (weights > 0.0) | ~sets.on_gpu
        used = np.bitwise_or.reduce(runs[:, :, needed], axis=-1)
        sizes = held_bytes(sets.sizes, used, budget.copies_by_length)
        factors = 1.0 + GAIN_FRACTION * np.maximum(0, sets.counts - 1)
        costs = self.layers * weighed(best[:, needed], weights[needed]) * factors
        return [
            Holding(
                {self.spec.group: named(sets.sets[place], used[place], standard_lengths)},
                int(sizes[place]),
                float(costs[place]),
            )
            for place in frontier(sizes.tolist(), costs.tolist())
            if math.isfinite(costs[place])
        ]


def run_lengths(*groups: GroupCosts) -> tuple[int, ...]:
    """Return every length that the NPU runs for any slice of some groups, ascending."""
    found = {
        length
        for group in groups
        for table in group.costs.values()
        for item in table.values()
        for length in (*item.whole_lengths, *item.cut_lengths)
    }
    return tuple(sorted(found))


def named(
    held: Sequence[Rows], used: Sequence[int], standard_lengths: Sequence[int]
) -> dict[Rows, tuple[int, ...]]:
    """Return slices with the lengths whose bits are set for each."""
    return {
        rows: tuple(length for place, length in enumerate(standard_lengths) if bits >> place & 1)
        for rows, bits in zip(held, map(int, used), strict=False)
    }


def slice_costs(priced: Iterable[Priced], objective: Objective) -> dict[Rows, SliceCost]:
    """Return the cheapest that each slice makes possible.

    Args:
        priced: All candidates of a group at a length.
        objective: Its cap on the GPU's share counts; its margin does not, for it depends on what is held.
    """
    best: dict[tuple[Rows, bool], tuple[float, tuple[int, ...]]] = {}
    for item in priced:
        cost = item.cost * (1.0 if objective.allows(item.gpu_us, item.time_us) else OVER_CAP)
        key = item.placement.npu_rows, item.is_cut
        if key not in best or cost < best[key][0]:
            best[key] = cost, item.placement.npu_lengths
    found = {}
    for rows in dict.fromkeys(rows for rows, _ in best):
        whole, whole_lengths = best.get((rows, False), (math.inf, ()))
        cut, cut_lengths = best.get((rows, True), (math.inf, ()))
        found[rows] = SliceCost(whole, cut, whole_lengths, cut_lengths)
    return found


def pass_weights(prompts: Mapping[int, float], chunk_length: int) -> dict[int, float]:
    """Return how often passes of each length come.

    Args:
        prompts: How often prompts of each length come, and decode under length 1.
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


def choose_slices(groups: Sequence[Holdings], budget: Budget) -> Slices:
    """Return the cheapest slices that fit the budget.

    Args:
        groups: What may be held of every group.
        budget: What the NPU may hold.

    Raises:
        PlanError: A group can only be computed by the NPU, and the budget does not hold that.
    """
    best: list[Holding] = [Holding({}, 0, 0.0)]
    for group in groups:
        holdings = group.holdings(budget)
        combined = [
            Holding({**held.slices, **own.slices}, held.size_bytes + own.size_bytes, held.cost + own.cost)
            for held in best
            for own in holdings
            if budget.holds(held.size_bytes + own.size_bytes)
        ]
        # Of two sets the larger one is kept only if it is cheaper.
        kept = frontier((held.size_bytes for held in combined), (held.cost for held in combined))
        best = [combined[place] for place in kept]
    if not best:
        raise PlanError(
            f"The NPU's budget of {budget.npu_bytes} bytes does not hold what only the NPU may compute.",
            fix="Raise the budget, or allow both parts.",
        )
    return best[-1].slices
