"""Random weights and activations of any shape, made quickly.

What they hold does not matter as long as it is not zero: Qualcomm's emulator skips zeros.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.ops import OpSpec
from heterollm.kernels.quantized_tensor import LinearWeight
from heterollm.kernels.random_weights import RANDOM_FLOATS, random_weight

__all__ = ["fill_random", "random_members"]


def random_members(spec: OpSpec) -> list[LinearWeight]:
    """Return a weight for each member of a group, the same ones for the same group."""
    text = f"{spec.group} {spec.member_rows} {spec.columns} {spec.weight}"
    generator = np.random.default_rng(zlib.crc32(text.encode()))
    return [random_weight(generator, member.rows, spec.columns, spec.weight) for member in spec.members]


def fill_random(array: NDArray[Any], seed: int = 0) -> None:
    """Fill an array of floats with normal numbers, every row of it."""
    flat = array.reshape(-1)
    tile = np.random.default_rng(seed).standard_normal(min(RANDOM_FLOATS, flat.size), np.float32)
    for start in range(0, flat.size, RANDOM_FLOATS):
        part = flat[start : start + RANDOM_FLOATS]
        part[...] = tile[: part.size]
