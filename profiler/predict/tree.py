"""Decision-tree regression of NPU times (HeteroLLM, section 4.3).

The tree predicts the time of an array's worth of work, which order and stage change by up to 8 times on the
emulator, and not the time itself, of which a leaf would be a single constant over many sizes. It is grown
here rather than by a library: a few lines of NumPy, and the same tree on every platform.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Self

import numpy as np
from numpy.typing import NDArray

from heterollm.base import ProfileError
from heterollm.profiler.predict.features import (
    ARRAY,
    FEATURES,
    MONOTONE_FEATURES,
    features,
    stage_tokens,
    work,
)
from heterollm.profiler.predict.json_values import count, mapping, number, positive, sequence, word
from heterollm.profiler.records import LinearPoint

__all__ = ["FreeTree", "Tree"]

DECIMALS: Final = 12
MAX_DEPTH: Final = 12
MIN_LEAF: Final = 2
MIN_GAIN: Final = 1e-4
"""Least fall of the summed squared error, of logarithms, for which a node is split."""

NODE_FIELDS: Final = ("feature", "threshold", "left", "right", "us_per_work")


@dataclass(frozen=True, slots=True)
class Node:
    """A split, or a leaf where ``feature`` is empty.

    Args:
        feature: What is compared.
        threshold: Slices up to it go left, others right.
        left: Place of the left child.
        right: Place of the right child.
        us_per_work: Time of an array's worth of work, at a leaf.
    """

    feature: str
    threshold: float
    left: int
    right: int
    us_per_work: float


@dataclass(frozen=True, slots=True)
class FreeTree:
    """A tree on all features: the more exact fit, but more work may be predicted to take less time.

    Args:
        nodes: The root first, children after their parents.
    """

    name: ClassVar[str] = "free_tree"
    split_on: ClassVar[tuple[str, ...]] = FEATURES

    nodes: tuple[Node, ...]

    @classmethod
    def fit(cls, points: Sequence[LinearPoint], times_us: Sequence[float]) -> Self:
        """Grow the tree by the largest fall of the squared error of logarithms, depth first."""
        places = [FEATURES.index(name) for name in cls.split_on]
        table = np.array([features(point) for point in points])[:, places]
        works = np.array([work(point) for point in points], np.float64)
        # Logarithms and exponentials differ in their last digits between processors: these are dropped.
        paces = [round(math.log(pace), DECIMALS) for pace in np.array(times_us) / works]
        return cls(tuple(_grow(cls.split_on, table, np.array(paces))))

    def estimate_us(self, point: LinearPoint) -> float:
        """Return the work at the pace of the leaf that the slice falls into."""
        values = dict(zip(FEATURES, features(point), strict=True))
        node = self.nodes[0]
        while node.feature:
            node = self.nodes[node.left if values[node.feature] <= node.threshold else node.right]
        return node.us_per_work * work(point)

    def to_dict(self) -> dict[str, Any]:
        """Return what JSON can hold: a list for each field of a node."""
        return {
            "feature": [node.feature for node in self.nodes],
            "threshold": [node.threshold for node in self.nodes],
            "left": [node.left for node in self.nodes],
            "right": [node.right for node in self.nodes],
            "us_per_work": [node.us_per_work for node in self.nodes],
        }

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Return the model of a JSON form; see :class:`heterollm.profiler.predict.time_model.ShapeModel`."""
        named = mapping(data, NODE_FIELDS, cls.name)
        size = len(sequence(named["feature"], "feature"))
        columns = [sequence(named[name], name, size) for name in NODE_FIELDS]
        nodes = [
            Node(
                word(feature, "feature"),
                number(threshold, "threshold"),
                count(left, "left", size),
                count(right, "right", size),
                positive(us_per_work, "us_per_work"),
            )
            for feature, threshold, left, right, us_per_work in zip(*columns, strict=True)
        ]
        for place, node in enumerate(nodes):
            # Children lie after their parents, so every walk ends.
            if node.feature and (node.feature not in cls.split_on or min(node.left, node.right) <= place):
                raise ProfileError(f"{cls.name} is not a tree: node {place} is {node!r:.160}.")
        children = [child for node in nodes if node.feature for child in (node.left, node.right)]
        if len(set(children)) < len(children):
            raise ProfileError(f"{cls.name} is not a tree: a node has two parents.")
        if not nodes:
            raise ProfileError(f"{cls.name} has no nodes.")
        return cls(tuple(nodes))


@dataclass(frozen=True, slots=True)
class Leaf:
    """What the splits above a leaf say of the sizes in it, ``low`` excluded, and its pace."""

    low: dict[str, float]
    high: dict[str, float]
    us_per_work: float


