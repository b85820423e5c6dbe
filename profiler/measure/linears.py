"""Measures linear groups: one shard at a time, on one processor, through the classes that a pass runs.

A GPU shard is timed inside a busy queue, without the host's wake-up; an NPU shard from the call to its return
on the calling thread, as the engine runs it. Weights and activations are random, padding rows included. Where
a model is larger than the caches, the timed processor empties them before each run of few tokens, outside the
time. The time leaves out rounding inputs to int8: the operator before a linear does that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
from msgspec import structs

from heterollm.base import DeviceError, HeteroLLMError
from heterollm.kernels.device import Device
from heterollm.kernels.formats import LinearWeight, concatenate_rows, take_rows
from heterollm.kernels.gpu import GpuLinear, SharedArray, kernel_source_hash, scratch_codes
from heterollm.kernels.npu import (
    GRAPH_VERSION,
    INTEGER_FORMS,
    FfnRanges,
    GraphForm,
    LinearRanges,
    LinearShard,
    NpuBackend,
    NpuGraph,
    NpuShard,
    StaticRanges,
    edge_dtype,
)
from heterollm.kernels.ops import OpSpec
from heterollm.model import ModelShape
from heterollm.profiler.measure.builds import build_prior_s
from heterollm.profiler.measure.caches import COLD_TOKENS, HostReader, eviction_bytes
from heterollm.profiler.measure.gpu_timer import gpu_timer
from heterollm.profiler.measure.npu_timer import CORE_BYTES, CORE_FLOPS, MEMORY_BYTES, graph_record, npu_run_s
from heterollm.profiler.measure.point_filter import PointFilter
from heterollm.profiler.measure.random_data import fill_shared, members_for, random_ffn, weights_key_of
from heterollm.profiler.measure.sampling import NOTHING_COMPUTED_S, SLOW_US, taken
from heterollm.profiler.measure.task import Task
from heterollm.profiler.measure.timing import Timer
from heterollm.profiler.records import GraphKey, Key, LinearKey, LinearPoint, Processor, Record
from heterollm.profiler.work import SkippedPoints, Tier, WorkPoint, enumerate_points

EMULATED_RUNS: Final = 3
"""Emulated runs whose CPU time is measured; the smallest repeats."""

LINEAR_RANGES: Final = LinearRanges(8.0)
INT8_RANGES: Final = LinearRanges(8.0, 8.0, bits=8)
FFN_RANGES: Final = FfnRanges(8.0, 8.0, 8.0, 8.0, 64.0, 64.0)
"""Ranges of random activations for integer forms; times do not depend on them."""

STAGE: Final = "Linear layers"
TASK_S: Final = 1.0

GPU_FLOPS: Final = 1e12
USUAL_RUNS: Final = 8
USUAL_SLOW_RUNS: Final = 4
OVERHEAD_S: Final = 0.02
"""Overhead of a point: preparing launches and graphs, and its share of the random weights."""


def code_of(processor: Processor) -> str:
    """Return the version of the code that computes linears on a processor, as in :class:`LinearKey`."""
    return kernel_source_hash() if processor == "gpu" else f"graph-{GRAPH_VERSION}"


@dataclass(slots=True)
class _Group:
    """Random weights of one group, and the layer, shards and graphs prepared from them."""

    spec: OpSpec
    members: list[LinearWeight]
    linear: GpuLinear | None = None
    shards: dict[tuple[tuple[int, ...], StaticRanges | None], NpuShard] = field(default_factory=dict)
    prepared: set[LinearPoint] = field(default_factory=set)


class LinearBench:
    """Measures points on an opened device; holds the weights of one group at a time.

    Args:
        device: The device; the calling thread is its engine thread.
        timer: Times NPU runs, in nanoseconds; the device's by default.

    Attributes:
        evictions: How often the NPU's thread emptied the caches.
    """

    def __init__(self, device: Device, *, timer: Timer | None = None) -> None:
        self.evictions = 0
        self._device = device
        self._timer = timer or device.gpu.now_ns
        self._group: _Group | None = None
        self._slots: dict[str, SharedArray] = {}
        self._reader: HostReader | None = None

    def measure(self, work: WorkPoint) -> list[Record]:
        """Measure one point.

        Returns:
            Its record and, where a graph was built or loaded for it, the record of that. A failure is a
            record too.
        """
        key = LinearKey(work.processor, work.point, code_of(work.processor))
        try:
            group = self._load(work.spec)
            if work.processor == "gpu":
                return [self._on_gpu(key, work, group)]
            return self._on_npu(key, work, group)
        except HeteroLLMError as error:
            return [Record(key, error=error.message)]

    def close(self) -> None:
        """Free weights, graphs and slots; the next measurement makes them again."""
        self._drop()
        self._slots.clear()
        self._reader = None

    # -- the processors ------------------------------------------------------------------------------

    def _on_gpu(self, key: LinearKey, work: WorkPoint, group: _Group) -> Record:
        timer, point, spec = gpu_timer(self._device.gpu), work.point, work.spec
        dtype = self._device.activation_dtype
        if group.linear is None:
            group.linear = GpuLinear.pack(
                timer.runtime, group.members, activation_dtype=dtype, integer_inputs=spec.integer_inputs
            )
        # Alone on the GPU the head writes the logits; beside the NPU its rows of them.
        whole_head = spec.group == "head" and point.member_rows == spec.member_rows
        output = np.dtype(np.float32) if whole_head else dtype
        x, y = self._slot_pair(point, dtype, output)
        kept = tuple(
            (rows - own, rows) for rows, own in zip(spec.member_rows, point.member_rows, strict=True)
        )
        make = partial(
            group.linear.launch,
            *(x, y),
            tokens=point.tokens,
            kept=kept,
            output_dtype=output,
            label=f"profiling of {spec.group}",
        )
        launch = make()
        if spec.integer_inputs:
            # This launch rounds the inputs first and leaves their codes behind.
            launch()
            launch = make(rounded=scratch_codes(timer.runtime, spec.weight, point.tokens, point.columns))
        cold = point.streamed and point.tokens <= COLD_TOKENS
        return taken(key, lambda: timer.time_us([launch], cold=cold), lambda: timer.time_us([launch]))

    def _on_npu(self, key: LinearKey, work: WorkPoint, group: _Group) -> list[Record]:
        npu, point = self._device.npu, work.point
        if npu is None:
            raise DeviceError("The device has no NPU.", fix="Give it at least one thread.")
        shard = self._shard(group, point)
        graph, records = self._graph(npu, group, shard, point)
        form: GraphForm = point.form  # type: ignore[assignment]
        dtype = edge_dtype(form, npu.activation_dtype)
        x, y = self._slot_pair(point, dtype, dtype)
        cold = npu.time_kind == "real" and point.streamed and point.tokens <= COLD_TOKENS
        record = graph_record(
            key,
            npu,
            graph,
            {"x": (x, dtype, (point.tokens, point.columns))},
            {"y": (y, dtype, (point.tokens, point.outputs))},
            timer=self._timer,
            evict=self._evict if cold else None,
            values=lambda: _cpu_times(npu, shard, point),
        )
        return [record, *records]

    def _evict(self) -> None:
        if self._reader is None:
            self._reader = HostReader(eviction_bytes(self._device.gpu.traits.cache_bytes))
        self._reader()
        self.evictions += 1

    # -- weights, graphs and buffers -----------------------------------------------------------------

    def _load(self, spec: OpSpec) -> _Group:
        """Return the weights of a group, dropping those of another."""
        if self._group is None or self._group.spec != spec:
            self._drop()
            self._group = _Group(spec, members_for(self._device.gpu, spec))
        return self._group

    def _drop(self) -> None:
        if self._group is not None and self._device.npu is not None:
            for shard in self._group.shards.values():
                self._device.npu.release(shard)
        self._group = None

    def _shard(self, group: _Group, point: LinearPoint) -> NpuShard:
        rows, spec = point.member_rows, group.spec
        linear_ranges = INT8_RANGES if point.form == "static_int8" else LINEAR_RANGES
        integer = point.form in INTEGER_FORMS
        place = rows, linear_ranges if integer else None
        if place not in group.shards:
            members = [
                take_rows(member, [(0, own)]) for member, own in zip(group.members, rows, strict=True) if own
            ]
            weight = concatenate_rows(members)
            if spec.then is None:
                group.shards[place] = LinearShard(
                    weight,
                    spec.layer,
                    spec.group,
                    tuple((0, own) for own in rows),
                    weights_key_of(spec),
                    spec.integer_inputs,
                    linear_ranges if integer else None,
                )
            else:
                group.shards[place] = random_ffn(
                    self._device.gpu, spec, weight, rows[0], FFN_RANGES if integer else None
                )
        return group.shards[place]

    def _graph(
        self, npu: NpuBackend, group: _Group, shard: NpuShard, point: LinearPoint
    ) -> tuple[NpuGraph, list[Record]]:
        """Return a graph and, if this call built or loaded it, the record of that."""
        form: GraphForm = point.form  # type: ignore[assignment]
        if point in group.prepared:
            return npu.prepare(shard, point.tokens, form), []
        values: dict[str, float] = {}
        compiled, loaded = npu.compiled_count, npu.loaded_count
        now_ns = self._device.gpu.now_ns
        begin_ns = now_ns()
        # Only some backends keep graphs in files; there loading is timed apart from building.
        build: Callable[..., Any] | None = getattr(npu, "build", None)
        if build is not None:
            values["size_bytes"] = float(build(shard, point.tokens, form).size_bytes)
        built_us, begin_ns = (now_ns() - begin_ns) / 1e3, now_ns()
        graph = npu.prepare(shard, point.tokens, form)
        prepared_us = (now_ns() - begin_ns) / 1e3
        group.prepared.add(point)
        is_new = npu.compiled_count > compiled
        if not is_new and npu.loaded_count == loaded:
            return graph, []
        if is_new:
            values["build_us"] = prepared_us if build is None else built_us
        samples = () if is_new and build is None else (prepared_us,)
        return graph, [Record(GraphKey(point, code_of("npu")), samples, values=values)]

    def _slot_pair(
        self, point: LinearPoint, input_dtype: np.dtype[Any], output_dtype: np.dtype[Any]
    ) -> tuple[SharedArray, SharedArray]:
        x = self._slot("x", point.tokens * point.columns, input_dtype)
        return x, self._slot("y", point.tokens * point.outputs, output_dtype)

    def _slot(self, name: str, elements: int, dtype: np.dtype[Any]) -> SharedArray:
        """Return memory of at least that size; inputs are random in all of it."""
        key = f"{name} {dtype}"
        held = self._slots.get(key)
        if held is None or held.array.size < elements:
            held = self._slots[key] = gpu_timer(self._device.gpu).runtime.shared((elements,), dtype)
            fill_shared(self._device.gpu, held)
        return held


def _cpu_times(npu: NpuBackend, shard: NpuShard, point: LinearPoint) -> dict[str, float]:
    """Return the least and the most CPU time of a run, where it is emulated."""
    form: GraphForm = point.form  # type: ignore[assignment]
    times_us = npu.cpu_times_us(shard, point.tokens, form, runs=EMULATED_RUNS)
    return {} if times_us is None else {"cpu_us": min(times_us), "cpu_us_most": max(times_us)}


# -- tasks -------------------------------------------------------------------------------------------


def linear_tasks(
    device: Device,
    shapes: Iterable[ModelShape],
    *,
    tier: Tier = 1,
    core: bool = False,
    known: Mapping[Key, Record] | None = None,
) -> tuple[list[Task], SkippedPoints]:
    """Return the work of measuring the linear groups of some models, the most needed first.

    Args:
        device: The opened device; tasks run on the thread that opened it.
        shapes: The models.
        tier: How fine: 0 for what plans need, 1 by default, 2 for the full grid.
        core: Whether whole groups alone are essential, rather than all of tier 0.
        known: Earlier measurements, which tell poor forms.

    Returns:
        The tasks, of which those of tier 0 are essential, and the skipped points. Tasks add to these as they
        run: they drop points that earlier measurements rule out.
    """
    points, skipped = enumerate_points(
        shapes,
        device.npu,
        cache_bytes=device.gpu.traits.cache_bytes,
        max_buffer_bytes=device.gpu.traits.max_buffer_bytes,
    )
    bench, point_filter = (
        LinearBench(device),
        PointFilter(known or {}, comparable=device.time_kind != "emulated"),
    )

    def run(chunk: Sequence[WorkPoint]) -> Iterator[Record]:
        for work in chunk:
            objection = point_filter.objection(work)
            if objection is not None:
                skipped.add(objection)
                continue
            for record in bench.measure(work):
                point_filter.learn(record)
                yield record

    tasks = [
        Task(
            STAGE,
            tuple(LinearKey(work.processor, work.point, code_of(work.processor)) for work in chunk),
            partial(run, chunk),
            sum(_estimate_s(work, device) for work in chunk),
            chunk[0].is_core if core else chunk[0].tier == 0,
            graphs=sum(builds[work.point] > 0 for work in chunk),
            build_s=sum(builds[work.point] for work in chunk),
        )
        for chunk, builds in _chunks([work for work in points if work.tier <= tier], device)
    ]
    return sorted(tasks, key=lambda task: not task.essential), skipped


def _chunks(
    points: Iterable[WorkPoint], device: Device
) -> Iterator[tuple[list[WorkPoint], Mapping[LinearPoint, float]]]:
    """Yield points of one group, processor and tier that take about a second, and the build times."""
    chunk: list[WorkPoint] = []
    total_s = 0.0
    builds: dict[LinearPoint, float] = {}
    built: set[LinearPoint] = set()
    for work in points:
        # Where one graph serves all lengths, the first of a shard builds it.
        graph = structs.replace(work.point, tokens=0) if _shares_lengths(device) else work.point
        is_new = work.processor == "npu" and graph not in built
        built.add(graph)
        weights = work.point.flops // (2 * work.point.tokens)
        builds[work.point] = build_prior_s(device, weights) if is_new else builds.get(work.point, 0.0)
        point_s = _estimate_s(work, device) + builds[work.point]
        same = chunk and _kind(chunk[0]) == _kind(work)
        if chunk and not (same and total_s + point_s <= TASK_S):
            yield chunk, builds
            chunk, total_s = [], 0.0
        chunk.append(work)
        total_s += point_s
    if chunk:
        yield chunk, builds


def _kind(work: WorkPoint) -> tuple[object, ...]:
    return work.spec, work.processor, work.tier, work.is_core


def _shares_lengths(device: Device) -> bool:
    return device.npu is not None and not device.npu.graphs_by_length


def _estimate_s(work: WorkPoint, device: Device) -> float:
    """Return about how long a point takes to measure."""
    if not device.gpu.computes:
        return NOTHING_COMPUTED_S
    point = work.point
    if work.processor == "gpu":
        traits = device.gpu.traits
        rates = (
            (CORE_FLOPS * traits.compute_units, CORE_BYTES) if traits.is_cpu else (GPU_FLOPS, MEMORY_BYTES)
        )
        run_s = max(point.flops / rates[0], point.weight_bytes / rates[1])
    else:
        run_s = npu_run_s(device, point.flops, point.weight_bytes)
    runs = USUAL_RUNS if run_s * 1e6 < SLOW_US else USUAL_SLOW_RUNS
    if point.streamed and point.tokens <= COLD_TOKENS:
        run_s += eviction_bytes(device.gpu.traits.cache_bytes) / CORE_BYTES
    return OVERHEAD_S + run_s * runs
