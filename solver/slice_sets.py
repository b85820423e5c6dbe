"""Every set of slices of a group at once: what each makes possible at every length, as arrays.

Axes: ``s`` counts sets, ``i`` the slices of a set, ``m`` the lengths of passes. Which of the NPU's standard
lengths a slice runs is a bit for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from heterollm.solver.candidates import Rows

__all__ = ["Bits", "Flags", "Floats", "SliceCost", "SliceSets", "frontier", "held_bytes", "weighed", "worth"]

Floats: TypeAlias = NDArray[np.float64]
Bits: TypeAlias = NDArray[np.int64]
Flags: TypeAlias = NDArray[np.bool_]


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


NONE: Final = SliceCost()

NO_BETTER: Final = 1e-6
"""By how much a cut that gains too little counts more than the whole."""


@dataclass(frozen=True, slots=True, eq=False)
class SliceSets:
    """Sets of slices of one group.

    Args:
        sets: The slices of each set.
        lengths: The lengths ``m`` in order.
        sizes: ``[s, i]``, bytes of each slice in all layers; 0 where a set has fewer.
        whole: ``[s, m]``, cost in one layer of the best placement on one part.
        cut: ``[s, m]``, cost of the best cut.
        whole_runs: ``[s, i, m]``, lengths that the NPU runs for ``whole``.
        cut_runs: ``[s, i, m]``, lengths that it runs for ``cut``.
        on_gpu: ``[m]``, whether the GPU alone can compute the group.
    """

    sets: Sequence[tuple[Rows, ...]]
    lengths: tuple[int, ...]
    sizes: Bits
    whole: Floats
    cut: Floats
    whole_runs: Bits
    cut_runs: Bits
    on_gpu: Flags

    @classmethod
    def of(
        cls,
        costs: Mapping[int, Mapping[Rows, SliceCost]],
        sets: Sequence[tuple[Rows, ...]],
        size_bytes: Callable[[Rows], int],
        standard_lengths: Sequence[int],
    ) -> SliceSets:
        """Return some sets of a group's slices.

        Args:
            costs: By length and rows; the empty rows are the GPU's.
            sets: The sets.
            size_bytes: Returns the size of a slice in all layers.
            standard_lengths: Every length that the NPU runs for any of them.
        """
        lengths, most = tuple(costs), max(map(len, sets))
        # The GPU's row is first, so that it is taken where a slice is no better; the last one is nobody's.
        rows = [(), *sorted({own for held in sets for own in held})]
        places = {own: place for place, own in enumerate(rows)}
        bits = {length: 1 << place for place, length in enumerate(standard_lengths)}
        shape = len(rows) + 1, len(lengths)
        whole, cut = np.full(shape, math.inf), np.full(shape, math.inf)
        whole_runs, cut_runs = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        for place, table in enumerate(costs.values()):
            for own in rows:
                item, at = table.get(own, NONE), (places[own], place)
                whole[at], cut[at] = item.whole, item.cut
                whole_runs[at] = sum(bits[length] for length in set(item.whole_lengths))
                cut_runs[at] = sum(bits[length] for length in set(item.cut_lengths))
        index = np.full((len(sets), 1 + most), len(rows))
        index[:, 0] = 0
        for number, held in enumerate(sets):
            index[number, 1 : 1 + len(held)] = [places[own] for own in held]
        sizes = np.array([0, *(size_bytes(own) for own in rows[1:]), 0], np.int64)
        whole_costs, whole_used = _least(whole, whole_runs, index)
        cut_costs, cut_used = _least(cut, cut_runs, index)
        return cls(
            sets=sets,
            lengths=lengths,
            sizes=sizes[index[:, 1:]],
            whole=whole_costs,
            cut=cut_costs,
            whole_runs=whole_used,
            cut_runs=cut_used,
            on_gpu=np.isfinite(whole[0]),
        )

    def at(self, kept: Flags) -> SliceSets:
        """Return the same sets at some of the lengths only."""
        return SliceSets(
            self.sets,
            tuple(length for length, keep in zip(self.lengths, kept, strict=True) if keep),
            self.sizes,
            self.whole[:, kept],
            self.cut[:, kept],
            self.whole_runs[:, :, kept],
            self.cut_runs[:, :, kept],
            self.on_gpu[kept],
        )

    @property
    def counts(self) -> Bits:
        """How many slices each set has, ``[s]``."""
        return np.array([len(held) for held in self.sets], np.int64)

    def best(self, margin_fraction: float) -> tuple[Floats, Floats, Bits]:
        """Return what is taken: its cost ``[s, m]``, what that counts and the lengths ``[s, i, m]`` run.

        A cut that does not beat the best whole placement of any set by the margin counts as no better: what
        is held must not decide that both parts work for next to nothing.
        """
        takes_cut = np.isfinite(self.cut) & (self.cut <= self.whole * (1.0 - margin_fraction))
        runs = np.where(takes_cut[:, None, :], self.cut_runs, self.whole_runs)
        counted = worth(self.cut, self.whole.min(axis=0), margin_fraction)
        return (
            np.where(takes_cut, self.cut, self.whole),
            np.where(takes_cut, counted, self.whole),
            runs,
        )


def worth(cut: Floats, whole: Floats, margin_fraction: float) -> Floats:
    """Return costs of cuts, those that gain less than the margin as no better than the whole.

    Args:
        cut: Costs of cuts.
        whole: Cost of the best placement on one part.
        margin_fraction: What a cut must gain.
    """
    least = np.where(np.isfinite(whole), whole * (1.0 + NO_BETTER), 0.0)
    return np.where(cut <= whole * (1.0 - margin_fraction), cut, np.maximum(cut, least))


def held_bytes(sizes: Bits, runs: Bits, copies_by_length: bool) -> Bits:
    """Return the bytes ``[...]`` that slices of sizes ``[..., i]`` take when they run lengths ``[..., i]``.

    Args:
        sizes: Bytes of each slice.
        runs: Lengths that each runs.
        copies_by_length: Whether every length of a slice holds weights of its own.
    """
    held: Bits = np.sum(sizes * _count(runs) if copies_by_length else sizes + 0 * runs, axis=-1)
    return held


def _least(costs: Floats, runs: Bits, index: NDArray[Any]) -> tuple[Floats, Bits]:
    """Return the least cost ``[s, m]`` in each set and the lengths ``[s, i, m]`` that they run for it."""
    own = costs[index]
    least = np.argmin(own, axis=1)
    places = np.arange(1, index.shape[1])[None, :, None]
    taken = np.where(least[:, None, :] == places, runs[index[:, 1:]], 0)
    return np.take_along_axis(own, least[:, None, :], axis=1)[:, 0, :], taken


def _count(bits: Bits) -> Bits:
    """Return how many bits are set in each."""
    left, found = bits.copy(), np.zeros_like(bits)
    while left.any():
        found += left & 1
        left >>= 1
    return found


def weighed(costs: Floats, weights: Floats) -> Floats:
    """Return costs ``[..., m]`` added up by weights; infinite where one of any weight is."""
    finite = np.isfinite(costs)
    total: Floats = np.sum(np.where(finite, costs, 0.0) * weights, axis=-1)
    return np.where(finite.all(axis=-1), total, math.inf)


def frontier(sizes: Iterable[int], costs: Iterable[float]) -> list[int]:
    """Return the places of what may be worth its size, smallest first: larger ones are cheaper."""
    kept: list[int] = []
    least = math.inf
    for _, cost, place in sorted(
        (size, cost, place) for place, (size, cost) in enumerate(zip(sizes, costs, strict=True))
    ):
        if cost < least:
            kept.append(place)
            least = cost
    return kept
