"""Which slices the NPU holds: rows of a group in its memory, each serving many lengths.

Every set of up to three useful slices of a group is considered, and the sets of all groups are combined
exactly under the budget. A further slice of a group is held only where it pays.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from heterollm.errors import OptionError
from heterollm.kernels.ops import Group, OpSpec

__all__ = ["Budget", "GroupCosts", "Rows", "Slices", "choose_slices"]

Rows: TypeAlias = tuple[int, ...]
"""The NPU's rows of each member; empty where the GPU computes all."""

Slices: TypeAlias = Mapping[Group, tuple[Rows, ...]]
"""By group, the rows that the NPU holds."""

MAX_SLICES: Final = 3
GAIN_FRACTION: Final = 0.01
"""A further slice of a group must make the passes that it serves this much cheaper."""


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
class GroupCosts:
    """The best that each slice of a group makes possible.

    Args:
        spec: The group.
        layers: How many layers have it.
        costs: By length and rows, the cost of the cheapest placement in one layer.
    """

    spec: OpSpec
    layers: int
    costs: Mapping[int, Mapping[Rows, float]]

    def best(self, length: int, held: Iterable[Rows]) -> tuple[float, Rows]:
        """Return the cost of all layers at a length, infinite where no slice serves it, and the rows used."""
        table = self.costs[length]
        rows = min(held, key=lambda rows: table.get(rows, math.inf))
        return self.layers * table.get(rows, math.inf), rows


@dataclass(frozen=True, slots=True)
class _Holding:
    slices: tuple[Rows, ...]
    size_bytes: int
    cost: float


def choose_slices(
    groups: Sequence[GroupCosts], budget: Budget, weights: Mapping[int, float] | None = None
) -> Slices:
    """Return the cheapest slices that fit the budget.

    Args:
        groups: Costs of every group by length and slice.
        budget: What the NPU may hold.
        weights: How often passes of each length come. By default every length counts by what it loses on its
            own best, so that long prompts do not drown short ones, and decode as much as all prompts.
    """
    frontier: list[tuple[int, float, dict[Group, tuple[Rows, ...]]]] = [(0, 0.0, {})]
    counts = weights or _equal_weights(groups)
    for group in groups:
        holdings = [item for item in _holdings(group, budget, counts) if math.isfinite(item.cost)]
        combined = [
            (size + item.size_bytes, cost + item.cost, {**held, group.spec.group: item.slices})
            for size, cost, held in frontier
            for item in holdings
            if budget.holds(size + item.size_bytes)
        ]
        frontier = []
        # Of two sets the larger one is kept only if it is cheaper.
        for entry in sorted(combined, key=lambda entry: entry[:2]):
            if not frontier or entry[1] < frontier[-1][1]:
                frontier.append(entry)
    return frontier[-1][2] if frontier else {group.spec.group: () for group in groups}


def _equal_weights(groups: Sequence[GroupCosts]) -> dict[int, float]:
    totals: dict[int, float] = {}
    for group in groups:
        for length, table in group.costs.items():
            totals[length] = totals.get(length, 0.0) + group.layers * min(table.values())
    weights = {length: 1.0 / total if total else 0.0 for length, total in totals.items()}
    if 1 in weights:
        weights[1] *= max(1, len(weights) - 1)
    return weights


def _holdings(group: GroupCosts, budget: Budget, weights: Mapping[int, float]) -> list[_Holding]:
    """Return the sets of a group's slices that are worth considering, none included."""
    useful = {min(table, key=lambda rows: (table[rows], rows)) for table in group.costs.values()}
    if budget.npu_bytes is not None:
        # A budget may call for less than the best.
        useful |= set().union(*group.costs.values())
    useful.discard(())
    most = MAX_SLICES if len(useful) <= 12 else 2
    sets = itertools.chain.from_iterable(
        itertools.combinations(sorted(useful), count) for count in range(min(most, len(useful)) + 1)
    )
    return [_holding(group, slices, budget, weights) for slices in sets]


def _holding(
    group: GroupCosts, slices: tuple[Rows, ...], budget: Budget, weights: Mapping[int, float]
) -> _Holding:
    cost = 0.0
    users: dict[Rows, int] = {(): 0, **dict.fromkeys(slices, 0)}
    for length in group.costs:
        own, rows = group.best(length, users)
        cost += weights.get(length, 0.0) * own
        users[rows] += 1
    weight = group.spec.weight
    size = sum(
        weight.weight_bytes(sum(rows), group.spec.columns) * (users[rows] if budget.copies_by_length else 1)
        for rows in slices
    )
    return _Holding(slices, group.layers * size, cost * (1.0 + GAIN_FRACTION * max(0, len(slices) - 1)))
