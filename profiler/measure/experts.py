"""Measures a layer's mixture of experts, on random data: one layer stands for all of its shape.

The GPU's kernels are timed as the other operators of a layer are, inside a busy queue, with lists of rows
that its kernels of routing have made. The NPU's graphs are timed from the call to its return.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from heterollm.base import HeteroLLMError
from heterollm.kernels.device import Device
from heterollm.kernels.formats import concatenate_rows
from heterollm.kernels.gpu import (
    ExpertLists,
    ExpertShape,
    GlueKernels,
    GpuLinear,
    GroupedLinear,
    Launch,
    RoundedInputs,
    Segments,
    SharedArray,
    scratch_codes,
)
from heterollm.kernels.npu import ExpertsShard, GraphForm, NpuBackend
from heterollm.kernels.operators import GpuExperts, activate
from heterollm.kernels.ops import OpSpec, Routing, WeightFormat
from heterollm.model import ModelShape
from heterollm.profiler.measure.builds import build_prior_s
from heterollm.profiler.measure.caches import COLD_TOKENS
from heterollm.profiler.measure.expert_cases import ExpertCase, expert_cases, routing_of
from heterollm.profiler.measure.gpu_timer import gpu_timer
from heterollm.profiler.measure.linears import GPU_FLOPS, OVERHEAD_S, USUAL_RUNS
from heterollm.profiler.measure.npu_timer import CORE_FLOPS, graph_record, npu_run_s
from heterollm.profiler.measure.random_data import fill_shared, members_for, random_ffn, weight_for
from heterollm.profiler.measure.sampling import NOTHING_COMPUTED_S, taken
from heterollm.profiler.measure.task import Task
from heterollm.profiler.records import ExpertsKey, Record

STAGE: Final = "Experts"

MOST_WEIGHT_BYTES: Final = "most_weight_bytes"
"""Name of a graph's value: the most bytes of weights in one graph of experts; left out without a limit."""


def expert_tasks(
    device: Device, shapes: Iterable[ModelShape], *, quick: bool = False, graphs: bool = False
) -> list[Task]:
    """Return the tasks that measure the experts of some models, each size once.

    Args:
        device: The opened device; tasks run on the thread that opened it.
        shapes: The models; those without experts have no tasks.
        quick: Whether to measure as few sizes as predictions need.
        graphs: Whether to measure the NPU's graphs, too.
    """
    npu, bench = device.npu if graphs else None, _ExpertBench(device)
    cache_bytes = device.gpu.traits.cache_bytes
    found = (case for shape in shapes for case in expert_cases(shape, npu, cache_bytes, quick=quick))
    cases = {case.key: case for case in found}
    return [
        Task(
            STAGE,
            (case.key,),
            partial(bench.measure, case),
            _estimate_s(case.key, device),
            essential=case.essential,
            graphs=int(case.key.operator == "graph"),
            build_s=build_prior_s(device, _weights(case.key)) if case.key.operator == "graph" else 0.0,
        )
        for case in cases.values()
    ]


def _weights(key: ExpertsKey) -> int:
    return key.linears * key.experts * key.columns * key.width


def _estimate_s(key: ExpertsKey, device: Device) -> float:
    """Return about how long a case takes to measure."""
    if not device.gpu.computes:
        return NOTHING_COMPUTED_S
    if key.operator == "graph":
        return OVERHEAD_S + USUAL_RUNS * npu_run_s(device, key.flops, key.weight_bytes)
    if key.operator == "moves":
        return OVERHEAD_S
    traits = device.gpu.traits
    rate = CORE_FLOPS * traits.compute_units if traits.is_cpu else GPU_FLOPS
    return OVERHEAD_S + USUAL_RUNS * key.flops / rate


@dataclass(frozen=True, slots=True)
class _Packed:
    """Weights of some experts on the GPU."""

    spec: OpSpec
    gate_up: GroupedLinear
    down: GroupedLinear


