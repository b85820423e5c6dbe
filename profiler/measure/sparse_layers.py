"""Measures the operators of sparse attention, on random data and one launch at a time.

The GPU's are timed as the other operators of a layer are, inside a busy queue; the NPU's graphs of scores
from the call to its return.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from heterollm.base import HeteroLLMError
from heterollm.kernels.device import Device
from heterollm.kernels.formats import score_scales
from heterollm.kernels.gpu import (
    STEP_LENGTH,
    STEP_POSITION,
    STEP_WORDS,
    GlueKernels,
    GpuRuntime,
    HeadShape,
    HeadTable,
    KvLayer,
    Launch,
    ScoreMemory,
    Scores,
    Selection,
    SparseShape,
    page_elements,
    pages_of,
)
from heterollm.kernels.npu import KEYS, QUERIES, SCORES, NpuBackend, ScoresShape, ScoresShard
from heterollm.kernels.operators import (
    SELECTION_FLOPS,
    attend_selected,
    estimate_scores,
    select_positions,
    write_score_codes,
)
from heterollm.model import ModelShape
from heterollm.profiler.measure.builds import build_prior_s
from heterollm.profiler.measure.gpu_timer import gpu_timer
from heterollm.profiler.measure.npu_timer import graph_record, npu_run_s
from heterollm.profiler.measure.random_data import fill_shared
from heterollm.profiler.measure.sampling import NOTHING_COMPUTED_S, taken
from heterollm.profiler.measure.sparse_cases import (
    ESSENTIAL_SIZES,
    SparseOperatorCase,
    sparse_cases,
)
from heterollm.profiler.measure.task import Task
from heterollm.profiler.records import Record, SparseKey

STAGE: Final = "Sparse attention"
USUAL_RUNS: Final = 8
OVERHEAD_S: Final = 0.02
CORE_FLOPS: Final = 20e9
ACCELERATOR_CORES: Final = 16

LARGEST: Final = 5.0
"""About the largest of the normal numbers that stand for queries and keys."""


def sparse_tasks(device: Device, shapes: Iterable[ModelShape], *, quick: bool = False) -> list[Task]:
    """Return the tasks that measure sparse attention of some models, each size once.

    Args:
        device: The opened device; tasks run on the thread that opened it.
        shapes: The models.
        quick: Whether to measure as few sizes as predictions need.
    """
    bench = _SparseBench(device)
    passes: dict[SparseKey, list[SparseOperatorCase]] = {}
    for shape in shapes:
        for case in sparse_cases(shape, quick=quick):
            if case.operator != "scores" or _has_scores(device, case):
                first = SparseOperatorCase(shape, "score_codes", case.tokens, case.keys, shape.kv_heads)
                passes.setdefault(first.key, []).append(case)
    return [
        Task(
            STAGE,
            tuple(dict.fromkeys(case.key for case in cases)),
            partial(bench.measure, tuple({case.key: case for case in cases}.values())),
            sum(_estimate_s(case, device) for case in cases),
            essential=(cases[0].tokens, cases[0].keys) in ESSENTIAL_SIZES,
        )
        for cases in passes.values()
    ]


def _has_scores(device: Device, case: SparseOperatorCase) -> bool:
    shape = ScoresShape(case.heads, case.keys, case.shape.head_dim)
    return device.npu is not None and bool(device.npu.forms(shape, case.key.group * case.tokens))


def _estimate_s(case: SparseOperatorCase, device: Device) -> float:
    """Return about how long a case takes to measure."""
    if not device.gpu.computes:
        return NOTHING_COMPUTED_S
    key, traits = case.key, device.gpu.traits
    pairs = key.heads * key.group * key.tokens * key.keys
    if case.operator == "scores":
        run_s = npu_run_s(device, 2 * pairs * key.head_dim, 0) + build_prior_s(device, 0) / USUAL_RUNS
        return OVERHEAD_S + USUAL_RUNS * run_s
    flops = {
        "score_codes": 8 * key.heads * (key.group * key.tokens + key.keys) * key.head_dim,
        "selection": SELECTION_FLOPS * pairs,
        "sparse_attention": 4 * key.keep * pairs * key.head_dim,
    }.get(case.operator, 2 * pairs * key.head_dim)
    cores = traits.compute_units if traits.is_cpu else ACCELERATOR_CORES
    return OVERHEAD_S + USUAL_RUNS * flops / (CORE_FLOPS * cores)


class _Pass:
    """Memory of a pass, filled with random numbers: queries, KV cache, codes and scores.

    Args:
        runtime: The GPU.
        device: Its device.
        case: An operator of the pass.
    """

    def __init__(self, runtime: GpuRuntime, device: Device, case: SparseOperatorCase) -> None:
        model, tokens, keys = case.shape, case.tokens, case.keys
        heads = HeadShape(model.heads, model.kv_heads, model.head_dim, keys)
        self.shape = SparseShape(heads, tokens, keys)
        self.memory = ScoreMemory.allocate(runtime, self.shape)
        self.selection = Selection.allocate(runtime, self.shape)
        self.q = runtime.shared((tokens, heads.query_columns), np.float32)
        pages = pages_of(keys)
        page = page_elements(heads.kv_heads, heads.head_dim, device.cache_dtype)
        cache = runtime.shared((pages * page,), device.cache_dtype)
        self.cache = KvLayer(cache, STEP_WORDS)
        self.out = runtime.shared((tokens, heads.query_columns), device.activation_dtype)
        for random in (self.q, cache, self.memory.scores):
            fill_shared(runtime, random)
        self.step = runtime.shared((STEP_WORDS + pages,), np.int32)
        self.step.acquire()
        self.step.array[:STEP_WORDS] = 0
        self.step.array[STEP_WORDS:] = np.arange(pages)
        self.step.array[[STEP_POSITION, STEP_LENGTH]] = keys - tokens, tokens
        self.step.release()
        score = LARGEST * math.sqrt(heads.head_dim)
        self.scale = score_scales([LARGEST] * heads.group, LARGEST, [score] * heads.group)

    def table(self, runtime: GpuRuntime, keep: float) -> HeadTable:
        """Return the constants of a layer whose heads keep that share."""
        heads = self.shape.heads
        return HeadTable.upload(
            runtime,
            heads,
            [self.scale] * heads.kv_heads,
            order=range(heads.kv_heads),
            keep=[keep or 1.0] * heads.heads,
        )


class _SparseBench:
    """Measures operators on a device; holds the memory of one pass at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._timer = gpu_timer(device.gpu)
        runtime = self._timer.runtime
        self._attention = GlueKernels(runtime, device.activation_dtype, device.cache_dtype)

    def measure(self, cases: Sequence[SparseOperatorCase]) -> list[Record]:
        """Measure the cases of a pass; a failure is a record too."""
        held = _Pass(self._timer.runtime, self._device, cases[0])
        for launch in self._launches(replace(cases[0], operator="score_codes"), held):
            launch()
        return [self._measure(case, held) for case in cases]

    def _measure(self, case: SparseOperatorCase, held: _Pass) -> Record:
        try:
            if case.operator == "scores" and self._device.npu is not None:
                return self._on_npu(case, held, self._device.npu)
            launches = self._launches(case, held)
        except HeteroLLMError as error:
            return Record(case.key, error=error.message)
        return taken(case.key, lambda: self._timer.time_us(launches))

    def _launches(self, case: SparseOperatorCase, held: _Pass) -> Sequence[Launch]:
        attention, memory, shape, step = self._attention, held.memory, held.shape, held.step
        slots, scores = (0, case.heads), Scores(case.shape.head_dim**-0.5)
        table = held.table(self._timer.runtime, case.keep)
        if case.operator == "score_codes":
            return write_score_codes(attention, held.q, held.cache, memory, table, step, shape=shape)
        if case.operator == "score_estimate":
            return [
                estimate_scores(attention, memory, shape=shape, slots=slots, exponent=held.scale.exponent)
            ]
        select = select_positions(
            attention, memory, table, held.selection, step, shape=shape, slots=slots, scores=scores
        )
        if case.operator == "selection":
            return [select]
        select()
        inputs = held.q, held.cache, table, held.selection, held.out, step
        return attend_selected(attention, *inputs, shape=shape, slots=slots, scores=scores)

    def _on_npu(self, case: SparseOperatorCase, held: _Pass, npu: NpuBackend) -> Record:
        heads, rows, size = case.heads, held.shape.rows, case.shape.head_dim
        shard = ScoresShard(heads, case.keys, size, held.scale.exponent)
        memory = held.memory
        try:
            return graph_record(
                case.key,
                npu,
                npu.prepare(shard, rows),
                {
                    QUERIES: (memory.queries, np.uint8, (heads, rows, size)),
                    KEYS: (memory.keys, np.uint8, (heads, case.keys, size)),
                },
                {SCORES: (memory.scores, np.uint8, (heads, rows, case.keys))},
                timer=self._device.gpu.now_ns,
            )
        finally:
            npu.release(shard)
