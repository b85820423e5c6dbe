"""Experts of a mixture on both processors: which of them the NPU holds, in which graphs, at which capacity.

The NPU runs static graphs: a group of experts, each with as many rows as the capacity, filled or not
(NPUMoE, section 4). At the same time the GPU computes the other experts, and the tokens beyond a capacity.
How many tokens an expert gets differs from chunk to chunk. So a placement is judged by its mean time over
the loads of calibrated chunks: the mean of the slower processor's time, which the mean load does not give.

Only the number of experts at each capacity matters to the NPU's time, and only the capacity of each expert to
the GPU's. So the search chooses a capacity, or none, for each expert, and then packs equal ones into graphs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from heterollm.base import PlanError
from heterollm.solver.experts.placements import ExpertGroup, ExpertsPlacement, Overflow
from heterollm.solver.experts.prices import ExpertPrices
from heterollm.solver.slice_sets import Floats, Ints, array_frontier

BLOCKS: Final = 12
"""Most blocks of experts of similar popularity that get one capacity each, before single experts move."""

EXHAUSTED: Final = 4096
"""Most choices of a capacity for each expert of a layer that are all tried."""

IMPOSSIBLE_US: Final = 1e12
"""Time of what cannot run: finite, so that it can be subtracted again."""

BUDGET_UNITS: Final = 8192
"""Parts of a budget by which sizes count, rounded up."""


class LayerExperts:
    """The search for one layer.

    A *level* is the place of a capacity among all, plus 1; level 0 is the GPU.

    Args:
        loads: ``[chunks, experts]``, tokens of each expert in calibrated chunks.
        prices: Times and sizes.
        overflow: Fate of tokens beyond a capacity. ``drop`` is placed as ``gpu``: nothing else would hold the
            solver from dropping all.
        packings: Packings in graphs by number of experts and capacity, which layers share.

    Attributes:
        sizes: Sizes in bytes of the placements on the Pareto frontier of the search, ascending.
        costs: Their mean times, descending.

    Raises:
        PlanError: The loads have no chunk or expert, or more tokens than there are times for.
    """

    def __init__(
        self,
        loads: Ints,
        prices: ExpertPrices,
        overflow: Overflow = "gpu",
        packings: dict[tuple[int, int], tuple[Floats, Ints]] | None = None,
    ) -> None:
        if loads.ndim != 2 or not loads.size or loads.min() < 0 or loads.max() >= len(prices.gpu_us):
            raise PlanError(
                f"Loads of experts {list(loads.shape)} need chunks, experts, and at most "
                f"{len(prices.gpu_us) - 1} tokens of an expert.",
                fix="Calibrate with chunks of the length that the plan is for.",
            )
        self._loads, self._prices, self._overflow = loads, prices, overflow
        self.experts = loads.shape[1]
        # A capacity past the one that holds the largest load gains nothing.
        enough = next((place for place, own in enumerate(prices.capacities) if own >= loads.max()), None)
        self.capacities = prices.capacities[: None if enough is None else enough + 1]
        over = np.stack([np.maximum(loads - own, 0).T for own in (0, *self.capacities)], axis=1)
        self._gpu_us: Floats = prices.gpu_us[over]  # [experts, levels, chunks]
        if overflow == "pad":
            self._gpu_us[:, 1:][over[:, 1:] > 0] = IMPOSSIBLE_US
        known = {} if packings is None else packings
        sizes_packed = [(self.experts, own) for own in self.capacities]
        for key in sizes_packed:
            if key not in known:
                known[key] = _packed(*key, prices)
        self._chunk_us: Floats = self._gpu_us.mean(axis=2)
        packed = [known[key] for key in sizes_packed]
        self._npu_us = np.stack([np.zeros(self.experts + 1), *(times for times, _ in packed)])
        self._last_graphs = [last for _, last in packed]
        self._bytes = np.array([0, *(prices.graph_bytes(1, own) for own in self.capacities)], np.int64)
        self._ranked = np.argsort(-loads.sum(axis=0), kind="stable")
        blocks, levels = self._candidates()
        sizes, costs = self._judge(blocks, levels)
        kept = array_frontier(sizes, costs)
        self.sizes, self.costs = sizes[kept], costs[kept]
        self._kept = np.empty((len(kept), self.experts), np.int64)
        for number, block in enumerate(blocks):
            self._kept[:, block] = levels[kept, number : number + 1]

    def best(self, most_bytes: int | None = None) -> ExpertsPlacement:
        """Return the best placement found whose graphs take at most so many bytes; None for any."""
        limit = math.inf if most_bytes is None else most_bytes
        place = int(np.searchsorted(self.sizes, limit, side="right")) - 1
        return self._placement(*self._improved(self._kept[place], limit))

    def _candidates(self) -> tuple[list[Ints], Ints]:
        """Return blocks of experts, and the levels ``[n, blocks]`` to try: all, or falling by popularity."""
        levels = len(self.capacities) + 1
        every = levels**self.experts <= EXHAUSTED
        blocks = np.array_split(self._ranked, self.experts if every else min(BLOCKS, self.experts))
        return blocks, _choices(levels, len(blocks), falling=not every)

    def _judge(self, blocks: Sequence[Ints], levels: Ints) -> tuple[Ints, Floats]:
        """Return the sizes and mean times of the levels of blocks."""
        gpu_us = np.zeros((len(levels), len(self._loads)))
        counts = np.zeros((len(levels), len(self._bytes)), np.int64)
        for number, block in enumerate(blocks):
            gpu_us += self._gpu_us[block].sum(axis=0)[levels[:, number]]
            counts[np.arange(len(levels)), levels[:, number]] += len(block)
        npu_us = self._npu_us[np.arange(len(self._bytes)), counts].sum(axis=1)
        return counts @ self._bytes, self._mean_us(gpu_us, npu_us)

    def _mean_us(self, gpu_us: Floats, npu_us: Floats) -> Floats:
        """Return mean times, from the GPU's ``[..., chunks]`` and the NPU's ``[...]``."""
        npu_us = npu_us + np.where(npu_us > 0, self._prices.hand_over_us, 0.0)
        mean: Floats = self._prices.joint_us(gpu_us, npu_us[..., None]).mean(axis=-1)
        return self._prices.gpu_base_us + mean

    def _improved(self, levels: Ints, limit: float) -> tuple[Ints, float]:
        """Return levels and their mean time, after moves of single experts, or else exchanges of two.

        Each is the best of its kind; the search ends where none gains.
        """
        everyone, kinds = np.arange(self.experts), np.arange(len(self._bytes))
        while True:
            own = self._gpu_us[everyone, levels]
            gpu_us = own.sum(axis=0)
            counts = np.bincount(levels, minlength=len(kinds))
            times = self._npu_us[kinds, counts]
            less = (self._npu_us[kinds, np.maximum(counts - 1, 0)] - times)[levels, None]
            more = self._npu_us[kinds, np.minimum(counts + 1, self.experts)] - times
            npu_us, size = times.sum(), int(counts @ self._bytes)
            now_us = float(self._mean_us(gpu_us, npu_us))
            least_us = now_us * (1 - 1e-9)
            moved_us = self._mean_us(gpu_us + self._gpu_us - own[:, None], npu_us + less + more)
            moved_us[everyone, levels] = math.inf
            moved_us[size + self._bytes - self._bytes[levels, None] > limit] = math.inf
            expert, level = np.unravel_index(moved_us.argmin(), moved_us.shape)
            if moved_us[expert, level] < least_us:
                levels = levels.copy()
                levels[expert] = level
                continue
            # The mean over chunks is at least the time of the mean chunk, which rules out most exchanges.
            change = self._chunk_us[:, levels] - self._chunk_us[everyone, levels][:, None]
            bound_us = self._mean_us((gpu_us.mean() + change + change.T)[..., None], npu_us)
            first, second = np.nonzero((levels[:, None] < levels) & (bound_us < least_us))
            if not first.size:
                return levels, now_us
            taken = self._gpu_us[first, levels[second]] + self._gpu_us[second, levels[first]]
            swapped_us = self._mean_us(gpu_us + taken - own[first] - own[second], npu_us)
            pair = swapped_us.argmin()
            if swapped_us[pair] >= least_us:
                return levels, now_us
            levels = levels.copy()
            exchanged = [first[pair], second[pair]]
            levels[exchanged] = levels[exchanged[::-1]]

    def _placement(self, levels: Ints, mean_us: float) -> ExpertsPlacement:
        """Return the placement of levels; large graphs take the popular experts of a capacity."""
        groups = []
        for level in range(len(self.capacities), 0, -1):
            left = [int(expert) for expert in self._ranked if levels[expert] == level]
            graphs, count = list[int](), len(left)
            while count:
                graphs.append(int(self._last_graphs[level - 1][count]))
                count -= graphs[-1]
            for size in sorted(graphs, reverse=True):
                groups.append(ExpertGroup(tuple(left[:size]), self.capacities[level - 1]))
                left = left[size:]
        return ExpertsPlacement(tuple(groups), self._overflow, self._prices.form, mean_us)


def place_experts(
    loads: Sequence[Ints], prices: ExpertPrices, most_bytes: int | None = None, overflow: Overflow = "gpu"
) -> tuple[ExpertsPlacement, ...]:
    """Return the placement of each layer's experts, within the bytes that all graphs together may take.

    A layer's share of the budget is the best by its Pareto frontier, with sizes rounded up to a
    :data:`BUDGET_UNITS`-th of the budget. Up to :data:`EXHAUSTED` choices a layer is solved exactly. Else the
    search begins at the best capacities that fall from block to block of experts, by popularity.

    Args:
        loads: By layer, ``[chunks, experts]``, tokens of each expert in calibrated chunks.
        prices: Times and sizes.
        most_bytes: The budget; None for any.
        overflow: Fate of tokens beyond a capacity.

    Raises:
        PlanError: As :class:`LayerExperts`.
    """
    packings: dict[tuple[int, int], tuple[Floats, Ints]] = {}
    layers = [LayerExperts(own, prices, overflow, packings) for own in loads]
    if most_bytes is None:
        return tuple(layer.best() for layer in layers)
    shares = _shares([(layer.sizes, layer.costs) for layer in layers], most_bytes)
    return tuple(layer.best(share) for layer, share in zip(layers, shares, strict=True))


def _shares(frontiers: Sequence[tuple[Ints, Floats]], most_bytes: int) -> list[int]:
    """Return each layer's bytes, so that the sum of the costs is least."""
    unit = max(1, -(-most_bytes // BUDGET_UNITS))
    units = most_bytes // unit
    least, choices = np.zeros(units + 1), []
    for sizes, costs in frontiers:
        table = np.full((len(sizes), units + 1), math.inf)
        for place, size in enumerate(-(-sizes // unit)):
            if size <= units:
                table[place, size:] = least[: units + 1 - size] + costs[place]
        choices.append(table.argmin(axis=0))
        least = table.min(axis=0)
    shares = list[int]()
    for (sizes, _), choice in zip(reversed(frontiers), reversed(choices), strict=True):
        shares.append(int(sizes[choice[units]]))
        units -= -(-shares[-1] // unit)
    return shares[::-1]


@functools.lru_cache(maxsize=8)
def _choices(levels: int, blocks: int, *, falling: bool) -> Ints:
    """Return all choices of a level for each block, ``[n, blocks]``, or those that fall block by block."""
    every = range(levels - 1, -1, -1)
    if falling:
        return np.array(list(itertools.combinations_with_replacement(every, blocks)), np.int64)
    return np.array(list(itertools.product(every, repeat=blocks)), np.int64)


def _packed(experts: int, capacity: int, prices: ExpertPrices) -> tuple[Floats, Ints]:
    """Return the least time of 0 to all experts at a capacity in graphs, and the size of the last graph."""
    most = prices.most_experts(experts)
    graph_us = np.array([min(prices.npu_us(size, capacity), IMPOSSIBLE_US) for size in range(1, most + 1)])
    times, last = np.zeros(experts + 1), np.zeros(experts + 1, np.int64)
    for count in range(1, experts + 1):
        tried = graph_us[:count] + times[count - 1 :: -1][: len(graph_us)]
        last[count] = tried.argmin() + 1 if tried.size else 1
        times[count] = tried.min(initial=IMPOSSIBLE_US * count)
    return times, last
