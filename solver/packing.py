"""The choice of resident slices under a budget for graphs: rows and lengths in one decision.

Where every length has its own copy of the weights, or its own input and output, memory decides which lengths
to build as well as which rows. The search covers, for each group, one slice for prompts with any lengths or
two with few lengths together (:data:`heterollm.solver.slice_tables.MOST_LENGTHS`), and one slice for single
tokens. Passes may be padded to a longer graph or run as several shorter ones. Among these sets the search is
exact: it finds the Pareto frontier of size and cost of each group, and combines the frontiers. For a
feed-forward network with two paths it combines :data:`MOST_OF_A_PATH` sets of each group, for a few divisions
of the lengths between the paths.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from heterollm.base import PlanError
from heterollm.kernels.ops import OpSpec
from heterollm.solver.candidates import Rows
from heterollm.solver.objective import Objective
from heterollm.solver.options import Option
from heterollm.solver.slice_sets import Floats, Ints, array_frontier
from heterollm.solver.slice_tables import SliceCombinations, SliceTable, weighted
from heterollm.solver.slices import Budget, Slices

MOST_OF_A_PATH: Final = 24
"""Sets of one group to combine for one division of the lengths between the paths of an ffn."""

MOST_JOINED: Final = 3000
"""Points of a joint frontier; of more, the search keeps those that differ by :data:`THINNED_FRACTION`."""

THINNED_FRACTION: Final = 1e-4
"""Fraction of the cost that thinning a joint frontier may lose."""

_Held: TypeAlias = dict[str, dict[Rows, tuple[int, ...]]]


@dataclass(frozen=True, slots=True, eq=False)
class Frontier:
    """Sets of slices that no smaller one matches.

    Args:
        sizes: Bytes of each set, ascending.
        costs: Cost of all passes with it, descending.
        held: The slices of each set.
    """

    sizes: Ints
    costs: Floats
    held: Sequence[_Held]


class Packing(Protocol):
    """Slices of one or several groups to choose from."""

    def frontier(self, budget: Budget) -> Frontier:
        """Return the Pareto frontier of sets within the budget."""
        ...


@dataclass(frozen=True, slots=True)
class GroupPacking:
    """A group of linears.

    Args:
        spec: The group, or an ffn.
        layers: Number of layers that have it.
        options: By length of a pass, the options in one layer; each names the rows and lengths that it needs.
        weights: Weights of passes by length; passes of weight 0 do not count.
        objective: The objective, for its margin and its cap on the GPU's share.
    """

    spec: OpSpec
    layers: int
    options: Mapping[int, Sequence[Option]]
    weights: Mapping[int, float]
    objective: Objective

    def frontier(self, budget: Budget) -> Frontier:
        """See :class:`Packing`."""
        table = self.table(budget)
        sets = table.best_sets(table.weights)
        sets = sets.at(np.flatnonzero(np.isfinite(sets.totals)))
        held = [{self.spec.place: table.slices_of(members)} for members in sets.members]
        return Frontier(sets.sizes, sets.totals, held)

    def table(self, budget: Budget, gpu_cost: Floats | None = None) -> SliceTable:
        """Return the costs of all slices; ``gpu_cost`` bounds an ffn, which the GPU alone does not run."""
        given = self.spec, self.layers, self.options, self.weights, self.objective
        return SliceTable.of(*given, budget, gpu_cost)


@dataclass(frozen=True, slots=True)
class FfnPacking:
    """A feed-forward network with two paths: two groups with an activation between them, or one ffn.

    Args:
        gate_up: The first group.
        down: The second group.
        ffn: Both as one operator, which the GPU alone cannot run.
        activation: By length, the cost of the activation in one layer.
    """

    gate_up: GroupPacking
    down: GroupPacking
    ffn: GroupPacking
    activation: Mapping[int, float]

    def frontier(self, budget: Budget) -> Frontier:
        """See :class:`Packing`."""
        first, second = self.gate_up.table(budget), self.down.table(budget)
        between = np.array([self.activation[tokens] for tokens in first.tokens])
        both = first.gpu + between + second.gpu
        third = self.ffn.table(budget, both)
        sizes: list[Ints] = []
        costs: list[Floats] = []
        places: list[tuple[tuple[SliceCombinations, int], ...]] = []
        for as_ffn in _divisions(first, second, third, between):
            parts = [
                _thinned(table.best_sets(np.where(served, table.weights, 0.0)))
                for table, served in ((first, ~as_ffn), (second, ~as_ffn), (third, as_ffn))
            ]
            total, cost = self._combined(parts, between, first.weights)
            for place in array_frontier(total.ravel(), cost.ravel(), budget.npu_bytes):
                at = np.unravel_index(place, total.shape)
                sizes.append(total[at])
                costs.append(cost[at])
                places.append(tuple((part, int(own)) for part, own in zip(parts, at, strict=True)))
        kept = array_frontier(np.array(sizes, np.int64), np.array(costs), budget.npu_bytes)
        held = []
        for place in kept:
            own: _Held = {}
            for table, (part, number) in zip((first, second, third), places[place], strict=True):
                own[table.spec.place] = table.slices_of(part.members[number])
            held.append(own)
        return Frontier(np.array(sizes, np.int64)[kept], np.array(costs)[kept], held)

    def _combined(
        self, parts: Sequence[SliceCombinations], between: Floats, weights: Floats
    ) -> tuple[Ints, Floats]:
        """Return sizes and costs ``[a, b, c]`` of all combinations of sets of the three operators."""
        gate_up, down, ffn = parts
        margin = 1.0 - self.ffn.objective.margin_fraction
        whole = (gate_up.whole + between)[:, None, None] + down.whole[None, :, None]
        pair = (gate_up.cost + between)[:, None, None] + down.cost[None, :, None]
        # The same decision as in heterollm.solver.chain.
        takes_split = (ffn.split <= np.minimum(whole, ffn.whole) * margin) & (ffn.split < ffn.whole)
        own = np.where(takes_split, ffn.split, ffn.whole)
        costs = self.gate_up.layers * weighted(np.minimum(pair, own), weights)
        return gate_up.sizes[:, None, None] + down.sizes[None, :, None] + ffn.sizes, costs


def pack(groups: Sequence[Frontier], budget: Budget) -> Slices:
    """Return the slices of all groups with the least cost of all passes within the budget.

    Args:
        groups: The frontiers of all groups.
        budget: The budget.

    Raises:
        PlanError: The budget is too small for a group that only the NPU may compute.
    """
    sizes, costs = np.zeros(1, np.int64), np.zeros(1)
    steps: list[tuple[Frontier, Ints, Ints]] = []
    for own in groups:
        total, cost = (sizes[:, None] + own.sizes).ravel(), (costs[:, None] + own.costs).ravel()
        kept = array_frontier(total, cost, budget.npu_bytes)
        if len(kept) > MOST_JOINED:
            kept = _apart(kept, cost[kept])
        if not len(kept):
            raise PlanError(
                f"The NPU's budget of {budget.npu_bytes} bytes does not hold what only the NPU may compute.",
                fix="Raise the budget, or allow both processors.",
            )
        before, taken = np.divmod(kept, len(own.sizes))
        steps.append((own, before, taken))
        sizes, costs = total[kept], cost[kept]
    found: _Held = {}
    place = len(sizes) - 1
    for own, before, taken in reversed(steps):
        found.update(own.held[taken[place]])
        place = int(before[place])
    return found


def _apart(kept: Ints, costs: Floats) -> Ints:
    """Return points of a frontier whose costs differ by a fraction, the first and the last included."""
    steps = np.floor(-np.log(costs) / THINNED_FRACTION)
    # The smallest of each step, and the cheapest of all.
    first = np.flatnonzero(np.diff(steps, prepend=math.inf))
    apart: Ints = kept[np.unique(np.append(first, len(kept) - 1))]
    return apart


def _thinned(sets: SliceCombinations) -> SliceCombinations:
    """Return at most :data:`MOST_OF_A_PATH` sets of a frontier, evenly spaced by cost, both ends included."""
    if len(sets.sizes) <= MOST_OF_A_PATH:
        return sets
    steps = np.linspace(sets.totals[0], sets.totals[-1], MOST_OF_A_PATH)
    return sets.at(np.unique(np.searchsorted(-sets.totals, -steps)))


def _divisions(
    gate_up: SliceTable, down: SliceTable, ffn: SliceTable, between: Floats
) -> Iterator[NDArray[np.bool_]]:
    """Yield lengths for the ffn: none, decode, those where it can be cheaper, prompts, all."""

    def best(table: SliceTable) -> Floats:
        least: Floats = np.vstack([table.gpu, table.whole, table.split]).min(axis=0)
        return least

    better = best(ffn) < best(gate_up) + between + best(down)
    decode = np.array([tokens == 1 for tokens in gate_up.tokens])
    seen = set()
    for found in (np.zeros_like(better), decode, better, ~decode, np.ones_like(better)):
        if found.tobytes() not in seen:
            seen.add(found.tobytes())
            yield found
