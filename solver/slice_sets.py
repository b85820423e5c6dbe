"""Costs of all sets of slices of a group at all lengths, as arrays.

Axes: ``s`` sets, ``i`` slices of a set, ``m`` lengths of passes. The standard lengths that a slice runs are
bits of an integer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from heterollm.solver.candidates import Rows

__all__ = [
    "Bits",
    "Flags",
    "Floats",
    "SliceCost",
    "SliceSets",
    "frontier",
    "resident_bytes",
    "weighted_sum",
    "with_margin",
]

Floats: TypeAlias = NDArray[np.float64]
Bits: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SliceCost:
    """Least costs of one layer's group at a length with one slice.

    Args:
        whole: Cost where one processor computes all; ``math.inf`` where the slice is not the whole group.
        split: Cost where both processors compute.
        whole_lengths: Lengths that the NPU runs for ``whole``.
        split_lengths: Lengths that the NPU runs for ``split``.
    """

    whole: float = math.inf
    split: float = math.inf
    whole_lengths: tuple[int, ...] = ()
    split_lengths: tuple[int, ...] = ()


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
        whole_runs: ``[s, i, m]``, lengths that the NPU runs for ``whole``.
        split_runs: ``[s, i, m]``, lengths that the NPU runs for ``split``.
        on_gpu: ``[m]``, whether the GPU alone can compute the group.
    """

    sets: Sequence[tuple[Rows, ...]]
    lengths: tuple[int, ...]
    sizes: Bits
    whole: Floats
    split: Floats
    whole_runs: Bits
    split_runs: Bits
    on_gpu: Flags

    @classmethod
    def of(
        cls,
        costs: Mapping[int, Mapping[Rows, SliceCost]],
        sets: Sequence[tuple[Rows, ...]],
        size_bytes: Callable[[Rows], int],
        standard_lengths: Sequence[int],
    ) -> SliceSets:
        """Return sets of a group's slices.

        Args:
            costs: Costs by length and rows; empty rows are the GPU alone.
            sets: The sets.
            size_bytes: Returns the size of a slice in all layers.
            standard_lengths: All lengths that the NPU runs for any of them.
        """
        lengths, most = tuple(costs), max(map(len, sets))
        # The GPU's row is first, so that it wins ties; the last row fills sets with fewer slices.
        rows = [(), *sorted({own for held in sets for own in held})]
        places = {own: place for place, own in enumerate(rows)}
        bits = {length: 1 << place for place, length in enumerate(standard_lengths)}
        shape = len(rows) + 1, len(lengths)
        whole, split = np.full(shape, math.inf), np.full(shape, math.inf)
        whole_runs, split_runs = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for place, table in enumerate(costs.values()):
            for own in rows:
                item, at = table.get(own, NONE), (places[own], place)
                whole[at], split[at] = item.whole, item.split
                whole_runs[at] = sum(bits[length] for length in set(item.whole_lengths))
                split_runs[at] = sum(bits[length] for length in set(item.split_lengths))
        index = np.full((len(sets), 1 + most), len(rows))
        index[:, 0] = 0
        for number, held in enumerate(sets):
            index[number, 1 : 1 + len(held)] = [places[own] for own in held]
        sizes = np.array([0, *(size_bytes(own) for own in rows[1:]), 0], np.int64)
        whole_costs, whole_used = _least(whole, whole_runs, index)
        cut_costs, cut_used = _least(split, split_runs, index)
        return cls(
            sets=sets,
            lengths=lengths,
            sizes=sizes[index[:, 1:]],
            whole=whole_costs,
            split=cut_costs,
            whole_runs=whole_used,
            split_runs=cut_used,
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
            self.whole_runs[:, :, kept],
            self.split_runs[:, :, kept],
            self.on_gpu[kept],
        )

    @property
    def counts(self) -> Bits:
        """Number of slices of each set, ``[s]``."""
        return np.array([len(held) for held in self.sets], np.int64)

    def best(self, margin_fraction: float) -> tuple[Floats, Floats, Bits]:
        """Return cost ``[s, m]`` of the best options, cost with margin, and the lengths ``[s, i, m]`` run.

        A split below the margin, against one processor with any set of slices, gains nothing: a set must not
        win by splits that keep both processors busy without gain.
        """
        takes_split = np.isfinite(self.split) & (self.split <= self.whole * (1.0 - margin_fraction))
        runs = np.where(takes_split[:, None, :], self.split_runs, self.whole_runs)
        cost_with_margin = with_margin(self.split, self.whole.min(axis=0), margin_fraction)
        return (
            np.where(takes_split, self.split, self.whole),
            np.where(takes_split, cost_with_margin, self.whole),
            runs,
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


def resident_bytes(sizes: Bits, runs: Bits, copies_by_length: bool) -> Bits:
    """Return bytes ``[...]`` of slices of sizes ``[..., i]`` that run lengths ``[..., i]``.

    Args:
        sizes: Bytes of each slice.
        runs: Lengths of each slice, as bits.
        copies_by_length: Whether each length of a slice needs its own copy of the weights.
    """
    held: Bits = np.sum(sizes * _count(runs) if copies_by_length else sizes + 0 * runs, axis=-1)
    return held


def _least(costs: Floats, runs: Bits, index: NDArray[Any]) -> tuple[Floats, Bits]:
    """Return the least cost ``[s, m]`` in each set and the lengths ``[s, i, m]`` of its slices."""
    own = costs[index]
    least = np.argmin(own, axis=1)
    places = np.arange(1, index.shape[1])[None, :, None]
    taken = np.where(least[:, None, :] == places, runs[index[:, 1:]], 0)
    return np.take_along_axis(own, least[:, None, :], axis=1)[:, 0, :], taken


def _count(bits: Bits) -> Bits:
    """Return the number of bits that are set in each."""
    left, found = bits.copy(), np.zeros_like(bits)
    while left.any():
        found += left & 1
        left >>= 1
    return found


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
