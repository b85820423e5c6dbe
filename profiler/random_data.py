"""Random weights and activations of any shape, made quickly.

What they hold does not matter as long as it is not zero: Qualcomm's emulator skips zeros.
"""

from __future__ import annotations

import zlib
from typing import Any, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.ops import OpSpec, WeightFormat
from heterollm.kernels.quantized_tensor import LinearWeight, QuantizedTensor

__all__ = ["fill_random", "random_members", "random_weight"]

TILE: Final = 1 << 20
"""Random floats that are made; more are the same over again."""


def random_members(spec: OpSpec) -> list[LinearWeight]:
    """Return a weight for each member of a group, the same ones for the same group."""
    text = f"{spec.group} {spec.member_rows} {spec.columns} {spec.weight}"
    generator = np.random.default_rng(zlib.crc32(text.encode()))
    return [random_weight(generator, member.rows, spec.columns, spec.weight) for member in spec.members]


def random_weight(
    generator: np.random.Generator, rows: int, columns: int, weight: WeightFormat
) -> LinearWeight:
    """Return a random weight ``[rows, columns]`` of a format, scaled so that outputs come near to one."""
    if not weight.quantized:
        tile = generator.standard_normal(min(TILE, rows * columns), np.float32) / np.float32(np.sqrt(columns))
        values = np.resize(tile, rows * columns).reshape(rows, columns)
        return values.astype(np.float16) if weight.bits == 16 else values
    bits = cast("Literal[4, 8]", weight.bits)
    blocks = columns // weight.block
    codes = generator.integers(0, 256, (rows, blocks, weight.block * bits // 8), np.uint8)
    steps = 1 << (bits - 2)
    scales = generator.uniform(0.5, 1.5, (rows, blocks)) / (steps * np.sqrt(columns))
    zeros = None
    if not weight.symmetric:
        zeros = generator.integers(0, 256, (rows, -(-blocks * bits // 8)), np.uint8)
    return QuantizedTensor(codes, scales.astype(np.float16), zeros, bits, weight.block)


def fill_random(array: NDArray[Any], seed: int = 0) -> None:
    """Fill an array of floats with normal numbers, every row of it."""
    flat = array.reshape(-1)
    tile = np.random.default_rng(seed).standard_normal(min(TILE, flat.size), np.float32)
    for start in range(0, flat.size, TILE):
        part = flat[start : start + TILE]
        part[...] = tile[: part.size]
