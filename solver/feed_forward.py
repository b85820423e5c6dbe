"""What the NPU holds of a feed-forward network that may be placed as two groups or as one block.

Which way a pass goes depends on what is held of all three, so they are one choice: slices of gate_up and
down, slices of the block, or both, each for the lengths where its way is the better one. Where there are few
slices all triples of sets are tried. Else all that the two groups can hold without a block is, and beside it
the best sets of each way for a few divisions of the lengths between them; what they cost together is exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from heterollm.solver.slice_sets import Bits, Flags, Floats, SliceSets, frontier, held_bytes, weighed, worth
from heterollm.solver.slices import GAIN_FRACTION, Budget, GroupCosts, Holding, named, run_lengths

__all__ = ["FeedForwardCosts"]

ALL_TRIPLES: Final = 20_000
"""Triples of sets up to which all are tried."""

MOST_OF_A_WAY: Final = 10
"""Sets of one group that are combined for one division of the lengths."""

_Triples: TypeAlias = tuple[Sequence[int], Sequence[int], Sequence[int]]
"""Places of sets of gate_up, of down and of the block: all combinations of them."""


@dataclass(frozen=True, slots=True)
class FeedForwardCosts:
    """What the slices of a feed-forward network make possible.

    Args:
        gate_up: The first group of the two.
        down: The second one.
        block: Both as one; none of its rows are the GPU's alone.
        activation: By length, what the operator between the two costs in one layer.
    """

    gate_up: GroupCosts
    down: GroupCosts
    block: GroupCosts
    activation: Mapping[int, float]

    def holdings(self, budget: Budget) -> list[Holding]:
        """See :class:`heterollm.solver.slices.Holdings`."""
        ways = _Ways.of(self, budget)
        found = [held for triples in ways.triples() for held in ways.priced(triples)]
        kept = frontier((size for size, _, _ in found), (cost for _, cost, _ in found))
        return [ways.holding(*found[place]) for place in kept]


@dataclass(frozen=True, slots=True, eq=False)
class _Ways:
    """The two ways through the network at the lengths that count, ``m``; sets as in :class:`SliceSets`."""

    costs: FeedForwardCosts
    budget: Budget
    standard_lengths: tuple[int, ...]
    gate_up: SliceSets
    down: SliceSets
    block: SliceSets
    gate_up_best: tuple[Floats, Floats, Bits]
    down_best: tuple[Floats, Floats, Bits]
    activation: Floats
    weights: Floats
    best_whole: Floats

    @classmethod
    def of(cls, costs: FeedForwardCosts, budget: Budget) -> _Ways:
        groups = costs.gate_up, costs.down, costs.block
        standard_lengths = run_lengths(*groups)
        gate_up, down, block = (group.slice_sets(standard_lengths) for group in groups)
        weights = np.array([costs.gate_up.weights.get(length, 0.0) for length in gate_up.lengths])
        activation = np.array([costs.activation[length] for length in gate_up.lengths])
        # Ignore lengths of no weight that the GPU can run.
        needed = (weights > 0.0) | ~(gate_up.on_gpu & down.on_gpu)
        gate_up, down, block = (sets.at(needed) for sets in (gate_up, down, block))
        return cls(
            costs,
            budget,
            standard_lengths,
            gate_up,
            down,
            block,
            gate_up.best(costs.gate_up.margin_fraction),
            down.best(costs.down.margin_fraction),
            activation[needed],
            weights[needed],
            np.minimum(
                gate_up.whole.min(axis=0) + activation[needed] + down.whole.min(axis=0),
                block.whole.min(axis=0),
            ),
        )

    def triples(self) -> Iterator[_Triples]:
        """Yield the combinations of sets that are tried."""
        every = [range(len(sets.sets)) for sets in (self.gate_up, self.down, self.block)]
        if len(every[0]) * len(every[1]) * len(every[2]) <= ALL_TRIPLES:
            yield every[0], every[1], every[2]
            return
        (_, gate_up, gate_up_runs), (_, down, down_runs) = self.gate_up_best, self.down_best
        everywhere = np.ones(len(self.weights), np.bool_)
        no_block = (0,)
        yield (
            self._worth(self.gate_up, gate_up, gate_up_runs, everywhere),
            self._worth(self.down, down, down_runs, everywhere),
            no_block,
        )
        block = np.minimum(self.block.whole, self.block.cut)
        is_cut = (self.block.cut < self.block.whole)[:, None, :]
        block_runs = np.where(is_cut, self.block.cut_runs, self.block.whole_runs)
        better = block.min(axis=0) < gate_up.min(axis=0) + self.activation + down.min(axis=0)
        for as_block in self._divisions(better):
            yield (
                _thinned(self._worth(self.gate_up, gate_up, gate_up_runs, ~as_block)),
                _thinned(self._worth(self.down, down, down_runs, ~as_block)),
                _thinned(self._worth(self.block, block, block_runs, as_block)),
            )

    def _divisions(self, better: Flags) -> Iterator[Flags]:
        """Yield lengths that the block may serve: where it can be better, decode or prompts of those, all."""
        decode = np.array([length == 1 for length in self.gate_up.lengths])
        seen = set()
        for found in (better, better & decode, better & ~decode, np.ones_like(better)):
            if found.any() and found.tobytes() not in seen:
                seen.add(found.tobytes())
                yield found

    def _worth(self, sets: SliceSets, costs: Floats, runs: Bits, served: Flags) -> list[int]:
        """Return the places of the sets that may be worth their size for some lengths, smallest first."""
        used = np.bitwise_or.reduce(np.where(served, runs, 0), axis=-1)
        sizes = held_bytes(sets.sizes, used, self.budget.copies_by_length)
        factors = 1.0 + GAIN_FRACTION * np.maximum(0, sets.counts - 1)
        totals = weighed(costs[:, served], self.weights[served]) * factors
        places = [place for place, size in enumerate(sizes.tolist()) if self.budget.holds(size)]
        places = [place for place in places if np.isfinite(totals[place])]
        return [places[kept] for kept in frontier(sizes[places].tolist(), totals[places].tolist())]

    def priced(self, triples: _Triples) -> Iterator[tuple[int, float, tuple[int, int, int]]]:
        """Yield size, cost and places of the combinations that may be worth their size."""
        gate_up, down = (np.array(places, np.int64) for places in triples[:2])
        if not len(gate_up) or not len(down):
            return
        for block in triples[2]:
            sizes, costs, _ = self._price(gate_up, down, block)
            flat_sizes, flat_costs = sizes.ravel().tolist(), costs.ravel().tolist()
            for place in frontier(flat_sizes, flat_costs):
                if self.budget.holds(flat_sizes[place]):
                    first, second = divmod(place, len(down))
                    yield (
                        flat_sizes[place],
                        flat_costs[place],
                        (int(gate_up[first]), int(down[second]), block),
                    )

    def holding(self, size_bytes: int, cost: float, places: tuple[int, int, int]) -> Holding:
        """Return one combination with the lengths at which its slices run."""
        gate_up, down, block = places
        _, _, used = self._price(np.array([gate_up]), np.array([down]), block)
        groups = self.costs.gate_up, self.costs.down, self.costs.block
        slices = {
            group.spec.group: named(sets.sets[place], runs[0, 0].tolist(), self.standard_lengths)
            for group, sets, place, runs in zip(
                groups, (self.gate_up, self.down, self.block), places, used, strict=True
            )
        }
        return Holding(slices, size_bytes, cost)

    def _price(self, gate_up: Bits, down: Bits, block: int) -> tuple[Bits, Floats, tuple[Bits, Bits, Bits]]:
        """Return sizes and costs ``[a, b]`` of sets of gate_up and down with one of the block.

        Args:
            gate_up: Places ``[a]`` of sets.
            down: Places ``[b]`` of sets.
            block: Place of a set.

        Returns:
            Sizes, costs, and the lengths ``[a, b, i]`` that the slices of each of the three run.
        """
        first, first_counted, first_runs = (values[gate_up][:, None] for values in self.gate_up_best)
        second, second_counted, second_runs = (values[down][None] for values in self.down_best)
        pair = first + self.activation + second
        whole = self.gate_up.whole[gate_up][:, None] + self.activation + self.down.whole[down][None]
        block_whole, block_cut = self.block.whole[block], self.block.cut[block]
        # As a chain chooses (heterollm.solver.chain).
        bar = np.minimum(whole, block_whole) * (1.0 - self.costs.block.margin_fraction)
        takes_cut = np.isfinite(block_cut) & (block_cut <= bar) & (block_cut < block_whole)
        as_block = np.where(takes_cut, block_cut, block_whole) < pair
        counted = worth(block_cut, self.best_whole, self.costs.block.margin_fraction)
        own = np.where(takes_cut, counted, block_whole)
        costs = weighed(
            np.where(as_block, own, first_counted + self.activation + second_counted), self.weights
        )
        first_cost, second_cost = (
            weighed(np.where(as_block, 0.0, part), self.weights) for part in (first_counted, second_counted)
        )
        further = [np.maximum(0, sets.counts - 1) for sets in (self.gate_up, self.down)]
        pairs = self.gate_up.counts[gate_up][:, None] + self.down.counts[down][None]
        blocks = np.maximum(0, self.block.counts[block] - (pairs == 0))
        costs = costs * (1.0 + GAIN_FRACTION * blocks)
        costs += GAIN_FRACTION * (
            further[0][gate_up][:, None] * first_cost + further[1][down][None] * second_cost
        )
        block_runs = np.where(takes_cut[:, :, None], self.block.cut_runs[block], self.block.whole_runs[block])
        aside = as_block[:, :, None]
        used = (
            np.bitwise_or.reduce(np.where(aside, 0, first_runs), axis=-1),
            np.bitwise_or.reduce(np.where(aside, 0, second_runs), axis=-1),
            np.bitwise_or.reduce(np.where(aside, block_runs, 0), axis=-1),
        )
        sizes = (self.gate_up.sizes[gate_up][:, None], self.down.sizes[down][None], self.block.sizes[block])
        copies = self.budget.copies_by_length
        total = sum(held_bytes(size, runs, copies) for size, runs in zip(sizes, used, strict=True))
        return np.asarray(total), self.costs.gate_up.layers * costs, used


def _thinned(places: list[int]) -> list[int]:
    """Return at most :data:`MOST_OF_A_WAY` of some places, the first and the last among them."""
    if len(places) <= MOST_OF_A_WAY:
        return places
    steps = MOST_OF_A_WAY - 1
    return [places[step * (len(places) - 1) // steps] for step in range(MOST_OF_A_WAY)]
