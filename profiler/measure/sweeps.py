"""Measures an NPU as section 3 of the HeteroLLM paper does: stages, order of operands, the effect of ``k``.

Stages and order: one weight at lengths on and off the standard ones, with float weights in both orders
and with 4-bit weights in their plain form. Effect of ``k``: weights of one size, from few inputs and many
outputs to the contrary, plain and, where a form splits ``k``, as a k-split. Weights may come from a
cache. On an emulator the CPU time of runs is measured, elsewhere runs are timed. The records are kept
apart from those that plans read; of all, predictions read whether times move in steps of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, cast

from heterollm.base import HeteroLLMError
from heterollm.kernels.device import Device
from heterollm.kernels.npu import GraphForm, LinearShape, LinearShard, NpuBackend
from heterollm.kernels.ops import WeightFormat
from heterollm.profiler.measure.builds import build_prior_s
from heterollm.profiler.measure.gpu_timer import gpu_timer
from heterollm.profiler.measure.linears import OVERHEAD_S, code_of
from heterollm.profiler.measure.npu_timer import graph_record, npu_run_s
from heterollm.profiler.measure.random_data import fill_shared, weight_for
from heterollm.profiler.measure.sampling import NOTHING_COMPUTED_S
from heterollm.profiler.measure.task import Task
from heterollm.profiler.records import LinearPoint, Record, SweepKey

STAGE: Final = "Stages, order and k"
TOKENS: Final = (1, 4, 8, 16, 24, 31, 32, 33, 48, 63, 64, 65, 80, 96, 97, 112, 128)
STEP_TOKENS: Final = (96, 97, 112, 128)
"""Lengths that show whether time moves in steps of a tile: the ends of two, and two within the second. Fewer
tokens wait for the weights."""

ORDERS: Final[tuple[GraphForm, ...]] = ("weight_first", "activation_first")
PACKED: Final = WeightFormat(4, 32)
K_SPLIT: Final[GraphForm] = "k_chunked"

SIZE: Final = 2048
EMULATED_SIZE: Final = 256
"""Rows and columns of the weight of stages and order; an emulator takes a second for the larger one."""

COLUMNS: Final = (1024, 2048, 3072, 4096, 6144, 8192, 12288, 16384)
WEIGHTS: Final = 3 << 22
EMULATED_WEIGHTS: Final = 3 << 20
"""Weights of the sweep of ``k``: whole multiples of 64 rows at all of the columns."""

COLUMN_TOKENS: Final = (1, 256)
EMULATED_COLUMN_TOKENS: Final = (1, 32)
EMULATED_RUNS: Final = 5
RUNS: Final = 8
STAGE_ROWS: Final = 32


def step_tasks(device: Device) -> list[Task]:
    """Return the work that shows whether times move in steps of a tile; none where the device has no NPU.

    It takes seconds, and is left out where a budget is spent.
    """
    npu = device.npu
    if npu is None:
        return []
    size = EMULATED_SIZE if npu.time_kind == "emulated" else SIZE
    floats = WeightFormat(32 if npu.activation_dtype.itemsize == 4 else 16)
    offered = ((weight, npu.forms(LinearShape(weight, size), 1)) for weight in (PACKED, floats))
    weight, forms = next(((weight, forms) for weight, forms in offered if forms), (PACKED, ()))
    keys = [_key(size, size, tokens, weight, form) for form in forms[:1] for tokens in STEP_TOKENS]
    return [replace(_task(device, npu, keys), essential=False)] if keys else []


def sweep_tasks(device: Device) -> list[Task]:
    """Return the work; none where the device has no NPU."""
    npu = device.npu
    if npu is None:
        return []
    emulated = npu.time_kind == "emulated"
    size = EMULATED_SIZE if emulated else SIZE
    floats = WeightFormat(32 if npu.activation_dtype.itemsize == 4 else 16)
    tasks = []
    for weight in (floats, PACKED):
        offered = npu.forms(LinearShape(weight, size), 1)
        for form in [form for form in ORDERS if form in offered] or offered[:1]:
            keys = [_key(size, size, tokens, weight, form) for tokens in TOKENS]
            tasks.append(_task(device, npu, keys))
    weights = EMULATED_WEIGHTS if emulated else WEIGHTS
    for columns in COLUMNS:
        offered = npu.forms(LinearShape(PACKED, columns), 1)
        keys = [
            _key(weights // columns, columns, tokens, PACKED, form)
            for form in offered
            if form in (offered[0], K_SPLIT)
            for tokens in (EMULATED_COLUMN_TOKENS if emulated else COLUMN_TOKENS)
        ]
        if keys:
            tasks.append(_task(device, npu, keys))
    return tasks


def _key(rows: int, columns: int, tokens: int, weight: WeightFormat, form: GraphForm) -> SweepKey:
    point = LinearPoint("o", (rows,), columns, tokens, weight.bits, weight.block, form=form, streamed=False)
    return SweepKey(point, code_of("npu"))


def _task(device: Device, npu: NpuBackend, keys: Sequence[SweepKey]) -> Task:
    """Return the task of one weight; the user asked for it, so that no budget leaves it out."""
    first = keys[0].point
    graphs = len(keys) if npu.graphs_by_length else len({key.point.form for key in keys})
    size = first.rows * first.columns
    runs = EMULATED_RUNS if npu.time_kind == "emulated" else RUNS
    estimate_s = NOTHING_COMPUTED_S
    if device.gpu.computes:
        run_s = sum(npu_run_s(device, key.point.flops, key.point.weight_bytes) for key in keys)
        estimate_s = len(keys) * OVERHEAD_S + run_s * runs
    return Task(
        STAGE,
        tuple(keys),
        partial(_measure, device, npu, keys),
        estimate_s,
        essential=True,
        graphs=graphs,
        build_s=graphs * build_prior_s(device, size),
    )


def _measure(device: Device, npu: NpuBackend, keys: Sequence[SweepKey]) -> Iterator[Record]:
    point = keys[0].point
    values = weight_for(gpu_timer(device.gpu).runtime, point.rows, point.columns, point.weight)
    shard = LinearShard(values, 0, "o", ((0, point.rows),), f"random {point.shape} {point.weight}")
    try:
        for key in keys:
            if npu.time_kind == "emulated":
                yield _emulated(npu, shard, key)
            else:
                yield _timed(device, npu, shard, key)
    finally:
        npu.release(shard)


def _emulated(npu: NpuBackend, shard: LinearShard, key: SweepKey) -> Record:
    """Measure CPU time after a graph of whole tiles: an emulator skips zeros in rows beyond the length."""
    point, form = key.point, cast("GraphForm", key.point.form)
    longest = -(-point.tokens // STAGE_ROWS) * STAGE_ROWS
    try:
        if longest != point.tokens:
            npu.cpu_times_us(shard, longest, form, runs=1)
        times_us = npu.cpu_times_us(shard, point.tokens, form, runs=EMULATED_RUNS)
    except HeteroLLMError as error:
        return Record(key, error=error.message)
    if times_us is None:
        return Record(key, error=f"{npu.name} emulates nothing.")
    return Record(key, values={"cpu_us": min(times_us), "cpu_us_most": max(times_us)})


def _timed(device: Device, npu: NpuBackend, shard: LinearShard, key: SweepKey) -> Record:
    point, form = key.point, cast("GraphForm", key.point.form)
    runtime, dtype = gpu_timer(device.gpu).runtime, npu.activation_dtype
    try:
        graph = npu.prepare(shard, point.tokens, form, any_length=True)
    except HeteroLLMError as error:
        return Record(key, error=error.message)
    sizes = ((point.tokens, columns) for columns in (point.columns, point.rows))
    x, y = ((runtime.shared(own, dtype), dtype, own) for own in sizes)
    fill_shared(runtime, x[0])
    return graph_record(key, npu, graph, {"x": x}, {"y": y}, timer=device.gpu.now_ns)
