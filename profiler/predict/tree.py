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
from typing import ClassVar, Final, Self

import numpy as np
from msgspec import Struct

from heterollm.base import Amount, Number, PositiveNumber
from heterollm.profiler.predict.curves import ARRAY, common_floor, digits, stage, step_end
from heterollm.profiler.records import LinearPoint

FEATURES: Final = ("step", "rounded_tokens", "rounded_rows", "rounded_columns", "work")
"""Names of the features: the tokens rounded up to 4, at most one array; sizes rounded up to 32; and
multiply-adds in units of 32 cubed."""

RISING: Final = (1, 0, 1, 1, 1)
"""Monotone constraint of each feature: 1 where time may not fall; it may fall from one stage to the next."""


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
    feature: list[int]
    threshold: list[Number]
    left: list[int]
    right: list[int]
    us_per_unit: list[PositiveNumber]

    def __post_init__(self) -> None:
        """Check that every walk ends at a leaf: children lie after their parents."""
        size = len(self.feature)
        if not size or any(
            len(own) != size for own in (self.threshold, self.left, self.right, self.us_per_unit)
        ):
            raise ValueError("a tree needs nodes, and every field for each of them")
        for place, feature in enumerate(self.feature):
            children = (self.left[place], self.right[place])
            if not -1 <= feature < len(RISING) or (
                feature >= 0 and not place < min(children) <= max(children) < size
            ):
                raise ValueError(f"node {place} of the tree has no such children or feature")

    @classmethod
    def fit(cls, points: Sequence[LinearPoint], times_us: Sequence[float]) -> Self:
        """Fit the fixed cost, and then the tree to the logarithms of the times of a unit."""
        from sklearn.tree import DecisionTreeRegressor

        table = [features(point) for point in points]
        works = [row[-1] for row in table]
        floor_us, rates = common_floor([point.tokens for point in points], works, times_us)
        half_us = digits(floor_us / 2)
        fixed = digits(half_us / statistics.median(rates.values()))
        paces = [
            digits(math.log((time_us - half_us) / (fixed + own)))
            for time_us, own in zip(times_us, works, strict=True)
        ]
        tree = DecisionTreeRegressor(monotonic_cst=RISING, random_state=0)
        fitted = tree.fit(np.array(table, np.float32), paces).tree_
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


def features(point: LinearPoint) -> tuple[int, ...]:
    """Return the numbers that :data:`FEATURES` names."""
    tokens, rows, columns = stage(point.tokens), stage(point.rows), stage(point.columns)
    step = min(step_end(point.tokens), ARRAY)
    return step, tokens * ARRAY, rows * ARRAY, columns * ARRAY, tokens * rows * columns
