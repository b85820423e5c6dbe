"""The choice of resident slices under a budget for graphs: rows and lengths in one decision.

Where every length has its own copy of the weights, or its own input and output, memory decides which lengths
to build as well as which rows. The search covers, for each group, one slice for prompts with any lengths or
two with at most :data:`MOST_LENGTHS` together, and one slice for single tokens. Passes may be padded to a
longer graph or run as several shorter ones. Among these sets the search is exact: it finds the Pareto
frontier of size and cost of each group, and combines the frontiers. For a feed-forward network with two paths
it combines :data:`MOST_OF_A_PATH` sets of each group, for a few divisions of the lengths between the paths.
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
from heterollm.solver.slices import OVER_CAP, Budget, Slices

MOST_OF_A_PATH: Final = 24
"""Sets of one group to combine for one division of the lengths between the paths of an ffn."""

MOST_LENGTHS: Final = 4
"""Lengths of two slices together; one slice may have any number."""

MOST_JOINED: Final = 3000
"""Points of a joint frontier; of more, the search keeps those that differ by :data:`THINNED_FRACTION`."""

THINNED_FRACTION: Final = 1e-4
"""Fraction of the cost that thinning a joint frontier may lose."""

BLOCK_SETS: Final = 1 << 16
"""Pairs of slices to evaluate at a time, which bounds the memory of the search."""

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
        table = _Table.of(self, budget)
        return table.named(table.best_sets(table.weights))


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
        first, second = _Table.of(self.gate_up, budget), _Table.of(self.down, budget)
        between = np.array([self.activation[tokens] for tokens in first.tokens])
        both = first.gpu + between + second.gpu
        third = _Table.of(self.ffn, budget, both)
        sizes: list[Ints] = []
        costs: list[Floats] = []
        places: list[tuple[tuple[_Sets, int], ...]] = []
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

    def _combined(self, parts: Sequence[_Sets], between: Floats, weights: Floats) -> tuple[Ints, Floats]:
        """Return sizes and costs ``[a, b, c]`` of all combinations of sets of the three operators."""
        gate_up, down, ffn = parts
        margin = 1.0 - self.ffn.objective.margin_fraction
        whole = (gate_up.whole + between)[:, None, None] + down.whole[None, :, None]
        pair = (gate_up.cost + between)[:, None, None] + down.cost[None, :, None]
        # The same decision as in heterollm.solver.chain.
        takes_split = (ffn.split <= np.minimum(whole, ffn.whole) * margin) & (ffn.split < ffn.whole)
        own = np.where(takes_split, ffn.split, ffn.whole)
        costs = self.gate_up.layers * _weighted(np.minimum(pair, own), weights)
        return gate_up.sizes[:, None, None] + down.sizes[None, :, None] + ffn.sizes, costs


@dataclass(frozen=True, slots=True, eq=False)
class _Sets:
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

    def at(self, places: Sequence[int] | Ints) -> _Sets:
        """Return some of the sets."""
        return _Sets(
            self.members[places],
            self.sizes[places],
            self.whole[places],
            self.split[places],
            self.cost[places],
            self.totals[places],
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
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
    def of(cls, group: GroupPacking, budget: Budget, gpu_cost: Floats | None = None) -> _Table:
        """Return the costs of a group; ``gpu_cost`` bounds an ffn, which the GPU alone does not run."""
        spec, objective = group.spec, group.objective
        options = {tokens: items for tokens, items in group.options.items() if group.weights.get(tokens)}
        used = {item.placement.npu_lengths for items in options.values() for item in items}
        offered = sorted({length for lengths in used for length in lengths})
        rows = sorted({item.placement.npu_rows for items in options.values() for item in items} - {()})
        bits = {length: 1 << place for place, length in enumerate(offered)}
        masks_of = {lengths: sum(bits[length] for length in set(lengths)) for lengths in used}
        numbers = {own: place for place, own in enumerate(rows)}
        shape = len(rows), 1 << len(offered), len(options)
        whole, split = np.full(shape, math.inf), np.full(shape, math.inf)
        gpu = np.full(len(options), math.inf)
        for place, items in enumerate(options.values()):
            for item in items:
                cost = item.cost * (1.0 if objective.allows(item.gpu_us, item.time_us) else OVER_CAP)
                own = item.placement.npu_rows
                if not own:
                    gpu[place] = min(gpu[place], cost)
                    continue
                at = numbers[own], masks_of[item.placement.npu_lengths], place
                table = split if item.is_split else whole
                if cost < table[at]:
                    table[at] = cost
        margin = objective.margin_fraction
        bound = gpu if gpu_cost is None else gpu_cost
        whole[whole >= bound] = math.inf
        split[split > bound * (1.0 - margin)] = math.inf
        masks = np.arange(shape[1])
        for length in offered:
            have = masks[masks & bits[length] != 0]
            for table in (whole, split):
                table[:, have] = np.minimum(table[:, have], table[:, have ^ bits[length]])
        useful = np.broadcast_to(masks > 0, shape[:2]).copy()
        for length in offered:
            # Every length of a slice must lower some cost.
            have = masks[masks & bits[length] != 0]
            without = have ^ bits[length]
            useful[:, have] &= (whole[:, have] < whole[:, without]).any(axis=-1) | (
                split[:, have] < split[:, without]
            ).any(axis=-1)
        # With a copy for each length, graphs of one token share nothing with those of other lengths.
        apart = budget.memory.copies_by_length and 1 in bits
        if apart:
            useful &= (masks == bits[1]) | (masks & bits[1] == 0)
        places = np.argwhere(useful)
        lengths = [tuple(length for length in offered if mask & bits[length]) for mask in places[:, 1]]
        sizes = [
            group.layers * spec.graph_bytes(rows[number], own, budget.memory)
            for number, own in zip(places[:, 0], lengths, strict=True)
        ]
        limit = math.inf if budget.npu_bytes is None else budget.npu_bytes
        kept = [place for place, size in enumerate(sizes) if size <= limit]
        chosen = places[kept, 0], places[kept, 1]
        return cls(
            spec,
            group.layers,
            tuple(options),
            np.array([group.weights[tokens] for tokens in options]),
            gpu,
            [rows[number] for number in chosen[0]],
            [lengths[place] for place in kept],
            np.array([sizes[place] for place in kept], np.int64),
            whole[chosen],
            split[chosen],
            np.array([apart and lengths[place] == (1,) for place in kept], np.bool_),
            margin,
            limit,
        )

    def best_sets(self, weights: Floats) -> _Sets:
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
        joined = _joined([*with_single, kept])
        return joined.at(array_frontier(joined.sizes, joined.totals, self.limit))

    def _prompts(self, weights: Floats) -> _Sets:
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
            prompts = _weighted(sets.cost, weights_of_prompts)
            found.append(sets.at(_undominated(sets.sizes, prompts, classes)))
        joined = _joined(found)
        ranks = [_ranks(times[:, single]) for times in (joined.whole, joined.split)]
        prompts = _weighted(joined.cost, weights_of_prompts)
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

    def _sets(self, members: Ints, sizes: Ints, whole: Floats, split: Floats, weights: Floats) -> _Sets:
        takes_split = np.isfinite(split) & (split <= whole * (1.0 - self.margin_fraction))
        cost = np.where(takes_split, split, whole)
        return _Sets(members, sizes, whole, split, cost, self.layers * _weighted(cost, weights))

    def named(self, sets: _Sets) -> Frontier:
        """Return sets of finite cost with their rows and lengths."""
        sets = sets.at(np.flatnonzero(np.isfinite(sets.totals)))
        held = [{self.spec.place: self.slices_of(members)} for members in sets.members]
        return Frontier(sets.sizes, sets.totals, held)

    def slices_of(self, members: Ints) -> dict[Rows, tuple[int, ...]]:
        """Return the rows of some slices with their lengths."""
        found: dict[Rows, tuple[int, ...]] = {}
        for place in members:
            if place >= 0:
                rows = self.rows[place]
                found[rows] = tuple(sorted({*found.get(rows, ()), *self.lengths[place]}))
        return found


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


def _apart(kept: Ints, costs: Floats) -> Ints:
    """Return points of a frontier whose costs differ by a fraction, the first and the last included."""
    steps = np.floor(-np.log(costs) / THINNED_FRACTION)
    # The smallest of each step, and the cheapest of all.
    first = np.flatnonzero(np.diff(steps, prepend=math.inf))
    apart: Ints = kept[np.unique(np.append(first, len(kept) - 1))]
    return apart


def _thinned(sets: _Sets) -> _Sets:
    """Return at most :data:`MOST_OF_A_PATH` sets of a frontier, evenly spaced by cost, both ends included."""
    if len(sets.sizes) <= MOST_OF_A_PATH:
        return sets
    steps = np.linspace(sets.totals[0], sets.totals[-1], MOST_OF_A_PATH)
    return sets.at(np.unique(np.searchsorted(-sets.totals, -steps)))


def _joined(parts: Sequence[_Sets]) -> _Sets:
    return _Sets(
        np.concatenate([part.members for part in parts]),
        np.concatenate([part.sizes for part in parts]),
        np.concatenate([part.whole for part in parts]),
        np.concatenate([part.split for part in parts]),
        np.concatenate([part.cost for part in parts]),
        np.concatenate([part.totals for part in parts]),
    )


def _divisions(gate_up: _Table, down: _Table, ffn: _Table, between: Floats) -> Iterator[NDArray[np.bool_]]:
    """Yield lengths for the ffn: none, decode, those where it can be cheaper, prompts, all."""

    def best(table: _Table) -> Floats:
        least: Floats = np.vstack([table.gpu, table.whole, table.split]).min(axis=0)
        return least

    better = best(ffn) < best(gate_up) + between + best(down)
    decode = np.array([tokens == 1 for tokens in gate_up.tokens])
    seen = set()
    for found in (np.zeros_like(better), decode, better, ~decode, np.ones_like(better)):
        if found.tobytes() not in seen:
            seen.add(found.tobytes())
            yield found


def _weighted(costs: Floats, weights: Floats) -> Floats:
    """Return the weighted sums of costs ``[..., m]``; costs of weight 0 do not count."""
    counted = weights > 0.0
    return np.asarray(costs[..., counted] @ weights[counted])