class _ExpertBench:
    """Measures operators on a device; holds the weights of one number of experts at a time."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._timer = gpu_timer(device.gpu)
        self._runtime = self._timer.runtime
        kinds = self._runtime, device.activation_dtype, device.cache_dtype
        self._kernels, self._glue = GpuExperts(*kinds), GlueKernels(*kinds)
        self._packed: tuple[int, _Packed] | None = None

    def measure(self, case: ExpertCase) -> list[Record]:
        """Measure a case; a failure is a record too."""
        try:
            if case.key.operator == "graph":
                assert self._device.npu is not None  # the case has a form of it
                return [self._graph(case, self._device.npu)]
            launches = self._moves(case) if case.key.operator == "moves" else self._products(case)
        except HeteroLLMError as error:
            return [Record(case.key, error=error.message)]
        timer, key = self._timer, case.key
        cold = key.streamed and key.operator == "products" and key.tokens <= COLD_TOKENS
        return [
            taken(key, lambda: timer.time_us(launches, cold=cold), lambda: timer.time_us(launches)),
        ]

    # -- GPU -----------------------------------------------------------------------------------------

    def _moves(self, case: ExpertCase) -> Sequence[Launch]:
        """Return all launches of a pass but those of the networks, in their order."""
        spec, tokens = case.spec, case.key.tokens
        routing, hidden = routing_of(spec), spec.columns
        shape = ExpertShape(routing, tokens)
        lists, logits = ExpertLists.allocate(self._runtime, shape), self._floats(tokens * routing.experts)
        bias = self._floats(routing.experts) if routing.biased else None
        x, rows, out = (self._slot(count * hidden) for count in (tokens, shape.pairs, tokens))
        # Routers keep float32 weights.
        weight = weight_for(self._runtime, routing.experts, hidden, WeightFormat(32))
        router = GpuLinear.pack(self._runtime, [weight], activation_dtype=self._device.activation_dtype)
        codes = None
        if spec.integer_inputs:
            codes = self._codes(spec, tokens), self._codes(spec, shape.pairs)
        return [
            router.launch(x, logits, tokens=tokens, output_dtype=np.float32, label="router"),
            self._kernels.route(logits, lists, shape=shape, bias=bias),
            self._kernels.sort(lists, shape=shape),
            self._kernels.gather(x, rows, lists, shape=shape, columns=hidden, codes=codes),
            self._kernels.combine(rows, lists, out, shape=shape, columns=hidden),
        ]

    def _products(self, case: ExpertCase) -> Sequence[Launch]:
        """Return the launches of the networks of some experts, each of which has all the tokens."""
        spec, experts = case.spec, case.key.experts
        own, width = self._weights(spec, experts), case.key.width
        shape = ExpertShape(Routing(experts, experts), case.key.tokens)
        lists, logits = ExpertLists.allocate(self._runtime, shape), self._floats(shape.pairs)
        rows = self._slot(shape.pairs * spec.columns)
        inner = spec.member_rows
        gate_up, activated = (self._slot(shape.pairs * count) for count in (sum(inner), width))
        self._kernels.route(logits, lists, shape=shape)()
        self._kernels.sort(lists, shape=shape)()
        codes = inner_codes = None
        if spec.integer_inputs:
            assert spec.then is not None  # of an ``experts`` group
            codes, inner_codes = (self._codes(one, shape.pairs) for one in (spec, spec.then))
        label = "profiling of experts"
        return [
            own.gate_up.launch(rows, gate_up, lists, shape=shape, rounded=codes, label=label),
            activate(
                self._glue,
                Segments(gate_up, gate_up, inner, (0,) * len(inner)),
                activated,
                tokens=shape.pairs,
                intermediate=width,
                rounded=inner_codes,
            ),
            own.down.launch(activated, rows, lists, shape=shape, rounded=inner_codes, label=label),
        ]

    def _weights(self, spec: OpSpec, experts: int) -> _Packed:
        """Return packed weights of so many experts, dropping others."""
        if self._packed is None or self._packed[0] != experts or self._packed[1].spec != spec:
            self._packed = None
            assert spec.then is not None  # of an ``experts`` group
            pack = partial(
                GroupedLinear.pack,
                self._runtime,
                activation_dtype=self._device.activation_dtype,
                integer_inputs=spec.integer_inputs,
                experts=experts,
            )
            made = (pack(members_for(self._runtime, own) * experts) for own in (spec, spec.then))
            self._packed = experts, _Packed(spec, *made)
        return self._packed[1]

    def _codes(self, spec: OpSpec, rows: int) -> RoundedInputs:
        return scratch_codes(self._runtime, spec.weight, rows, spec.columns)

    def _slot(self, elements: int) -> SharedArray:
        return self._filled(elements, self._device.activation_dtype)

    def _floats(self, elements: int) -> SharedArray:
        return self._filled(elements, np.dtype(np.float32))

    def _filled(self, elements: int, dtype: np.dtype[Any]) -> SharedArray:
        shared = self._runtime.shared((elements,), dtype)
        fill_shared(self._runtime, shared)
        return shared

    # -- NPU -----------------------------------------------------------------------------------------

    def _graph(self, case: ExpertCase, npu: NpuBackend) -> Record:
        key, shard = case.key, self._shard(case.spec, case.key.experts)
        form: GraphForm = key.form  # type: ignore[assignment]
        limit = npu.graph_weight_bytes
        sizes = key.experts * key.tokens, key.columns
        x, y = (self._filled(sizes[0] * sizes[1], npu.activation_dtype) for _ in range(2))
        try:
            return graph_record(
                key,
                npu,
                npu.prepare(shard, key.tokens, form),
                {"x": (x, npu.activation_dtype, sizes)},
                {"y": (y, npu.activation_dtype, sizes)},
                timer=self._device.gpu.now_ns,
                values=lambda: {} if limit is None else {MOST_WEIGHT_BYTES: float(limit)},
            )
        finally:
            npu.release(shard)

    def _shard(self, spec: OpSpec, experts: int) -> ExpertsShard:
        gpu = self._device.gpu
        part = random_ffn(gpu, spec, concatenate_rows(members_for(gpu, spec)), spec.member_rows[0])
        return ExpertsShard(tuple(range(experts)), (part,) * experts)
