"""The choice of resident slices of a feed-forward network with two paths: two groups or one ffn.

The path of a pass depends on the slices of gate_up, down and ffn, so they are one choice. With few slices the
search tries all triples of sets. Else it tries all pairs of sets of gate_up and down without an ffn, and the
best sets of each path for a few divisions of the lengths between the paths. The cost of a triple is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from heterollm.solver.slice_sets import (
    Flags,
    Floats,
    Ints,
    SliceSets,
    frontier,
    weighted_sum,
    with_margin,
)
from heterollm.solver.slices import (
    GAIN_FRACTION,
    Budget,
    GroupCosts,
    ResidentSlices,
)

ALL_TRIPLES: Final = 20_000
"""Triples of sets up to which all are tried."""

MOST_OF_A_PATH: Final = 10
"""Sets of one group to combine for one division of the lengths."""

_Triples: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Indices of sets of gate_up, of down and of ffn, for all their combinations."""


@dataclass(frozen=True, slots=True)
class FeedForwardCosts:
    """Costs of a feed-forward network with each slice.

    Args:
        gate_up: The first group.
        down: The second group.
        ffn: Both as one operator; the GPU alone cannot run it.
        activation: By length, the cost of the activation in one layer.
    """

    gate_up: GroupCosts
    down: GroupCosts
    ffn: GroupCosts
    activation: Mapping[int, float]

    def resident_options(self, budget: Budget) -> list[ResidentSlices]:
        """See :class:`heterollm.solver.slices.SliceChoices`."""
        paths = _Paths.of(self, budget)
        found = [held for triples in paths.triples() for held in paths.combinations(triples)]
        kept = frontier((size for size, _, _ in found), (cost for _, cost, _ in found))
        return [paths.resident(*found[place]) for place in kept]


