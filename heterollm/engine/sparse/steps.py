"""Emits sparse attention: keys are chosen by estimated scores, and only the chosen ones are attended to.

The GPU writes codes of queries and keys. The NPU, or a kernel of the GPU, multiplies them (the estimate). The
GPU selects keys for each block of queries and attends to them (shadowAttn, sections 3 and 4). Key heads go
through in units: while the NPU estimates a unit, the GPU works on the one before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias

import numpy as np

from heterollm.base import PlanError
from heterollm.engine.builder import PassBuilder
from heterollm.engine.placed import Memory, PlacedOp, SharedOp, codes_of
from heterollm.engine.sparse.slots import score_memory, sparse_shape
from heterollm.engine.step import NOT_RUN, Buffer, Call, Operator, operator_name
from heterollm.engine.techniques.technique import Around, TechniqueSteps
from heterollm.kernels.device import Device
from heterollm.kernels.formats import BucketCount, ScoreScale, buckets
from heterollm.kernels.gpu import (
    GlueKernels,
    HeadShape,
    HeadTable,
    KvLayer,
    Launch,
    RoundedInputs,
    ScoreMemory,
    Scores,
    Selection,
    SharedArray,
    SparseShape,
)
from heterollm.kernels.npu import NpuGraph, ScoresShard
from heterollm.kernels.operators import attend_selected, estimate_scores, select_positions, write_score_codes
from heterollm.model import AttentionBlock, ModelConfig
from heterollm.solver import Plan, PlannedAttention, SparseAttention

ScoreScales: TypeAlias = Mapping[BucketCount, Mapping[int, tuple[ScoreScale, ...]]]
"""Scales of each key head, by number of buckets and layer."""

NO_SCALES: Final[ScoreScales] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class _Unit:
    """Key heads whose scores are estimated at once; ``slots`` are the first and the one behind the last."""

    heads: tuple[int, ...]
    slots: tuple[int, int]
    exponent: int

    def __str__(self) -> str:
        return f"key head{'s' * (len(self.heads) > 1)} {', '.join(map(str, self.heads))}"


@dataclass(frozen=True, slots=True)
class _Layer:
    """The attention of a layer in a pass."""

    builder: PassBuilder
    number: int
    shape: SparseShape
    scores: Scores
    table: HeadTable
    memory: ScoreMemory
    selection: Selection
    cache: KvLayer

    @property
    def query(self) -> Memory:
        return self.builder.lane.private["query"]

    def scores_of(self, unit: _Unit) -> Buffer:
        """Return the estimated scores of a unit."""
        first, stop = (slot * self.shape.rows * self.shape.keys for slot in unit.slots)
        return self.builder.byte_range(self.memory.scores, first, stop)

    def name(self, operator: Operator, unit: _Unit) -> str:
        return f"{operator_name(operator, self.number)} of {unit}"


class SparseAttentionSteps(TechniqueSteps):
    """Emits the sparse attention of layers, whose graphs and bindings serve all layers.

    On coherent memory the GPU takes up each unit behind its graph. Mapped memory is handed over as a whole:
    there the GPU begins when all graphs have run.

    Args:
        device: The device.
        config: The model.
        plan: The plan.
        context: Positions of every session.
        scales: Calibrated scales.

    Raises:
        PlanError: The plan was made with other scales than these, or there are none for a layer.
    """

    def __init__(
        self, device: Device, config: ModelConfig, plan: Plan, context: int, scales: ScoreScales
    ) -> None:
        self._device = device
        self._blocks, own = config.blocks(AttentionBlock), config.attention
        self._heads = HeadShape(own.heads, own.kv_heads, own.head_dim, context)
        self._kernels = GlueKernels(device.gpu, device.activation_dtype, device.cache_dtype)
        self._graphs: dict[tuple[ScoresShard, int], NpuGraph] = {}
        self._runs: dict[tuple[SharedArray, ScoresShard, int, int], Call] = {}
        self._tables = {
            (layer, entry.placement): self._table(layer, entry.placement, scales)
            for entry in plan.technique(PlannedAttention).entries
            if isinstance(entry.placement, SparseAttention)
            for layer in range(entry.layers[0], entry.layers[1] + 1)
        }

    def clear(self) -> None:
        """Drop the graphs; no compiled pass may run afterwards."""
        self._graphs.clear()
        self._runs.clear()

    def around(
        self, builder: PassBuilder, operator: Operator, layer: int, op: PlacedOp | None
    ) -> SparseAround | None:
        """Return sparse attention in place of the dense one of a layer."""
        if operator != "attention" or builder.phase != "prefill":
            return None
        planned = builder.plan.technique(PlannedAttention)
        placement = planned.of(builder.tokens, builder.keys, layer)
        if not isinstance(placement, SparseAttention):
            return None
        assert op is not None  # of the linear behind attention
        return SparseAround(self, builder, layer, placement, op.rounded)

    def attention(
        self,
        builder: PassBuilder,
        layer: int,
        placement: SparseAttention,
        rounded: RoundedInputs | None,
    ) -> None:
        """Append the attention of a layer.

        Args:
            builder: The pass so far.
            layer: Decoder layer.
            placement: The keys to keep, and the units of the estimate.
            rounded: Buffers for int8 codes of the output, or None.
        """
        units, block = list(_units(placement)), self._blocks[layer]
        one = _Layer(
            builder,
            layer,
            sparse_shape(self._heads, builder.tokens, builder.keys),
            Scores(block.scale, block.window, block.soft_cap),
            self._tables[layer, placement],
            *score_memory(builder.lane),
            builder.layer_cache(layer),
        )
        self._codes(one)
        if placement.estimator == "gpu":
            for unit in units:
                self._estimate(one, unit)
                self._attend(one, unit, rounded if unit is units[-1] else None)
            return
        op = SharedOp("scores", layer, one.memory.queries, one.memory.scores)
        builder.mark(op)
        builder.wait(op)
        mapped = not one.memory.queries.coherent
        if mapped:
            self._map(one, op)
        for unit in units:
            self._graph(one, op, unit)
            if not mapped:
                self._attend(one, unit, rounded if unit is units[-1] else None)
                builder.flush(op)
        if mapped:
            self._unmap(one, op)
            for unit in units:
                self._attend(one, unit, rounded if unit is units[-1] else None)

    # -- helpers -------------------------------------------------------------------------------------

    def _table(self, layer: int, placement: SparseAttention, scales: ScoreScales) -> HeadTable:
        """Upload the constants of a layer's heads."""
        own = scales.get(placement.buckets, {}).get(layer)
        if own is None:
            raise PlanError(
                f"The plan's sparse attention of layer {layer} needs a calibration of its heads.",
                fix="Give the calibration of the plan with --calibration FILE.",
            )
        for unit in _units(placement):
            for head in unit.heads:
                if own[head].exponent != unit.exponent:
                    raise PlanError(
                        f"The plan estimates scores of key head {head} of layer {layer} with exponent "
                        f"{unit.exponent}, and the calibration has {own[head].exponent}.",
                        fix="Make the plan again with this calibration.",
                    )
        return HeadTable.upload(
            self._device.gpu,
            self._heads,
            own,
            order=[head for unit in placement.units for head in unit],
            keep=placement.keep,
            buckets=buckets(placement.buckets),
        )

    def _codes(self, one: _Layer) -> None:
        """Append the kernels that write the codes of all queries and visible keys."""
        builder, memory = one.builder, one.memory
        query, step = builder.lane.private["query"], builder.lane.step
        *before, last = write_score_codes(
            *(self._kernels, query, one.cache, memory, one.table, step),
            shape=one.shape,
            window=one.scores.window,
        )
        reads: tuple[Memory, ...] = (query, one.cache.memory, step)
        name: Operator = "score codes"
        for launch in before:
            builder.kernel(name, one.number, launch, reads=reads, writes=(memory.largest,), ends=False)
        reads += (memory.largest,) * bool(before)
        writes = (memory.queries, memory.keys, memory.steps)
        builder.kernel(name, one.number, last, reads=reads, writes=writes)

    def _estimate(self, one: _Layer, unit: _Unit) -> None:
        """Append the GPU's estimate of a unit."""
        memory = one.memory
        launch = estimate_scores(
            self._kernels, memory, shape=one.shape, slots=unit.slots, exponent=unit.exponent
        )
        reads, writes = (memory.queries, memory.keys), (one.scores_of(unit),)
        self._kernel(one, "scores", unit, launch, reads, writes)

    def _graph(self, one: _Layer, op: SharedOp, unit: _Unit) -> None:
        """Append the NPU's estimate of a unit."""
        builder, memory, shape = one.builder, one.memory, one.shape
        shard = ScoresShard(len(unit.heads), shape.keys, shape.heads.head_dim, unit.exponent)
        run: Call = NOT_RUN
        if builder.builds_graphs:
            key = memory.scores, shard, shape.rows, unit.slots[0]
            if key not in self._runs:
                self._runs[key] = self._bound(one, shard, unit)
            run = self._runs[key]
        reads = [
            builder.byte_range(codes, *(slot * rows * shape.heads.head_dim for slot in unit.slots))
            for codes, rows in ((memory.queries, shape.rows), (memory.keys, shape.keys))
        ]
        builder.graph(op, run, one.name("scores", unit), reads, one.scores_of(unit))

    def _bound(self, one: _Layer, shard: ScoresShard, unit: _Unit) -> Call:
        """Return the run of a graph on the slots of a unit."""
        npu, shape, memory = self._device.npu, one.shape, one.memory
        assert npu is not None  # loading has checked the plan
        place = shard, shape.rows
        if place not in self._graphs:
            self._graphs[place] = npu.prepare(shard, shape.rows)
        count, columns, own = shape.heads.kv_heads, shape.heads.head_dim, slice(*unit.slots)
        queries = memory.queries.view(np.uint8, (count, shape.rows, columns))
        keys = memory.keys.view(np.uint8, (count, shape.keys, columns))
        scores = memory.scores.view(np.uint8, (count, shape.rows, shape.keys))
        inputs = {"queries": queries[own], "keys": keys[own]}
        return self._graphs[place].bind(inputs, {"scores": scores[own]})

    def _attend(self, one: _Layer, unit: _Unit, rounded: RoundedInputs | None) -> None:
        """Append the selection of keys and the attention to them of a unit."""
        builder, memory, chosen = one.builder, one.memory, one.selection
        query, step = builder.lane.private["query"], builder.lane.step
        out = builder.lane.shared["attention_output"]
        launch = select_positions(
            self._kernels,
            memory,
            one.table,
            chosen,
            step,
            shape=one.shape,
            slots=unit.slots,
            scores=one.scores,
        )
        given = (one.scores_of(unit), memory.steps, step)
        self._kernel(one, "selection", unit, launch, given, (chosen.positions, chosen.counts))
        first, *rest = attend_selected(
            self._kernels,
            *(query, one.cache, one.table, chosen, out, step),
            shape=one.shape,
            slots=unit.slots,
            scores=one.scores,
            rounded=rounded,
        )
        reads = (query, one.cache.memory, step, chosen.positions, chosen.counts)
        self._kernel(one, "attention", unit, first, reads, (out,))
        for launch in rest:
            builder.kernel("rounding of inputs", one.number, launch, reads=(out,), writes=codes_of(rounded))

    def _kernel(
        self,
        one: _Layer,
        operator: Operator,
        unit: _Unit,
        launch: Launch,
        reads: tuple[Memory, ...],
        writes: tuple[Memory, ...],
    ) -> None:
        one.builder.kernel(
            operator, one.number, launch, reads=reads, writes=writes, label=one.name(operator, unit)
        )

    def _map(self, one: _Layer, op: SharedOp) -> None:
        builder, memory, shape = one.builder, one.memory, one.shape
        for codes, size in ((memory.queries, shape.query_bytes), (memory.keys, shape.key_bytes)):
            read = functools.partial(codes.acquire_to_read, size)
            builder.on_host(op, "acquire_to_read", read, reads=(builder.byte_range(codes, 0, size),))
        write = functools.partial(memory.scores.acquire, shape.score_bytes)
        writes = (builder.byte_range(memory.scores, 0, shape.score_bytes),)
        builder.on_host(op, "acquire", write, writes=writes)

    def _unmap(self, one: _Layer, op: SharedOp) -> None:
        for slot in (one.memory.queries, one.memory.keys):
            one.builder.on_host(op, "release", slot.release, reads=(slot,))
        slot = one.memory.scores
        one.builder.on_host(op, "release", slot.release, writes=(slot,))


@dataclass(frozen=True)
class SparseAround(Around):
    """Sparse attention of a layer of a pass; arguments as for :meth:`SparseAttentionSteps.attention`."""

    steps: SparseAttentionSteps
    builder: PassBuilder
    layer: int
    placement: SparseAttention
    rounded: RoundedInputs | None

    def run(self, default: Callable[[], None]) -> None:
        """Append sparse attention."""
        del default
        self.steps.attention(self.builder, self.layer, self.placement, self.rounded)


def _units(placement: SparseAttention) -> Iterator[_Unit]:
    """Yield the units in the order of their slots."""
    first = 0
    for heads, exponent in zip(placement.units, placement.exponents, strict=True):
        yield _Unit(heads, (first, first + len(heads)), exponent)
        first += len(heads)
