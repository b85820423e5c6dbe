"""The doctor's check of experts in one NPU graph."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np

from heterollm.doctor.case import SEED, DoctorCase
from heterollm.kernels.formats import random_weight, reference
from heterollm.kernels.npu import ExpertsShard, FfnShard, NpuBackend
from heterollm.kernels.operators import Numbers, exact_gated_activation
from heterollm.kernels.ops import WeightFormat

FORMAT: Final = WeightFormat(4, 32)
EXPERTS: Final = "experts in one graph"
HIDDEN, WIDTH, CAPACITY = 128, 64, 32
COUNTS: Final = (5, 32)
"""Tokens of each expert."""


def expert_cases(npu: NpuBackend) -> Iterator[DoctorCase]:
    """Yield a group of two experts; an NPU without such a form says so."""
    shard, case = _shard(), f"{len(COUNTS)} experts, capacity {CAPACITY}"
    if npu.forms(shard.shape, CAPACITY):
        yield DoctorCase("NPU", EXPERTS, case, partial(_experts, npu, shard))
    else:
        yield DoctorCase("NPU", EXPERTS, case, None, f"{npu.name} has no such graph")


def _shard() -> ExpertsShard:
    generator = np.random.default_rng(SEED)
    parts = []
    for _ in COUNTS:
        gate_up = random_weight(generator, 2 * WIDTH, HIDDEN, FORMAT)
        down = random_weight(generator, HIDDEN, WIDTH, FORMAT)
        parts.append(FfnShard(gate_up, down, "silu", None, 0, "doctor", (0, WIDTH)))
    return ExpertsShard(tuple(range(len(parts))), tuple(parts))


def _experts(npu: NpuBackend, shard: ExpertsShard) -> Numbers:
    shape = len(COUNTS), CAPACITY, HIDDEN
    x = np.random.default_rng(SEED).standard_normal(shape).astype(npu.activation_dtype)
    for expert, count in enumerate(COUNTS):
        x[expert, count:] = np.nan
    y = np.zeros((len(COUNTS) * CAPACITY, HIDDEN), npu.activation_dtype)
    npu.prepare(shard, CAPACITY).bind({"x": x.reshape(y.shape)}, {"y": y})()
    exact = []
    for own, part, count in zip(x, shard.parts, COUNTS, strict=True):
        gate, up = np.split(reference.linear(own[:count], [part.gate_up]), 2, axis=1)
        exact.append(reference.linear(exact_gated_activation(gate, up), [part.down]))
    found = [own[:count] for own, count in zip(y.reshape(shape), COUNTS, strict=True)]
    return np.concatenate(found), np.concatenate(exact)