@dataclass(frozen=True, slots=True, eq=False)
class _Paths:
    """The two paths through the network at the lengths that count, ``m``; sets as in :class:`SliceSets`."""

    costs: FeedForwardCosts
    budget: Budget
    gate_up: SliceSets
    down: SliceSets
    ffn: SliceSets
    gate_up_best: tuple[Floats, Floats]
    down_best: tuple[Floats, Floats]
    activation: Floats
    weights: Floats
    best_whole: Floats

    @classmethod
    def of(cls, costs: FeedForwardCosts, budget: Budget) -> _Paths:
        groups = costs.gate_up, costs.down, costs.ffn
        gate_up, down, ffn = (group.slice_sets() for group in groups)
        weights = np.array([costs.gate_up.weights.get(length, 0.0) for length in gate_up.lengths])
        activation = np.array([costs.activation[length] for length in gate_up.lengths])
        # Ignore lengths with zero weight that the GPU can run.
        needed = (weights > 0.0) | ~(gate_up.on_gpu & down.on_gpu)
        gate_up, down, ffn = (sets.at(needed) for sets in (gate_up, down, ffn))
        return cls(
            costs,
            budget,
            gate_up,
            down,
            ffn,
            gate_up.best(costs.gate_up.margin_fraction),
            down.best(costs.down.margin_fraction),
            activation[needed],
            weights[needed],
            np.minimum(
                gate_up.whole.min(axis=0) + activation[needed] + down.whole.min(axis=0),
                ffn.whole.min(axis=0),
            ),
        )

    def triples(self) -> Iterator[_Triples]:
        """Yield the combinations of sets to try."""
        every = [range(len(sets.sets)) for sets in (self.gate_up, self.down, self.ffn)]
        if len(every[0]) * len(every[1]) * len(every[2]) <= ALL_TRIPLES:
            yield every[0], every[1], every[2]
            return
        (_, gate_up), (_, down) = self.gate_up_best, self.down_best
        everywhere = np.ones(len(self.weights), np.bool_)
        no_ffn = (0,)
        yield (
            self._frontier(self.gate_up, gate_up, everywhere),
            self._frontier(self.down, down, everywhere),
            no_ffn,
        )
        ffn = np.minimum(self.ffn.whole, self.ffn.split)
        better = ffn.min(axis=0) < gate_up.min(axis=0) + self.activation + down.min(axis=0)
        for as_ffn in self._divisions(better):
            yield (
                _thinned(self._frontier(self.gate_up, gate_up, ~as_ffn)),
                _thinned(self._frontier(self.down, down, ~as_ffn)),
                _thinned(self._frontier(self.ffn, ffn, as_ffn)),
            )

    def _divisions(self, better: Flags) -> Iterator[Flags]:
        """Yield lengths for the ffn: where it can be cheaper, decode or prompts of those, all."""
        decode = np.array([length == 1 for length in self.gate_up.lengths])
        seen = set()
        for found in (better, better & decode, better & ~decode, np.ones_like(better)):
            if found.any() and found.tobytes() not in seen:
                seen.add(found.tobytes())
                yield found

    def _frontier(self, sets: SliceSets, costs: Floats, served: Flags) -> list[int]:
        """Return the indices of the Pareto frontier of sets for the ``served`` lengths, smallest first."""
        sizes = sets.sizes.sum(axis=-1)
        factors = 1.0 + GAIN_FRACTION * np.maximum(0, sets.counts - 1)
        totals = weighted_sum(costs[:, served], self.weights[served]) * factors
        places = [place for place, size in enumerate(sizes.tolist()) if self.budget.holds(size)]
        places = [place for place in places if np.isfinite(totals[place])]
        return [places[kept] for kept in frontier(sizes[places].tolist(), totals[places].tolist())]

    def combinations(self, triples: _Triples) -> Iterator[tuple[int, float, tuple[int, int, int]]]:
        """Yield size, cost and indices of the combinations on the Pareto frontier."""
        gate_up, down = (np.array(places, np.int64) for places in triples[:2])
        if not len(gate_up) or not len(down):
            return
        for ffn in triples[2]:
            sizes, costs = self._cost(gate_up, down, ffn)
            flat_sizes, flat_costs = sizes.ravel().tolist(), costs.ravel().tolist()
            for place in frontier(flat_sizes, flat_costs):
                if self.budget.holds(flat_sizes[place]):
                    first, second = divmod(place, len(down))
                    yield (
                        flat_sizes[place],
                        flat_costs[place],
                        (int(gate_up[first]), int(down[second]), ffn),
                    )

    def resident(self, size_bytes: int, cost: float, places: tuple[int, int, int]) -> ResidentSlices:
        """Return one combination with the rows of its slices."""
        groups = self.costs.gate_up, self.costs.down, self.costs.ffn
        parts = zip(groups, (self.gate_up, self.down, self.ffn), places, strict=True)
        rows = {group.spec.place: sets.sets[place] for group, sets, place in parts}
        return ResidentSlices(rows, size_bytes, cost)

    def _cost(self, gate_up: Ints, down: Ints, ffn: int) -> tuple[Ints, Floats]:
        """Return sizes and costs ``[a, b]`` of sets of gate_up and down with one of the ffn.

        Args:
            gate_up: Indices ``[a]`` of sets.
            down: Indices ``[b]`` of sets.
            ffn: Index of a set.
        """
        first, first_with_margin = (values[gate_up][:, None] for values in self.gate_up_best)
        second, second_with_margin = (values[down][None] for values in self.down_best)
        pair = first + self.activation + second
        whole = self.gate_up.whole[gate_up][:, None] + self.activation + self.down.whole[down][None]
        ffn_whole, ffn_split = self.ffn.whole[ffn], self.ffn.split[ffn]
        # The same decision as in heterollm.solver.chain.
        threshold = np.minimum(whole, ffn_whole) * (1.0 - self.costs.ffn.margin_fraction)
        takes_split = np.isfinite(ffn_split) & (ffn_split <= threshold) & (ffn_split < ffn_whole)
        as_ffn = np.where(takes_split, ffn_split, ffn_whole) < pair
        ffn_with_margin = with_margin(ffn_split, self.best_whole, self.costs.ffn.margin_fraction)
        own = np.where(takes_split, ffn_with_margin, ffn_whole)
        costs = weighted_sum(
            np.where(as_ffn, own, first_with_margin + self.activation + second_with_margin), self.weights
        )
        first_cost, second_cost = (
            weighted_sum(np.where(as_ffn, 0.0, part), self.weights)
            for part in (first_with_margin, second_with_margin)
        )
        further = [np.maximum(0, sets.counts - 1) for sets in (self.gate_up, self.down)]
        pairs = self.gate_up.counts[gate_up][:, None] + self.down.counts[down][None]
        ffns = np.maximum(0, self.ffn.counts[ffn] - (pairs == 0))
        costs = costs * (1.0 + GAIN_FRACTION * ffns)
        costs += GAIN_FRACTION * (
            further[0][gate_up][:, None] * first_cost + further[1][down][None] * second_cost
        )
        parts = (self.gate_up.sizes[gate_up][:, None], self.down.sizes[down][None], self.ffn.sizes[ffn])
        total = sum(sizes.sum(axis=-1) for sizes in parts)
        return np.asarray(total), self.costs.gate_up.layers * costs


def _thinned(places: list[int]) -> list[int]:
    """Return at most :data:`MOST_OF_A_PATH` of the indices, evenly spaced, first and last included."""
    if len(places) <= MOST_OF_A_PATH:
        return places
    steps = MOST_OF_A_PATH - 1
    return [places[step * (len(places) - 1) // steps] for step in range(MOST_OF_A_PATH)]
