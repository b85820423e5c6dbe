"""Costs of slices of one group: rows with a set of lengths, alone and in the sets that the search tries.

Axes: ``s`` sets, ``i`` slices, ``m`` lengths of passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.ops import OpSpec
from heterollm.solver.candidates import Rows
from heterollm.solver.objective import Objective
from heterollm.solver.options import Option
from heterollm.solver.slice_sets import Floats, Ints, array_frontier
from heterollm.solver.slices import OVER_CAP, Budget

MOST_LENGTHS: Final = 4
"""Lengths of two slices together; one slice may have any number."""

BLOCK_SETS: Final = 1 << 16
"""Pairs of slices to evaluate at a time, which bounds the memory of the search."""


@dataclass(frozen=True, slots=True, eq=False)
class SliceCombinations:
    """Sets of slices of one group, ``s``, at the lengths ``m`` of passes.

    Args:
        members: Indices of the slices of each set, -1 where it has fewer.
        sizes: ``[s]``, bytes in all layers.
        whole: ``[s, m]``, cost in one layer of the best option on one processor.
        split: ``[s, m]``, cost of the best split.
        cost: ``[s, m]``, cost of the option that a pass takes.
        totals: ``[s]``, cost of all passes in all layers.
    """

    members: Ints
    sizes: Ints
    whole: Floats
    split: Floats
    cost: Floats
    totals: Floats

    def at(self, places: Sequence[int] | Ints) -> SliceCombinations:
        """Return some of the sets."""
        return SliceCombinations(*(getattr(self, field.name)[places] for field in fields(self)))

    @classmethod
    def joined(cls, parts: Sequence[SliceCombinations]) -> SliceCombinations:
        """Return the sets of all parts."""
        return cls(*(np.concatenate([getattr(part, one.name) for part in parts]) for one in fields(cls)))


@dataclass(frozen=True, slots=True, eq=False)
class _Grid:
    """Costs of a group with any rows ``i`` and any lengths of graphs, a bit of a mask ``j`` for each.

    Args:
        rows: Rows of the NPU.
        offered: Lengths of graphs.
        gpu: ``[m]``, cost of the GPU alone at the lengths of passes.
        whole: ``[i, j, m]``, cost of the best option on one processor.
        split: ``[i, j, m]``, cost of the best split.
    """

    rows: Sequence[Rows]
    offered: Sequence[int]
    gpu: Floats
    whole: Floats
    split: Floats

    @classmethod
    def of(cls, options: Sequence[Sequence[Option]], objective: Objective) -> _Grid:
        """Return the costs of the lengths that options run, from the options at each length of a pass."""
        used = {item.placement.npu_lengths for items in options for item in items}
        offered = sorted({length for lengths in used for length in lengths})
        masks = {lengths: sum(1 << offered.index(length) for length in set(lengths)) for lengths in used}
        rows = sorted({item.placement.npu_rows for items in options for item in items} - {()})
        numbers = {own: place for place, own in enumerate(rows)}
        shape = len(rows), 1 << len(offered), len(options)
        whole, split = np.full(shape, math.inf), np.full(shape, math.inf)
        gpu = np.full(len(options), math.inf)
        for place, items in enumerate(options):
            for item in items:
                cost = item.cost * (1.0 if objective.allows(item.gpu_us, item.time_us) else OVER_CAP)
                own = item.placement.npu_rows
                if not own:
                    gpu[place] = min(gpu[place], cost)
                    continue
                at = numbers[own], masks[item.placement.npu_lengths], place
                table = split if item.is_split else whole
                if cost < table[at]:
                    table[at] = cost
        return cls(rows, offered, gpu, whole, split)

    def _with_each(self) -> Iterator[tuple[Ints, Ints]]:
        """Yield for each length the masks that have it, and the same without it."""
        masks = np.arange(1 << len(self.offered))
        for place in range(len(self.offered)):
            have = masks[masks >> place & 1 == 1]
            yield have, have ^ (1 << place)

    def accumulate(self, bound: Floats, margin_fraction: float) -> None:
        """Leave options out that cost more than a bound, and give masks the options of all within them."""
        self.whole[self.whole >= bound] = math.inf
        self.split[self.split > bound * (1.0 - margin_fraction)] = math.inf
        for have, without in self._with_each():
            for table in (self.whole, self.split):
                table[:, have] = np.minimum(table[:, have], table[:, without])

    def useful(self) -> NDArray[np.bool_]:
        """Return whether every length of a mask lowers some cost, ``[i, j]``; none of no lengths does."""
        found = np.ones(self.whole.shape[:2], np.bool_)
        found[:, 0] = False
        for have, without in self._with_each():
            lower = [(table[:, have] < table[:, without]).any(axis=-1) for table in (self.whole, self.split)]
            found[:, have] &= lower[0] | lower[1]
        return found


@dataclass(frozen=True, slots=True, eq=False)
class SliceTable:
    """Costs of a group with every slice ``i``: rows with a set of lengths.

    Args:
        spec: The group.
        layers: Number of layers that have it.
        tokens: Lengths ``m`` of passes.
        weights: ``[m]``, their weights.
        gpu: ``[m]``, cost of the GPU alone.
        rows: Rows of each slice.
        lengths: Lengths of each slice.
        sizes: ``[i]``, bytes in all layers.
        whole: ``[i, m]``, cost of the best option on one processor.
        split: ``[i, m]``, cost of the best split.
        single: ``[i]``, whether a slice is for single tokens; those for prompts have no graph of one token.
        margin_fraction: Fraction by which a split must be cheaper.
        limit: Largest size of a set.
    """

    spec: OpSpec
    layers: int
    tokens: tuple[int, ...]
    weights: Floats
    gpu: Floats
    rows: Sequence[Rows]
    lengths: Sequence[tuple[int, ...]]
    sizes: Ints
    whole: Floats
    split: Floats
    single: NDArray[np.bool_]
    margin_fraction: float
    limit: float

    @classmethod
    def of(
        cls,
        spec: OpSpec,
        layers: int,
        options: Mapping[int, Sequence[Option]],
        weights: Mapping[int, float],
        objective: Objective,
        budget: Budget,
        gpu_cost: Floats | None = None,
    ) -> SliceTable:
        """Return the costs of a group: of its options by length of a pass.

        ``gpu_cost`` bounds an ffn, which the GPU alone does not run.
        """
        options = {tokens: items for tokens, items in options.items() if weights.get(tokens)}
        grid = _Grid.of(list(options.values()), objective)
        grid.accumulate(grid.gpu if gpu_cost is None else gpu_cost, objective.margin_fraction)
        # With a copy for each length, graphs of one token share nothing with those of other lengths.
        apart = budget.memory.copies_by_length and 1 in grid.offered
        slices = [
            (row, mask, lengths)
            for row, mask in np.argwhere(grid.useful())
            for lengths in [tuple(one for place, one in enumerate(grid.offered) if mask >> place & 1)]
            if not apart or 1 not in lengths or lengths == (1,)
        ]
        sizes = [
            layers * spec.graph_bytes(grid.rows[row], lengths, budget.memory) for row, _, lengths in slices
        ]
        limit = math.inf if budget.npu_bytes is None else budget.npu_bytes
        kept = [place for place, size in enumerate(sizes) if size <= limit]
        held = [slices[place] for place in kept]
        at = tuple(np.array([(row, mask) for row, mask, _ in held], np.int64).reshape(-1, 2).T)
        return cls(
            spec,
            layers,
            tuple(options),
            np.array([weights[tokens] for tokens in options]),
            grid.gpu,
            [grid.rows[row] for row, _, _ in held],
            [lengths for _, _, lengths in held],
            np.array([sizes[place] for place in kept], np.int64),
            grid.whole[at],
            grid.split[at],
            np.array([apart and lengths == (1,) for _, _, lengths in held], np.bool_),
            objective.margin_fraction,
            limit,
        )

    def best_sets(self, weights: Floats) -> SliceCombinations:
        """Return the Pareto frontier of sets by size and cost, smallest first, the empty set included."""
        kept = self._prompts(weights)
        # A slice for single tokens changes their cost alone.
        with_single = []
        for place in np.flatnonzero(self.single):
            members = kept.members.copy()
            members[:, 2] = place
            whole = np.minimum(kept.whole, self.whole[place])
            split = np.minimum(kept.split, self.split[place])
            with_single.append(self._sets(members, kept.sizes + self.sizes[place], whole, split, weights))
        joined = SliceCombinations.joined([*with_single, kept])
        return joined.at(array_frontier(joined.sizes, joined.totals, self.limit))

    def _prompts(self, weights: Floats) -> SliceCombinations:
        """Return the sets of up to two slices for prompts that a slice for single tokens may complete."""
        # A slice that serves no counted pass only makes a set larger.
        serves = np.isfinite(np.minimum(self.whole, self.split)[:, weights > 0.0]).any(axis=1)
        own = np.flatnonzero(~self.single & serves)
        none = np.full((1, len(self.tokens)), math.inf)
        whole, split = np.vstack([self.whole, none]), np.vstack([self.split, none])
        sizes = np.append(self.sizes, 0)
        single = np.array([tokens == 1 for tokens in self.tokens]) & self.single.any()
        weights_of_prompts = np.where(single, 0.0, weights)
        # Sets are compared with those that give single tokens the same times.
        ranks = [_ranks(table[:, single]) for table in (whole, split)]
        alone = np.full((1 + len(own), 3), -1)
        alone[1:, 0] = own
        found = []
        for pairs in self._pairs(own, alone):
            one, two = pairs[:, 0], pairs[:, 1]
            on_one = np.minimum(np.minimum(whole[one], whole[two]), self.gpu)
            on_both = np.minimum(split[one], split[two])
            sets = self._sets(pairs, sizes[one] + sizes[two], on_one, on_both, weights)
            classes = [np.minimum(rank[one], rank[two]) for rank in ranks]
            prompts = weighted(sets.cost, weights_of_prompts)
            found.append(sets.at(_undominated(sets.sizes, prompts, classes)))
        joined = SliceCombinations.joined(found)
        ranks = [_ranks(times[:, single]) for times in (joined.whole, joined.split)]
        prompts = weighted(joined.cost, weights_of_prompts)
        return joined.at(_undominated(joined.sizes, prompts, ranks))

    def _pairs(self, own: Ints, alone: Ints) -> Iterator[Ints]:
        """Yield the indices of slices of sets: first of none and of one, then of two with different rows."""
        yield alone
        numbers = {rows: place for place, rows in enumerate(sorted(set(self.rows)))}
        kinds = np.array([numbers[self.rows[place]] for place in own], np.int64)
        counts = np.array([len(self.lengths[place]) for place in own], np.int64)
        first, second = np.triu_indices(len(own), 1)
        fits = (kinds[first] != kinds[second]) & (counts[first] + counts[second] <= MOST_LENGTHS)
        first, second = own[first[fits]], own[second[fits]]
        fits = self.sizes[first] + self.sizes[second] <= self.limit
        first, second = first[fits], second[fits]
        for begin in range(0, len(first), BLOCK_SETS):
            part = slice(begin, begin + BLOCK_SETS)
            yield np.stack([first[part], second[part], np.full_like(first[part], -1)], axis=1)

    def _sets(
        self, members: Ints, sizes: Ints, whole: Floats, split: Floats, weights: Floats
    ) -> SliceCombinations:
        takes_split = np.isfinite(split) & (split <= whole * (1.0 - self.margin_fraction))
        cost = np.where(takes_split, split, whole)
        return SliceCombinations(members, sizes, whole, split, cost, self.layers * weighted(cost, weights))

    def slices_of(self, members: Ints) -> dict[Rows, tuple[int, ...]]:
        """Return the rows of some slices with their lengths."""
        found: dict[Rows, tuple[int, ...]] = {}
        for place in members:
            if place >= 0:
                rows = self.rows[place]
                found[rows] = tuple(sorted({*found.get(rows, ()), *self.lengths[place]}))
        return found


def _ranks(times: Floats) -> Ints:
    """Return the rank of each row of ``[s, 1]`` times; all alike without a column."""
    if not times.shape[1]:
        return np.zeros(len(times), np.int64)
    ranks: Ints = np.unique(times[:, 0], return_inverse=True)[1].reshape(-1)
    return ranks


def _undominated(sizes: Ints, costs: Floats, classes: Sequence[Ints]) -> Ints:
    """Return the indices of the Pareto frontiers of each class, the first of each included."""
    order = np.lexsort((costs, sizes, *classes))
    ordered = costs[order]
    changes = [np.diff(own[order], prepend=-1) != 0 for own in classes]
    begins = np.flatnonzero(np.logical_or.reduce(changes))
    kept = []
    for begin, end in zip(begins, [*begins[1:], len(order)], strict=True):
        part = ordered[begin:end]
        before = np.minimum.accumulate(np.concatenate([[math.inf], part[:-1]]))
        better = part < before
        better[:1] = True
        kept.append(order[begin:end][better])
    return np.sort(np.concatenate(kept)) if kept else np.zeros(0, np.int64)


def weighted(costs: Floats, weights: Floats) -> Floats:
    """Return the weighted sums of costs ``[..., m]``; costs of weight 0 do not count."""
    counted = weights > 0.0
    return np.asarray(costs[..., counted] @ weights[counted])