@dataclass(frozen=True, slots=True)
class Tree(FreeTree):
    """A tree on what rises with work, whose predictions rise with work within a stage.

    A slice takes as long as the slowest slice of the same stage, of any leaf, that is no larger in any
    dimension: the least function above the tree that never falls.
    """

    name: ClassVar[str] = "tree"
    split_on: ClassVar[tuple[str, ...]] = MONOTONE_FEATURES

    _leaves: dict[int, list[Leaf]] = field(default_factory=dict, repr=False, compare=False)

    def estimate_us(self, point: LinearPoint) -> float:
        """Return the time of the slowest slice that is no larger."""
        values = dict(zip(FEATURES, features(point), strict=True))
        leaves = self._leaves.get(point.tokens)
        if leaves is None:
            leaves = self._leaves[point.tokens] = self._within_stage(values)
        slowest = 0.0
        for leaf in leaves:
            low, high = leaf.low, leaf.high
            if (
                values["rounded_rows"] > low["rounded_rows"]
                and values["rounded_columns"] > low["rounded_columns"]
            ):
                rows = min(values["rounded_rows"], high["rounded_rows"]) / ARRAY
                columns = min(values["rounded_columns"], high["rounded_columns"]) / ARRAY
                most = min(rows * columns * values["token_tiles"], high["work"])
                if most > low["work"]:
                    slowest = max(slowest, leaf.us_per_work * most)
        return slowest

    def _within_stage(self, values: dict[str, float]) -> list[Leaf]:
        """Return the leaves that hold slices of the same stage with no more tokens."""
        first = stage_tokens(int(values["rounded_tokens"]) - ARRAY + 1)
        return [
            leaf
            for leaf in _leaves_of(self.nodes)
            if leaf.low["rounded_tokens"] < values["rounded_tokens"] <= leaf.high["rounded_tokens"]
            and leaf.low["stage_tokens"] < values["stage_tokens"]
            and first <= leaf.high["stage_tokens"]
        ]


def _leaves_of(nodes: Sequence[Node]) -> list[Leaf]:
    found: list[Leaf] = []
    nowhere = dict.fromkeys(MONOTONE_FEATURES, 0.0)
    everywhere = dict.fromkeys(MONOTONE_FEATURES, math.inf)
    todo = [(nodes[0], nowhere, everywhere)]
    while todo:
        node, low, high = todo.pop()
        if not node.feature:
            found.append(Leaf(low, high, node.us_per_work))
            continue
        name = node.feature
        todo.append((nodes[node.left], low, {**high, name: min(high[name], node.threshold)}))
        todo.append((nodes[node.right], {**low, name: max(low[name], node.threshold)}, high))
    return found


def _grow(names: Sequence[str], table: NDArray[np.float64], targets: NDArray[np.float64]) -> list[Node]:
    nodes: list[Node | None] = [None]
    todo = [(0, np.arange(len(targets)), 0)]
    while todo:
        place, samples, depth = todo.pop()
        split = _best_split(table[samples], targets[samples]) if depth < MAX_DEPTH else None
        pace = float(f"{math.exp(float(targets[samples].mean())):.{DECIMALS}g}")
        if split is None:
            nodes[place] = Node("", 0.0, -1, -1, pace)
            continue
        column, threshold = split
        nodes[place] = Node(names[column], threshold, len(nodes), len(nodes) + 1, pace)
        goes_left = table[samples, column] <= threshold
        todo += [
            (len(nodes), samples[goes_left], depth + 1),
            (len(nodes) + 1, samples[~goes_left], depth + 1),
        ]
        nodes += [None, None]
    return [node for node in nodes if node is not None]


def _best_split(table: NDArray[np.float64], targets: NDArray[np.float64]) -> tuple[int, float] | None:
    """Return the column and threshold after which the squared error is least, if it is worth a split."""
    count = len(targets)
    best_gain, best = MIN_GAIN, None
    centred = targets - targets.mean()
    for column in range(table.shape[1]):
        order = np.argsort(table[:, column], kind="stable")
        values, sums = table[order, column], np.cumsum(centred[order])
        lefts = np.arange(1, count)
        # The error falls by the squared sum of each side over its size, with the mean taken off before.
        gains = sums[:-1] ** 2 / lefts + (sums[-1] - sums[:-1]) ** 2 / (count - lefts)
        legal = (values[1:] > values[:-1]) & (lefts >= MIN_LEAF) & (count - lefts >= MIN_LEAF)
        if not legal.any():
            continue
        gains = np.where(legal, gains, -np.inf)
        place = int(np.argmax(gains))
        if gains[place] > best_gain * (1.0 + 1e-9):
            best_gain, best = float(gains[place]), (column, float(values[place] + values[place + 1]) / 2.0)
    return best
