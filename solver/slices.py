"""Which slices the NPU holds: rows of a group in its memory, each serving many lengths.

Sets of up to three slices of a group are considered, and the sets of all groups are combined exactly under
the budget. A further slice of a group is held only where it pays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from heterollm.errors import OptionError, PlanError
from heterollm.kernels.ops import Group, OpSpec
from heterollm.solver.candidates import Rows
from heterollm.solver.objective import Objective
from heterollm.solver.search import Priced

__all__ = [
    "Budget",
    "GroupCosts",
    "Rows",
    "SliceCost",
    "Slices",
    "choose_slices",
    "pass_weights",
    "slice_costs",
]

Slices: TypeAlias = Mapping[Group, Mapping[Rows, tuple[int, ...]]]
"""By group, the rows that the NPU holds, each with the lengths at which it may run."""

MAX_SLICES: Final = 3
MOST_TRIED: Final = 12
"""Slices of which sets of three are tried; of more, pairs, and sets of three among each length's best."""

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
class SliceCost:
    """The cheapest that one slice of a group makes possible at a length, in one layer.

    Args:
        whole: Cost where one part computes all; infinite where the slice is not the whole group.
        cut: Cost where both parts compute.
        whole_lengths: Lengths that the NPU runs for ``whole``.
        cut_lengths: Lengths that it runs for ``cut``.
    """

    whole: float = math.inf
    cut: float = math.inf
    whole_lengths: tuple[int, ...] = ()
    cut_lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GroupCosts:
    """What the slices of a group make possible.

    Args:
        spec: The group.
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

    def best(self, length: int, held: Iterable[Rows]) -> tuple[float, Rows, tuple[int, ...]]:
        """Return the cost of all layers at a length with some slices, the rows used and the NPU's lengths.

        The cost is infinite where nobody can compute the group.
        """
        table = self.costs[length]
        whole, cut = table.get((), NONE), NONE
        whole_rows: Rows = ()
        cut_rows: Rows = ()
        for rows in held:
            item = table.get(rows, NONE)
            if item.whole < whole.whole:
                whole, whole_rows = item, rows
            if item.cut < cut.cut:
                cut, cut_rows = item, rows
        if cut.cut <= whole.whole * (1.0 - self.margin_fraction) and cut is not NONE:
            return self.layers * cut.cut, cut_rows, cut.cut_lengths
        return self.layers * whole.whole, whole_rows, whole.whole_lengths


NONE: Final = SliceCost()


@dataclass(frozen=True, slots=True)
class _Holding:
    slices: Mapping[Rows, tuple[int, ...]]
    size_bytes: int
    cost: float


def slice_costs(priced: Iterable[Priced], objective: Objective) -> dict[Rows, SliceCost]:
    """Return the cheapest that each slice makes possible.

    Args:
        priced: All candidates of a group at a length.
        objective: Its cap on the GPU's share counts; its margin does not, for it depends on what is held.
    """
    best: dict[tuple[Rows, bool], tuple[float, tuple[int, ...]]] = {}
    for item in priced:
        cost = item.cost * (1.0 if objective.allows(item) else OVER_CAP)
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


def choose_slices(groups: Sequence[GroupCosts], budget: Budget) -> Slices:
    """Return the cheapest slices that fit the budget.

    Args:
        groups: Costs of every group by length and slice.
        budget: What the NPU may hold.

    Raises:
        PlanError: A group can only be computed by the NPU, and the budget does not hold that.
    """
    frontier: list[tuple[int, float, dict[Group, Mapping[Rows, tuple[int, ...]]]]] = [(0, 0.0, {})]
    for group in groups:
        holdings = _holdings(group, budget)
        combined = [
            (size + item.size_bytes, cost + item.cost, {**held, group.spec.group: item.slices})
            for size, cost, held in frontier
            for item in holdings
            if budget.holds(size + item.size_bytes)
        ]
        # Of two sets the larger one is kept only if it is cheaper.
        frontier = []
        for entry in sorted(combined, key=lambda entry: entry[:2]):
            if not frontier or entry[1] < frontier[-1][1]:
                frontier.append(entry)
    if not frontier:
        raise PlanError(
            f"The NPU's budget of {budget.npu_bytes} bytes does not hold what only the NPU may compute.",
            fix="Raise the budget, or allow both parts.",
        )
    return frontier[-1][2]


def _holdings(group: GroupCosts, budget: Budget) -> list[_Holding]:
    """Return a group's sets of slices that may be worth holding, smallest first, none included."""
    found = [_holding(group, slices, budget) for slices in _sets(group)]
    kept: list[_Holding] = []
    for item in sorted(found, key=lambda item: (item.size_bytes, item.cost)):
        if math.isfinite(item.cost) and (not kept or item.cost < kept[-1].cost):
            kept.append(item)
    return kept


def _sets(group: GroupCosts) -> Iterator[tuple[Rows, ...]]:
    every = sorted(set().union(*group.costs.values()) - {()})
    for count in range(MAX_SLICES):
        yield from itertools.combinations(every, count)
    best = every
    if len(every) > MOST_TRIED:
        best = sorted({rows for length in group.costs for rows in [group.best(length, every)[1]] if rows})
    yield from itertools.combinations(best[:MOST_TRIED], MAX_SLICES)


def _holding(group: GroupCosts, slices: tuple[Rows, ...], budget: Budget) -> _Holding:
    cost = 0.0
    lengths: dict[Rows, set[int]] = {rows: set() for rows in slices}
    for length, table in group.costs.items():
        often = group.weights.get(length, 0.0)
        if not often and math.isfinite(table.get((), NONE).whole):
            # Nobody asks for it, and the GPU can do it.
            continue
        own, rows, npu_lengths = group.best(length, slices)
        cost += often * own if math.isfinite(own) else own
        if rows:
            lengths[rows].update(npu_lengths)
    weight = group.spec.weight
    size = sum(
        weight.weight_bytes(sum(rows), group.spec.columns) * (len(used) if budget.copies_by_length else 1)
        for rows, used in lengths.items()
    )
    held = {rows: tuple(sorted(used)) for rows, used in lengths.items()}
    return _Holding(held, group.layers * size, cost * (1.0 + GAIN_FRACTION * max(0, len(slices) - 1)))
