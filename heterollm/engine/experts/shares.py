"""The NPU's share of a mixture of experts: groups of experts in graphs, on rows that the GPU gathers.

The rows of a layer's groups follow one another, in each group those of one expert after the other, as many as
the capacity. Rows do not mix, so that those past an expert's tokens keep what they hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from msgspec import Struct

from heterollm.engine.builder import PassBuilder
from heterollm.engine.experts.slots import EXPERT_NPU_INPUT, EXPERT_NPU_OUTPUT, EXPERT_SALIENCY
from heterollm.engine.npu_shards import PlannedGraph, planned_shard
from heterollm.engine.placed import PlacedOp
from heterollm.engine.step import NOT_RUN, Call, LinearWork, Operator, operator_name
from heterollm.engine.techniques.technique import Around, TechniqueSteps
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import COUNTED_PAIRS, DeviceMemory, GpuRuntime, SharedArray, TakenRows
from heterollm.kernels.npu import NpuGraph
from heterollm.kernels.ops import OpSpec
from heterollm.model import ModelWeights
from heterollm.solver import ExpertsPlacement, PlannedExperts

SHOWN_EXPERTS: Final = 6
WORD_BYTES: Final = 4


class ExpertPairs(Struct, frozen=True):
    """Pairs of a token and an expert that it chose, in passes with experts on the NPU.

    Args:
        layer: Decoder layer.
        pairs: All pairs.
        on_npu: Those that the NPU computed.
        overflow: Those beyond the capacity of an expert on the NPU, which the GPU computed.
        dropped: Those beyond it that nobody computed.
    """

    layer: int
    pairs: int
    on_npu: int
    overflow: int
    dropped: int


class ExpertCounts:
    """The counts of all layers, in memory of the GPU: the kernel that orders the pairs adds to them.

    Args:
        runtime: The GPU.
        layers: Layers of the model; 0 for one without experts.

    Attributes:
        memory: uint32 ``[layers, COUNTED_PAIRS]``.
    """

    def __init__(self, runtime: GpuRuntime, layers: int) -> None:
        self._runtime = runtime
        self._words = max(1, layers) * COUNTED_PAIRS
        size = self._words * WORD_BYTES
        self.memory = DeviceMemory(runtime.scratch(size), size)
        self.reset()

    def read(self) -> tuple[ExpertPairs, ...]:
        """Return the counts of layers that had experts on the NPU; waits for the queue."""
        if not self._runtime.computes:
            return ()
        counts = np.empty((self._words // COUNTED_PAIRS, COUNTED_PAIRS), np.uint32)
        self._runtime.copy(counts, self.memory.buffer)
        return tuple(ExpertPairs(layer, *own) for layer, own in enumerate(counts.tolist()) if own[0])

    def notes(self) -> tuple[str, ...]:
        """Return a sentence on the shares; none if the NPU had no experts."""
        found = self.read()
        if not found:
            return ()
        pairs = sum(own.pairs for own in found)

        def share(count: int) -> str:
            return f"{count / pairs:.1%}"

        text = f"The NPU computed {share(sum(own.on_npu for own in found))} of the {pairs} choices of experts"
        for count, what in (
            (sum(own.overflow for own in found), "the GPU computed {} beyond the NPU's capacities"),
            (sum(own.dropped for own in found), "{} beyond the NPU's capacities were dropped"),
        ):
            if count:
                text += f"; {what.format(share(count))}"
        return (f"{text}.",)

    def reset(self) -> None:
        """Count from 0 again; the queue must be empty."""
        if self._runtime.computes:
            self._runtime.copy(self.memory.buffer, np.zeros(self._words, np.uint32))


@dataclass(frozen=True)
class SharedExperts(Around):
    """The experts of a layer in a pass, of which the NPU computes some.

    Args:
        shares: The technique.
        builder: The pass so far.
        spec: The experts.
        placement: Their placement.
        taken: The rows that the NPU takes.
        npu_source: The memory that the NPU reads.
        npu_target: The memory that it writes.
    """

    shares: ExpertShares
    builder: PassBuilder
    spec: OpSpec
    placement: ExpertsPlacement
    taken: TakenRows
    npu_source: SharedArray
    npu_target: SharedArray
    operator: Operator = "experts"

    @property
    def layer(self) -> int:
        """The decoder layer."""
        return self.spec.layer

    @property
    def name(self) -> str:
        """The operator with its layer."""
        return operator_name(self.operator, self.layer)

    def acquire(self) -> None:
        """Append the maps of the rows."""
        size = self.placement.rows * self.shares.row_bytes(self.spec)
        self.builder.acquire(self, size, size)

    def graphs(self) -> None:
        """Append the runs of the graphs, and the end of the maps."""
        builder, row_bytes = self.builder, self.shares.row_bytes(self.spec)
        for graph, first in _graphs(self.spec, self.placement):
            stop = first + len(graph.experts) * graph.length
            reads, writes = (
                builder.byte_range(slot, first * row_bytes, stop * row_bytes)
                for slot in (self.npu_source, self.npu_target)
            )
            run = self.shares.run(self, graph, first, stop) if builder.builds_graphs else NOT_RUN
            builder.graph(self, run, _label(self, graph), (reads,), writes, _work(graph))
        if not self.npu_source.coherent:
            builder.release(self)


class ExpertShares(TechniqueSteps):
    """Emits the NPU's share of experts, whose graphs and bindings serve the passes of all lengths.

    Args:
        device: The device.
        weights: The model's weights.

    Attributes:
        counts: Counts of pairs.
    """

    def __init__(self, device: Device, weights: ModelWeights) -> None:
        self._device = device
        self._weights = weights
        self._specs = {spec.layer: spec for spec in weights.experts}
        self._tables: dict[ExpertsPlacement, DeviceMemory] = {}
        self._graphs: dict[PlannedGraph, NpuGraph] = {}
        self._runs: dict[tuple[SharedArray, PlannedGraph, int], Call] = {}
        self.counts = ExpertCounts(device.gpu, weights.config.layers if weights.experts else 0)

    def clear(self) -> None:
        """Drop the graphs; no compiled pass may run afterwards."""
        self._graphs.clear()
        self._runs.clear()
        self._tables.clear()

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence on the shares; none if the NPU had no experts."""
        return self.counts.notes()

    @property
    def memories(self) -> Mapping[str, DeviceMemory]:
        """The counts of pairs."""
        return {"expert_counts": self.counts.memory}

    def reset(self) -> None:
        """Count from 0 again."""
        self.counts.reset()

    def around(
        self, builder: PassBuilder, operator: Operator, layer: int, op: PlacedOp | None
    ) -> SharedExperts | None:
        """Return the experts of a layer, of which the NPU computes some; None if it computes none."""
        del op
        if operator != "experts" or builder.phase != "prefill":
            return None
        spec, placement = self._specs[layer], builder.plan.technique(PlannedExperts).of(builder.tokens, layer)
        if not placement.groups:
            return None
        place = layer * COUNTED_PAIRS
        shared, private = builder.lane.shared, builder.lane.private
        saliency = private[EXPERT_SALIENCY] if placement.overflow == "drop" else None
        taken = TakenRows(self._table(spec, placement), placement.rows, self.counts.memory, place, saliency)
        slots = shared[EXPERT_NPU_INPUT], shared[EXPERT_NPU_OUTPUT]
        return SharedExperts(self, builder, spec, placement, taken, *slots)

    def run(self, op: SharedExperts, graph: PlannedGraph, first: int, stop: int) -> Call:
        """Return the run of a graph on its rows of the slots, bound once for all passes."""
        key = op.npu_source, graph, first
        if key not in self._runs:
            self._runs[key] = self._bound(op, graph, first, stop)
        return self._runs[key]

    def row_bytes(self, spec: OpSpec) -> int:
        """Return the size of a row of the slots."""
        return spec.columns * self._device.activation_dtype.itemsize

    def _bound(self, op: SharedExperts, graph: PlannedGraph, first: int, stop: int) -> Call:
        """Return the run of a graph on its rows of the slots."""
        npu, dtype = self._device.npu, self._device.activation_dtype
        assert npu is not None  # loading has checked the plan
        if graph not in self._graphs:
            shard = planned_shard(self._weights, {}, graph)
            self._graphs[graph] = npu.prepare(shard, graph.length, graph.form)
        shape = (op.placement.rows, op.spec.columns)
        x, y = (slot.view(dtype, shape)[first:stop] for slot in (op.npu_source, op.npu_target))
        return self._graphs[graph].bind({"x": x}, {"y": y})

    def _table(self, spec: OpSpec, placement: ExpertsPlacement) -> DeviceMemory:
        """Return the capacity and the first row of each expert, on the GPU."""
        assert spec.experts is not None  # by expert_specs
        if placement not in self._tables:
            placement.capacities(spec.experts.experts)  # refuses experts that are not the layer's
            table = np.zeros((spec.experts.experts, 2), np.int32)
            for graph, first in _graphs(spec, placement):
                for place, expert in enumerate(graph.experts):
                    table[expert] = graph.length, first + place * graph.length
            self._tables[placement] = DeviceMemory(self._device.gpu.upload(table), table.nbytes)
        return self._tables[placement]


def _graphs(spec: OpSpec, placement: ExpertsPlacement) -> Iterator[tuple[PlannedGraph, int]]:
    """Yield the graphs of a layer in order, each with the first of its rows."""
    first = 0
    for group in placement.groups:
        yield PlannedGraph.of_experts(spec, placement, group), first
        first += len(group.experts) * group.capacity


def _label(op: SharedExperts, graph: PlannedGraph) -> str:
    shown = ", ".join(map(str, graph.experts[:SHOWN_EXPERTS]))
    more = ", …" if len(graph.experts) > SHOWN_EXPERTS else ""
    form = "" if graph.form is None else f" as {graph.form}"
    return f"{op.name} {shown}{more} capacity {graph.length}{form}"


def _work(graph: PlannedGraph) -> LinearWork:
    """Return the work of a graph; each weight meets as many tokens as the capacity."""
    one = LinearWork.of_ffn(graph.spec, graph.length, graph.npu_rows[0])
    count = len(graph.experts)
    return replace(one, flops=one.flops * count, weight_bytes=one.weight_bytes * count)
