"""Costs of all sets of slices of a group at all lengths, as arrays.

Axes: ``s`` sets, ``i`` slices of a set, ``m`` lengths of passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from heterollm.solver.candidates import Rows

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SliceCost:
    """Least costs of one layer's group at a length with one slice.

    Args:
        whole: Cost where one processor computes all; ``math.inf`` where the slice is not the whole group.
        split: Cost where both processors compute.
    """

    whole: float = math.inf
    split: float = math.inf


NONE: Final = SliceCost()

NO_BETTER: Final = 1e-6
"""Fraction by which a split below the margin counts more than one processor alone."""


@dataclass(frozen=True, slots=True, eq=False)
class SliceSets:
    """Sets of slices of one group.

    Args:
        sets: The slices of each set.
        lengths: The lengths ``m`` in order.
        sizes: ``[s, i]``, bytes of each slice in all layers; 0 where a set has fewer.
        whole: ``[s, m]``, cost in one layer of the best option on one processor.
        split: ``[s, m]``, cost of the best split.
        on_gpu: ``[m]``, whether the GPU alone can compute the group.
    """

    sets: Sequence[tuple[Rows, ...]]
    lengths: tuple[int, ...]
    sizes: Ints
    whole: Floats
    split: Floats
    on_gpu: Flags

    @classmethod
    def of(
        cls,
        costs: Mapping[int, Mapping[Rows, SliceCost]],
        sets: Sequence[tuple[Rows, ...]],
        size_bytes: Callable[[Rows], int],
    ) -> SliceSets:
        """Return sets of a group's slices.

        Args:
            costs: Costs by length and rows; empty rows are the GPU alone.
            sets: The sets.
            size_bytes: Returns the size of a slice in all layers.
        """
        lengths, most = tuple(costs), max(map(len, sets))
        # The GPU's row is first, so that it wins ties; the last row fills sets with fewer slices.
        rows = [(), *sorted({own for held in sets for own in held})]
        places = {own: place for place, own in enumerate(rows)}
        shape = len(rows) + 1, len(lengths)
        whole, split = np.full(shape, math.inf), np.full(shape, math.inf)
        for place, table in enumerate(costs.values()):
            for own in rows:
                item, at = table.get(own, NONE), (places[own], place)
                whole[at], split[at] = item.whole, item.split
        index = np.full((len(sets), 1 + most), len(rows))
        index[:, 0] = 0
        for number, held in enumerate(sets):
            index[number, 1 : 1 + len(held)] = [places[own] for own in held]
        sizes = np.array([0, *(size_bytes(own) for own in rows[1:]), 0], np.int64)
        return cls(
            sets=sets,
            lengths=lengths,
            sizes=sizes[index[:, 1:]],
            whole=whole[index].min(axis=1),
            split=split[index].min(axis=1),
            on_gpu=np.isfinite(whole[0]),
        )

    def at(self, kept: Flags) -> SliceSets:
        """Return the sets at some of the lengths."""
        return SliceSets(
            self.sets,
            tuple(length for length, keep in zip(self.lengths, kept, strict=True) if keep),
            self.sizes,
            self.whole[:, kept],
            self.split[:, kept],
            self.on_gpu[kept],
        )

    @property
    def counts(self) -> Ints:
        """Number of slices of each set, ``[s]``."""
        return np.array([len(held) for held in self.sets], np.int64)

    def best(self, margin_fraction: float) -> tuple[Floats, Floats]:
        """Return cost ``[s, m]`` of the best options, and cost with margin.

        A split below the margin, against one processor with any set of slices, gains nothing: a set must not
        win by splits that keep both processors busy without gain.
        """
        takes_split = np.isfinite(self.split) & (self.split <= self.whole * (1.0 - margin_fraction))
        cost_with_margin = with_margin(self.split, self.whole.min(axis=0), margin_fraction)
        return (
            np.where(takes_split, self.split, self.whole),
            np.where(takes_split, cost_with_margin, self.whole),
        )


def with_margin(split: Floats, whole: Floats, margin_fraction: float) -> Floats:
    """Return costs of splits, raised to that of one processor where they gain less than the margin.

    Args:
        split: Costs of splits.
        whole: Cost of the best option on one processor.
        margin_fraction: Fraction by which a split must be cheaper.
    """
    least = np.where(np.isfinite(whole), whole * (1.0 + NO_BETTER), 0.0)
    return np.where(split <= whole * (1.0 - margin_fraction), split, np.maximum(split, least))


def weighted_sum(costs: Floats, weights: Floats) -> Floats:
    """Return the weighted sum of costs ``[..., m]``; infinite where any cost is, even of weight 0."""
    finite = np.isfinite(costs)
    total: Floats = np.sum(np.where(finite, costs, 0.0) * weights, axis=-1)
    return np.where(finite.all(axis=-1), total, math.inf)


def frontier(sizes: Iterable[int], costs: Iterable[float]) -> list[int]:
    """Return the indices of the Pareto frontier, smallest first: larger ones are cheaper."""
    kept: list[int] = []
    least = math.inf
    for _, cost, place in sorted(
        (size, cost, place) for place, (size, cost) in enumerate(zip(sizes, costs, strict=True))
    ):
        if cost < least:
            kept.append(place)
            least = cost
    return kept


def array_frontier(sizes: Ints, costs: Floats, limit: float | None = None) -> Ints:
    """Return the indices of the Pareto frontier of finite costs within a limit, smallest first."""
    fits = np.flatnonzero(np.isfinite(costs) & (sizes <= (math.inf if limit is None else limit)))
    order = fits[np.lexsort((fits, costs[fits], sizes[fits]))]
    ordered = costs[order]
    before = np.minimum.accumulate(np.concatenate([[math.inf], ordered[:-1]]))
    kept: Ints = order[ordered < before]
    return kept
