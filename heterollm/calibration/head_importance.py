"""Measures the importance of heads and layers: the rise of the loss without them (shadowAttn)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec import structs

from heterollm.base import Progress
from heterollm.calibration.float_weights import as_floats
from heterollm.calibration.head_records import HeadCalibration
from heterollm.calibration.loss import LossMeter
from heterollm.calibration.observer import Floats, Reader
from heterollm.kernels.ops import Group, OpSpec
from heterollm.model import ModelWeights

STAGE = "Removing heads"


def measure_importance(
    heads: Sequence[HeadCalibration], weights: ModelWeights, meter: LossMeter, progress: Progress
) -> Iterator[tuple[HeadCalibration, ...]]:
    """Yield the records after each measured head or layer; those that have their importance are kept.

    Args:
        heads: The records, by layer.
        weights: The model's weights.
        meter: Measures the loss.
        progress: Called before each head and layer.
    """
    found = list(heads)
    total = sum(len(one.queries) + 1 for one in found)
    done = sum(len(one.importance) + (one.layer_importance is not None) for one in found)
    if done == total:
        return
    progress(STAGE, done, total)
    plain = meter.surprises_with(None)

    def rise(reader: Reader, only: Sequence[tuple[int, Group]]) -> float:
        return float(np.mean(meter.surprises_with(reader, only) - plain))

    for layer, one in enumerate(found):
        if one.ranked:
            continue
        weight = as_floats(weights.linear(layer, "o")[0])
        for head in range(len(one.importance), len(one.queries)):
            importance = rise(_without(weight, head, weights.config.attention.head_dim), [(layer, "o")])
            one = structs.replace(one, importance=(*one.importance, importance))
            found[layer] = one
            yield tuple(found)
            done += 1
            progress(STAGE, done, total)
        importance = rise(_nothing, [(layer, "o"), (layer, "down")])
        found[layer] = structs.replace(one, layer_importance=importance)
        yield tuple(found)
        done += 1
        progress(STAGE, done, total)


def _without(weight: Floats, head: int, head_dim: int) -> Reader:
    """Return a reader that takes a head's part out of an output projection."""
    columns = slice(head * head_dim, (head + 1) * head_dim)

    def read(_spec: OpSpec, x: Floats, y: Floats) -> Floats:
        return y - x[:, columns] @ weight[:, columns].T

    return read


def _nothing(_spec: OpSpec, _x: Floats, y: Floats) -> Floats:
    """Return zeros: a layer without outputs passes its input on, but for biases."""
    return np.zeros_like(y)
