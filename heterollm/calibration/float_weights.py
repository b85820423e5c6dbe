"""The values of quantised weights, which each window of a calibration reads again."""

from __future__ import annotations

from typing import Final

import numpy as np

from heterollm.calibration.observer import Floats
from heterollm.engine import available_bytes
from heterollm.kernels.formats import LinearWeight, QuantizedTensor
from heterollm.kernels.ops import Group, OpSpec
from heterollm.model import ModelWeights

KEPT_BYTES: Final = 1 << 30
FREE_FRACTION: Final = 0.25
"""Most of the free memory that kept values take."""


class FloatWeights:
    """Float weights of groups of linears. The first ones that fit into a limit are kept.

    Args:
        weights: The model's weights.
        kept_bytes: The limit; by default 1 GiB, and at most a quarter of the free memory.
    """

    def __init__(self, weights: ModelWeights, kept_bytes: int | None = None) -> None:
        if kept_bytes is None:
            kept_bytes = min(KEPT_BYTES, int(FREE_FRACTION * (available_bytes() or KEPT_BYTES)))
        self._weights = weights
        self._left_bytes = kept_bytes
        self._kept: dict[tuple[int, Group], Floats] = {}

    def of(self, spec: OpSpec) -> Floats:
        """Return the values of a group's weight ``[n, k]``."""
        key = spec.layer, spec.group
        if key in self._kept:
            return self._kept[key]
        made = np.concatenate([as_floats(member) for member in self._weights.linear(*key)])
        # Windows read groups in the same order, so that dropping the oldest would keep none.
        if made.nbytes <= self._left_bytes:
            self._left_bytes -= made.nbytes
            self._kept[key] = made
        return made


def as_floats(weight: LinearWeight) -> Floats:
    """Return a weight's values."""
    return weight.dequantize() if isinstance(weight, QuantizedTensor) else weight.astype(np.float32)
