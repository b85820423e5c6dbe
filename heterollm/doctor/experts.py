"""The doctor's checks of experts: on the GPU from the router's logits to the sum, and in one NPU graph."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import numpy as np

from heterollm.doctor.case import SEED, DoctorCase
from heterollm.kernels.cases import Numbers, fill_slot, run_launches, slot_values
from heterollm.kernels.device import Device
from heterollm.kernels.formats import random_weight, reference, reference_layers
from heterollm.kernels.gpu import ExpertLists, ExpertShape, GpuExperts, GpuGlue, GpuLinear, Segments
from heterollm.kernels.npu import ExpertsShard, FfnShard, NpuBackend
from heterollm.kernels.ops import Routing, WeightFormat

MIXTURE: Final = "mixture of experts"
ROUTING: Final = Routing(8, 2)
LENGTHS: Final = (1, 33)
FORMAT: Final = WeightFormat(4, 32)
EXPERTS: Final = "experts in one graph"
HIDDEN, WIDTH, CAPACITY = 128, 64, 32
COUNTS: Final = (5, 32)
"""Tokens of each expert."""


def gpu_expert_cases(device: Device) -> Iterator[DoctorCase]:
    """Yield all kernels of a mixture together, for one token and for many."""
    for tokens in LENGTHS:
        case = f"{tokens} token{'s' * (tokens > 1)}, {ROUTING.chosen} of {ROUTING.experts} experts"
        yield DoctorCase("GPU", MIXTURE, case, partial(_mixture, device, tokens))


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
        exact.append(reference.linear(reference_layers.gated_activation(gate, up), [part.down]))
    found = [own[:count] for own, count in zip(y.reshape(shape), COUNTS, strict=True)]
    return np.concatenate(found), np.concatenate(exact)


def _mixture(device: Device, tokens: int) -> Numbers:
    gpu, dtype, generator = device.gpu, device.activation_dtype, np.random.default_rng(SEED)
    gates, ups, downs = (
        [random_weight(generator, rows, columns, FORMAT) for _ in range(ROUTING.experts)]
        for rows, columns in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    )
    x = generator.standard_normal((tokens, HIDDEN)).astype(dtype)
    logits = generator.standard_normal((tokens, ROUTING.experts)).astype(np.float32)

    shape = ExpertShape(ROUTING, tokens)
    lists = ExpertLists.allocate(gpu, shape)
    kernels, glue = GpuExperts(gpu, dtype, device.cache_dtype), GpuGlue(gpu, dtype, device.cache_dtype)
    pack = partial(GpuLinear.pack, gpu, activation_dtype=dtype, experts=ROUTING.experts)
    gate_up = pack([member for pair in zip(gates, ups, strict=True) for member in pair])
    rows, inner, activated, out = (
        fill_slot(gpu, np.zeros(sizes, dtype))
        for sizes in ((shape.pairs, HIDDEN), (shape.pairs, 2 * WIDTH), (shape.pairs, WIDTH), x.shape)
    )
    run_launches(
        gpu,
        [
            kernels.route(fill_slot(gpu, logits), lists, shape=shape),
            kernels.sort(lists, shape=shape),
            kernels.gather(fill_slot(gpu, x), rows, lists, shape=shape, columns=HIDDEN),
            gate_up.grouped_launch(rows, inner, lists, shape=shape, label=MIXTURE),
            glue.gated_activation(
                Segments(inner, inner, (WIDTH, WIDTH), (0, 0)),
                activated,
                tokens=shape.pairs,
                intermediate=WIDTH,
            ),
            pack(downs).grouped_launch(activated, rows, lists, shape=shape, label=MIXTURE),
            kernels.combine(rows, lists, out, shape=shape, columns=HIDDEN),
        ],
    )
    exact = np.zeros(x.shape)
    for token, own in enumerate(logits.astype(np.float64)):
        chosen = np.argsort(-own, kind="stable")[: ROUTING.chosen]
        shares = np.exp(own[chosen] - own.max())
        for expert, share in zip(chosen, shares / shares.sum(), strict=True):
            row = x[token : token + 1]
            gate, up = (reference.linear(row, [weights[expert]]) for weights in (gates, ups))
            gated = reference_layers.gated_activation(gate, up)
            exact[token] += share * reference.linear(gated, [downs[expert]])[0]
    return slot_values(out), exact
