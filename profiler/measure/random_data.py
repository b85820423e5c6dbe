"""Random weights and activations of any shape, made quickly.

Values do not matter unless they are zero: Qualcomm's emulator skips zeros.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.formats import RANDOM_FLOATS, LinearWeight, random_weight, shape_only_weight, zero_code
from heterollm.kernels.gpu import GpuRuntime, SharedArray
from heterollm.kernels.npu import FfnRanges, FfnShard
from heterollm.kernels.ops import OpSpec, WeightFormat
from heterollm.profiler.work import FFN_ACTIVATION


def members_for(runtime: GpuRuntime, spec: OpSpec) -> list[LinearWeight]:
    """Return :func:`random_members`, or shapes alone where the device computes nothing."""
    if runtime.computes:
        return random_members(spec)
    return [shape_only_weight(member.rows, spec.columns, spec.weight) for member in spec.members]


def weight_for(runtime: GpuRuntime, rows: int, columns: int, weight: WeightFormat) -> LinearWeight:
    """Return a random weight, always the same; its shape alone where the device computes nothing."""
    if runtime.computes:
        return random_weight(np.random.default_rng(0), rows, columns, weight)
    return shape_only_weight(rows, columns, weight)


def fill_shared(runtime: GpuRuntime, shared: SharedArray) -> None:
    """Fill shared memory with random numbers, if the device reads any."""
    if runtime.computes:
        shared.acquire()
        fill_random(shared.array)
        shared.release()


def random_members(spec: OpSpec) -> list[LinearWeight]:
    """Return a weight for each member of a group, the same ones for the same group."""
    text = f"{spec.group} {spec.member_rows} {spec.columns} {spec.weight}"
    generator = np.random.default_rng(zlib.crc32(text.encode()))
    return [random_weight(generator, member.rows, spec.columns, spec.weight) for member in spec.members]


def weights_key_of(spec: OpSpec) -> str:
    """Return a name of a group's random weights; equal groups have equal ones, so that graphs are found."""
    return f"random {spec.member_rows}"


def random_ffn(
    runtime: GpuRuntime, spec: OpSpec, gate_up: LinearWeight, width: int, ranges: FfnRanges | None = None
) -> FfnShard:
    """Return an NPU's shard of a feed-forward network with random weights.

    Args:
        runtime: The device.
        spec: Gate and up; ``then`` is down.
        gate_up: Their weights.
        width: Their rows.
        ranges: Ranges of an integer form.
    """
    assert spec.then is not None
    [down] = members_for(runtime, replace(spec.then, columns=width))
    return FfnShard(
        gate_up=gate_up,
        down=down,
        activation=FFN_ACTIVATION,
        bias=None,
        layer=spec.layer,
        weights_key=weights_key_of(spec),
        cut=(0, width),
        integer_inputs=spec.integer_inputs,
        ranges=ranges,
    )


def fill_random(array: NDArray[Any], seed: int = 0) -> None:
    """Fill an array of floats with normal numbers, or of codes with such of normal numbers."""
    flat = array.reshape(-1)
    tile = np.random.default_rng(seed).standard_normal(min(RANDOM_FLOATS, flat.size), np.float32)
    if array.dtype.kind == "u":
        zero = zero_code(16 if array.dtype == np.uint16 else 8)
        tile = zero + zero // 8 * np.clip(tile, -7, 7)
    for start in range(0, flat.size, RANDOM_FLOATS):
        piece = flat[start : start + RANDOM_FLOATS]
        piece[...] = tile[: piece.size]
