"""Random weights of any shape and format, for self-tests and the profiler."""

from __future__ import annotations

from typing import Final, Literal, cast

import numpy as np

from heterollm.kernels.formats.quantized_tensor import LinearWeight, QuantizedTensor
from heterollm.kernels.formats.stepped_scales import choose_steps, nearest_multiples
from heterollm.kernels.ops import WeightFormat

RANDOM_FLOATS: Final = 1 << 20
"""Number of distinct random floats; longer weights repeat them."""


def random_weight(
    generator: np.random.Generator, rows: int, columns: int, weight: WeightFormat
) -> LinearWeight:
    """Return a random weight ``[rows, columns]`` of a format, scaled for outputs of magnitude one."""
    if not weight.quantized:
        tile = generator.standard_normal(min(RANDOM_FLOATS, rows * columns), np.float32)
        tile /= np.float32(np.sqrt(columns))
        values = np.resize(tile, rows * columns).reshape(rows, columns)
        return values.astype(np.float16) if weight.bits == 16 else values
    bits = cast("Literal[4, 8]", weight.bits)
    blocks = columns // weight.block
    codes = generator.integers(0, 256, (rows, blocks, weight.block * bits // 8), np.uint8)
    steps = 1 << (bits - 2)
    signs = generator.choice([-1.0, 1.0], (rows, blocks))
    scales = signs * generator.uniform(0.5, 1.5, (rows, blocks)) / (steps * np.sqrt(columns))
    if weight.scales == "stepped":
        free = np.abs(scales).astype(np.float32)
        step = choose_steps(free, np.ones_like(free))
        scales = nearest_multiples(free, step) * step[:, None]
    if weight.scales == "tensor":
        codes = np.maximum(codes, 1)
        scales = np.full_like(scales, abs(scales[0, 0]))
    zeros = minimums = None
    if weight.minimum:
        middle = (1 << (bits - 1)) * generator.uniform(0.8, 1.2, (rows, blocks))
        minimums = (-middle * scales).astype(np.float16)
    elif not weight.symmetric:
        zeros = generator.integers(0, 256, (rows, -(-blocks * bits // 8)), np.uint8)
    return QuantizedTensor(
        codes, scales.astype(np.float16), zeros, bits, weight.block, weight.scales, minimums
    )
