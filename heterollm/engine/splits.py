"""Emits the steps of an operator: the shards of both processors, and the fence between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from heterollm.engine.builder import PassBuilder, PlacedOp
from heterollm.engine.npu_shards import (
    PlannedGraph,
    context_graphs,
    npu_shard,
    planned_contexts,
    planned_graphs,
)
from heterollm.engine.saturation import SaturationCount
from heterollm.engine.step import NOT_RUN, Buffer, Call, LinearWork, Step, operator_name, shard_name
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import DeviceMemory, GpuLinear, Launch, Segments, SharedArray
from heterollm.kernels.npu import INTEGER_FORMS, GraphForm, NpuGraph, NpuShard, StaticRanges
from heterollm.kernels.ops import Group, OpSpec
from heterollm.model import ModelWeights
from heterollm.solver import Placement, Plan

__all__ = ["NO_RANGES", "SplitEmitter"]

NO_RANGES: Final[Mapping[tuple[int, Group], StaticRanges]] = MappingProxyType({})
SHOWN_NAMES: Final = 6


class SplitEmitter:
    """Emits each operator according to its placement.

    The order of an operator's steps on coherent memory is: the kernels that write its input, the mark, the
    GPU's shard, the wait for the mark, the NPU's graphs. So the GPU continues from the input's kernels to its
    shard without waiting for the host. No wait follows, since the kernels that read the output are enqueued
    after the NPU has returned. A map waits for the whole queue, so that mapped memory must be acquired before
    the GPU's shard is enqueued. Only the bytes of the NPU are mapped: under a sequence split the GPU writes
    its tokens to the same slot meanwhile.
    """

    def __init__(
        self,
        device: Device,
        weights: ModelWeights,
        plan: Plan,
        ranges: Mapping[tuple[int, Group], StaticRanges] = NO_RANGES,
    ) -> None:
        self._device = device
        self._weights = weights
        self._ranges = ranges
        self._float_operators: dict[str, None] = {}
        self.saturation = SaturationCount()
        self._graphs: dict[tuple[int, Group, tuple[int, ...], str | None, int], NpuGraph] = {}
        packager = device.packager
        if packager is not None and packager.context_layers:
            graphs = [
                replace(graph, form=self._form(graph.spec, graph.npu_rows, graph.form))
                for graph in planned_graphs(plan, weights.specs)
            ]
            contexts = planned_contexts(graphs, packager.context_layers)
            packager.package(context_graphs(contexts, self._shard))

    @property
    def notes(self) -> tuple[str, ...]:
        """Operators that keep float activations against the plan, and saturated outputs."""
        names = list(self._float_operators)
        if not names:
            return self.saturation.notes()
        shown = ", ".join(names[:SHOWN_NAMES]) + (", …" if len(names) > SHOWN_NAMES else "")
        return (
            f"The calibration has no ranges that suit {len(names)} operators, which compute with float "
            f"activations instead of integers: {shown}.",
            *self.saturation.notes(),
        )

    def clear(self) -> None:
        """Drop the graphs; no compiled pass may run afterwards."""
        self._graphs.clear()
        self.saturation.clear()

    def linear(self, builder: PassBuilder, op: PlacedOp, linear: GpuLinear) -> Segments:
        """Append the steps of a group of linears, whose GPU weights are ``linear``, and return the output."""
        spec, placement, tokens = op.spec, op.placement, builder.tokens
        rows = spec.member_rows
        if not placement.npu_lengths:
            launch = linear.launch(op.source, op.gpu_output, tokens=tokens, rounded=op.rounded, label=op.name)
            builder.steps += self._rows(builder, op, launch, op.gpu_output, (0,) * len(rows))
            builder.end_operator(op.operator, op.layer)
            return Segments(op.gpu_output, op.gpu_output, rows, (0,) * len(rows))
        if placement.npu_rows != rows:
            launch = linear.launch(
                op.source,
                op.gpu_output,
                tokens=tokens,
                kept=tuple(zip(placement.npu_rows, rows, strict=True)),
                rounded=op.rounded,
                label=op.name,
            )
            own = self._rows(builder, op, launch, op.gpu_output, placement.npu_rows)
            self._split(builder, op, own)
            return Segments(op.npu_output, op.gpu_output, rows, placement.npu_rows)
        # A sequence split has one segment: the GPU writes the rows after those of the NPU.
        self._split(builder, op, self._tokens_left(builder, op, linear))
        return Segments(op.npu_output, op.npu_output, rows, placement.npu_rows)

    def ffn(self, builder: PassBuilder, op: PlacedOp, gpu: Sequence[Step]) -> Segments:
        """Append the steps of an ffn operator and return the output: one array, or two that are to be added.

        Args:
            builder: The pass so far.
            op: The operator.
            gpu: Steps of the GPU's shard in order; without them the NPU computes the whole operator.
        """
        self._split(builder, op, gpu)
        assert op.spec.then is not None
        rows = op.spec.then.member_rows
        if gpu:
            return Segments(op.npu_output, op.gpu_output, rows, (0,), join="sum")
        return Segments(op.npu_output, op.npu_output, rows, rows)

    def end(self, builder: PassBuilder, *, waits: bool) -> None:
        """Append the steps that wait for the end of a pass.

        The last step finishes the queue, which costs little by then, because a flag does not report the
        failure of a kernel.

        Args:
            builder: The pass so far.
            waits: Whether a fence with the pass's strategy comes first.
        """
        fence = builder.fence(None) if waits else None
        if fence is not None and fence.strategy not in ("finish", "event"):
            if fence.launch is not None and builder.merges:
                builder.flag(None, fence.launch)
                builder.sent(None)
            else:
                builder.mark(None)
            builder.wait(None)
        builder.finish()

    # -- helpers -------------------------------------------------------------------------------------

    def _split(self, builder: PassBuilder, op: PlacedOp, gpu: Sequence[Step]) -> None:
        """Append the steps of both processors.

        Args:
            builder: The pass so far.
            op: The operator.
            gpu: Steps of the GPU's shard, if it has one.
        """
        mapped = not op.source.coherent
        if mapped:
            self._start_mapped(builder, op, gpu)
        else:
            self._start(builder, op, gpu)
        self._graph_runs(builder, op)
        if mapped:
            builder.release(op)
        if gpu:
            builder.end_operator(op.operator, op.layer)

    def _start(self, builder: PassBuilder, op: PlacedOp, gpu: Sequence[Step]) -> None:
        """Append the GPU's shard and the fence before the NPU's."""
        fence = builder.fence(op)
        if fence.strategy == "finish":
            # The wait covers the whole queue, so that the GPU's shard must follow it.
            builder.wait(op)
            _enqueue(builder, op, gpu)
        elif fence.launch is not None and builder.merges:
            # The mark and the GPU's shard join the launch of the kernels that write the input.
            builder.flag(op, fence.launch)
            builder.steps += gpu
            builder.sent(op)
            builder.wait(op)
        else:
            builder.mark(op)
            _enqueue(builder, op, gpu)
            builder.wait(op)

    def _start_mapped(self, builder: PassBuilder, op: PlacedOp, gpu: Sequence[Step]) -> None:
        # No kernel may be enqueued between mark and acquire, since mapping waits for the whole queue.
        builder.mark(op)
        builder.wait(op)
        tokens, item = sum(op.placement.npu_lengths), self._device.activation_dtype.itemsize
        builder.acquire(op, tokens * op.spec.columns * item, tokens * _npu_rows(op) * item)
        _enqueue(builder, op, gpu)

    def _rows(
        self,
        builder: PassBuilder,
        op: PlacedOp,
        launch: Launch,
        output: DeviceMemory,
        npu_rows: tuple[int, ...],
    ) -> list[Step]:
        """Return the steps of the rows of each member from ``npu_rows`` on."""
        spec = op.spec
        label = shard_name(op.name, spec, tuple(zip(npu_rows, spec.member_rows, strict=True)))
        work = LinearWork.of_rows(spec, builder.tokens, spec.rows - sum(npu_rows))
        return builder.shard(op, launch, label, op.source, output, work, op.rounded)

    def _tokens_left(self, builder: PassBuilder, op: PlacedOp, linear: GpuLinear) -> list[Step]:
        """Return the steps of the tokens after those of the NPU, in its slot, if there are any."""
        spec, first = op.spec, sum(op.placement.npu_lengths)
        count = builder.tokens - first
        if count <= 0:
            return []
        launch = linear.launch(op.source, op.npu_output, tokens=count, first_token=first, label=op.name)
        item = self._device.activation_dtype.itemsize
        reads = _tokens_of(builder, op.source, spec.columns * item, first, count)
        writes = _tokens_of(builder, op.npu_output, spec.rows * item, first, count)
        label = f"{op.name} tokens {first}:{builder.tokens}"
        return builder.shard(op, launch, label, reads, writes, LinearWork.of_rows(spec, count, spec.rows))

    def _graph_runs(self, builder: PassBuilder, op: PlacedOp) -> None:
        spec, placement = op.spec, op.placement
        dtype, total = self._device.activation_dtype, sum(placement.npu_lengths)
        rows = _npu_rows(op)
        x = op.source.view(dtype, (total, spec.columns))
        y = op.npu_output.view(dtype, (total, rows))
        shard = shard_name(op.name, spec, tuple((0, own) for own in placement.npu_rows))
        chosen = self._form(spec, placement.npu_rows, placement.form)  # type: ignore[arg-type]
        form = "" if chosen is None else f" as {chosen}"
        first = 0
        for length in placement.npu_lengths:
            if spec.then is None:
                work = LinearWork.of_rows(spec, length, rows)
            else:
                work = LinearWork.of_ffn(spec, length, placement.npu_rows[0])
            tokens = slice(first, first + length)
            reads = _tokens_of(builder, op.source, spec.columns * dtype.itemsize, first, length)
            writes = _tokens_of(builder, op.npu_output, rows * dtype.itemsize, first, length)
            label = f"{shard} tokens {first}:{first + length}{form}"
            run: Call = NOT_RUN
            if builder.builds_graphs:
                run = self._graph(spec, placement, chosen, length).bind(x[tokens], y[tokens])
                if chosen in INTEGER_FORMS:
                    own = y[first : min(first + length, builder.tokens)]
                    run = self.saturation.counted(run, own, self._ranges[spec.layer, spec.group], op.name)
            builder.graph(op, run, label, reads, writes, work)
            first += length

    def _form(self, spec: OpSpec, npu_rows: tuple[int, ...], form: GraphForm | None) -> GraphForm | None:
        """Return the planned form, or the default in place of an integer one without ranges."""
        if form not in INTEGER_FORMS:
            return form
        whole = spec.then is None or npu_rows == spec.member_rows
        if whole and (spec.layer, spec.group) in self._ranges:
            return form
        self._float_operators[operator_name(spec.group, spec.layer)] = None
        return None

    def _shard(self, graph: PlannedGraph) -> NpuShard:
        place = (graph.spec.layer, graph.spec.group)
        ranges = self._ranges.get(place) if graph.form in INTEGER_FORMS else None
        return npu_shard(self._weights, graph.spec, graph.npu_rows, ranges)

    def _graph(self, spec: OpSpec, placement: Placement, form: GraphForm | None, length: int) -> NpuGraph:
        npu = self._device.npu
        assert npu is not None  # loading has checked the plan
        key = (spec.layer, spec.group, placement.npu_rows, form, length)
        if key not in self._graphs:
            # The shard is not kept: its stacked members are a second copy of the weights.
            shard = self._shard(PlannedGraph(spec, placement.npu_rows, length, form))
            self._graphs[key] = npu.prepare(shard, length, form)
        return self._graphs[key]


def _tokens_of(builder: PassBuilder, slot: SharedArray, row_bytes: int, first: int, count: int) -> Buffer:
    return builder.byte_range(slot, first * row_bytes, (first + count) * row_bytes)


def _npu_rows(op: PlacedOp) -> int:
    """Return the rows of the NPU's output."""
    return sum(op.placement.npu_rows) if op.spec.then is None else op.spec.then.rows


def _enqueue(builder: PassBuilder, op: PlacedOp, gpu: Sequence[Step]) -> None:
    """Append the GPU's shard and flush the queue."""
    if gpu:
        builder.steps += gpu
        builder.flush(op)
