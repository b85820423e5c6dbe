"""Decision-tree regression of NPU times (HeteroLLM, section 4.3), by scikit-learn.

The tree predicts the time of a unit of work: a leaf that predicted times would give one time to many sizes.
A shard has a fixed cost beside its work. Half of it is subtracted from the times, and half of it counts as
units of work: the more is subtracted, the more weighs the noise of small shards. The time of a unit is fitted
with monotone constraints, and units rise with work, so that their product rises too.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Annotated, ClassVar, Self

import numpy as np
from msgspec import Meta, Struct

from heterollm.base import Amount, Number, PositiveNumber
from heterollm.profiler.predict.curves import common_floor, digits
from heterollm.profiler.predict.features import FEATURES, RISING, features, work
from heterollm.profiler.records import LinearPoint

Place = Annotated[int, Meta(ge=-1)]


class Tree(Struct, frozen=True, forbid_unknown_fields=True, tag_field="model", tag="tree"):
    """The fitted tree, a value for each node and field; the root comes first.

    Args:
        floor_us: Part of the fixed cost of a pass that was subtracted.
        fixed_units: The rest of the fixed cost, in units of work.
        feature: Place of the compared feature in :data:`FEATURES`; -1 at a leaf.
        threshold: Shards up to it go left, others right.
        left: Place of the left child.
        right: Place of the right child.
        us_per_unit: Time of a unit at a leaf.
    """

    name: ClassVar[str] = "tree"

    floor_us: Amount
    fixed_units: Amount
    feature: list[Annotated[int, Meta(ge=-1, lt=len(FEATURES))]]
    threshold: list[Number]
    left: list[Place]
    right: list[Place]
    us_per_unit: list[PositiveNumber]

    def __post_init__(self) -> None:
        """Check that every walk ends at a leaf."""
        size = len(self.feature)
        if not size or {len(self.threshold), len(self.left), len(self.right), len(self.us_per_unit)} != {
            size
        }:
            raise ValueError("a tree needs nodes, and every field for each of them")
        inner = [place for place, feature in enumerate(self.feature) if feature >= 0]
        for place in inner:
            # Children lie after their parents.
            if not place < min(self.left[place], self.right[place]):
                raise ValueError(f"node {place} of the tree comes after a child of it")
        children = [child for place in inner for child in (self.left[place], self.right[place])]
        if len(set(children)) < len(children) or max(children, default=0) >= size:
            raise ValueError("a node of the tree has two parents, or is missing")

    @classmethod
    def fit(cls, points: Sequence[LinearPoint], times_us: Sequence[float]) -> Self:
        """Fit the fixed cost, and then the tree to the logarithms of the times of a unit."""
        from sklearn.tree import DecisionTreeRegressor

        works = [work(point) for point in points]
        floor_us, rates = common_floor([point.tokens for point in points], works, times_us)
        half_us = digits(floor_us / 2)
        fixed = digits(half_us / statistics.median(rates.values()))
        paces = [
            digits(math.log((time_us - half_us) / (fixed + own)))
            for time_us, own in zip(times_us, works, strict=True)
        ]
        table = np.array([features(point) for point in points], np.float32)
        tree = DecisionTreeRegressor(monotonic_cst=RISING, random_state=0)
        fitted = tree.fit(table, paces).tree_
        inner = fitted.children_left >= 0
        return cls(
            half_us,
            fixed,
            np.where(inner, fitted.feature, -1).tolist(),
            np.where(inner, fitted.threshold, 0.0).tolist(),
            fitted.children_left.tolist(),
            fitted.children_right.tolist(),
            [digits(math.exp(value)) for value in fitted.value[:, 0, 0].tolist()],
        )

    def estimate_us(self, point: LinearPoint) -> float:
        """Return the units of a shard at the time of the leaf that it falls into."""
        values = features(point)
        place, feature = 0, self.feature[0]
        while feature >= 0:
            place = (self.left if values[feature] <= self.threshold[place] else self.right)[place]
            feature = self.feature[place]
        return self.floor_us + self.us_per_unit[place] * (self.fixed_units + values[-1])
