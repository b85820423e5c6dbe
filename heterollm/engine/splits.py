"""Emits the steps of an operator: the shards of both processors, and the fence between them."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final, cast

import numpy as np

from heterollm.engine.builder import PassBuilder
from heterollm.engine.lanes import Lane
from heterollm.engine.npu_shards import (
    PlannedGraph,
    context_graphs,
    form_of_ranges,
    planned_contexts,
    planned_graphs,
    planned_shard,
    shard_ranges,
)
from heterollm.engine.placed import PlacedOp, codes_of
from heterollm.engine.saturation import SaturationCount
from heterollm.engine.slots import NPU_CODES, NPU_FACTORS, NPU_OUTPUT_CODES, NPU_STREAM_CODES
from heterollm.engine.step import NOT_RUN, Buffer, Call, LinearWork, Step, operator_name, shard_name
from heterollm.engine.techniques.registry import NOTHING, Techniques
from heterollm.engine.techniques.technique import Around
from heterollm.kernels.device import Device
from heterollm.kernels.formats import CodeGrid
from heterollm.kernels.gpu import (
    DeviceMemory,
    GlueKernels,
    GpuLinear,
    Launch,
    NpuCodes,
    Segments,
    SharedArray,
)
from heterollm.kernels.npu import (
    INPUT,
    INTEGER_FORMS,
    OUTPUT,
    STREAM,
    FfnRanges,
    GraphForm,
    NpuGraph,
    StaticRanges,
    WeightShard,
    step_of,
)
from heterollm.kernels.operators import read_codes, write_codes
from heterollm.kernels.ops import FUSED, PARTS, STREAM_INPUT, Group, OpSpec
from heterollm.model import ModelWeights
from heterollm.solver import Placement, Plan

NO_RANGES: Final[Mapping[tuple[int, Group], StaticRanges]] = MappingProxyType({})
SHOWN_NAMES: Final = 6
STREAMS_AND_JOINED: Final = len(FUSED) + len(PARTS)


class SplitEmitter:
    """Emits each operator according to its placement.

    The order of an operator's steps on coherent memory is: the kernels that write its input, the mark, the
    GPU's shard, the wait for the mark, the NPU's graphs. So the GPU continues from the input's kernels to its
    shard without waiting for the host. No wait follows, since the kernels that read the output are enqueued
    after the NPU has returned. Mapped memory is acquired behind the wait, in a queue of its own, so that the
    GPU computes meanwhile. Where maps wait for the queue of the kernels, memory is acquired before the GPU's
    shard is enqueued. Only the bytes of the NPU are mapped: under a sequence split the GPU writes its
    tokens to the same slot meanwhile.
    """

    def __init__(
        self,
        device: Device,
        weights: ModelWeights,
        plan: Plan,
        techniques: Techniques,
        ranges: Mapping[tuple[int, Group], StaticRanges] = NO_RANGES,
    ) -> None:
        self._device = device
        self._weights = weights
        self._ranges = ranges
        self._layers = GlueKernels(device.gpu, device.activation_dtype, device.cache_dtype)
        self._techniques = techniques
        self._float_operators: dict[str, None] = {}
        # A layer may have fused groups, the streams that they read, and its network beside its groups.
        operators = len(weights.specs) + STREAMS_AND_JOINED * weights.config.layers
        self.saturation = SaturationCount(device.gpu, operators)
        self._graphs: dict[PlannedGraph, NpuGraph] = {}
        packager = device.packager
        if packager is not None and packager.context_layers:
            graphs = planned_graphs(plan, (*weights.specs, *weights.experts), ranges)
            contexts = planned_contexts(graphs, packager.context_layers)
            packager.package(context_graphs(contexts, self._shard))

    @property
    def notes(self) -> tuple[str, ...]:
        """Operators that keep float activations against the plan, and saturated values."""
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

    def codes(self, lane: Lane, spec: OpSpec, placement: Placement) -> NpuCodes | None:
        """Return the codes in a lane of an operator that the NPU computes in integers; None for others."""
        ranges = self._ranges_of(spec, placement)
        if not placement.npu_lengths or self._form(spec, placement) not in INTEGER_FORMS or ranges is None:
            return None
        grid = ranges.grid
        # The inputs of a token with a factor cannot saturate, and those beyond a shadow's range are not lost.
        counts_inputs = not (grid.per_token or placement.shadow)
        values = _npu_rows(spec, placement) + (spec.input_columns if counts_inputs else 0)
        name = operator_name(spec.group, None if spec.layer < 0 else spec.layer)
        place = self.saturation.place(name, values)
        memory = lane.private[NPU_FACTORS], self.saturation.memory
        source = NPU_STREAM_CODES if spec.source == STREAM_INPUT else NPU_CODES
        slots = lane.shared[source], lane.shared[NPU_OUTPUT_CODES]
        return NpuCodes(*slots, *memory, place, grid, clamps=placement.shadow)

    def stream_codes(self, lane: Lane, spec: OpSpec, placement: Placement) -> NpuCodes | None:
        """Return the codes of the residual stream that such an operator reads beside its input."""
        ranges, codes = self._ranges_of(spec, placement), self.codes(lane, spec, placement)
        fused = ranges.fused if isinstance(ranges, FfnRanges) else None
        if fused is None or codes is None:
            return None
        place = self.saturation.place(f"the stream at {spec.layer}.{spec.group}", spec.columns)
        grid = CodeGrid(step_of(fused.stream), step_of(fused.stream), per_token=False)
        return replace(codes, inputs=lane.shared[NPU_STREAM_CODES], place=place, grid=grid)

    def linear(self, builder: PassBuilder, op: PlacedOp, linear: GpuLinear) -> Segments:
        """Append the steps of a group of linears, whose GPU weights are ``linear``, and return the output."""
        spec, placement, tokens = op.spec, op.placement, builder.tokens
        rows = spec.member_rows
        if not placement.npu_lengths:
            launch = linear.launch(op.source, op.gpu_output, tokens=tokens, rounded=op.rounded, label=op.name)
            builder.steps += self._rows(builder, op, launch, op.gpu_output, (0,) * len(rows))
            builder.end_operator(op.operator, op.layer)
            return Segments(op.gpu_output, op.gpu_output, rows, (0,) * len(rows))
        around = self._techniques.around(builder, op.operator, spec.layer, op)
        if placement.npu_rows != rows:
            launch = linear.launch(
                op.source,
                op.gpu_output,
                tokens=tokens,
                kept=tuple(zip(placement.npu_rows, rows, strict=True)),
                in_place=around.join == "sum",
                rounded=op.rounded,
                label=op.name,
            )
            own = self._rows(builder, op, launch, op.gpu_output, placement.npu_rows)
        else:
            # A sequence split has one segment: the GPU writes the rows after those of the NPU.
            own = self._tokens_left(builder, op, linear)
        self._split(builder, op, [*around.beside(), *own], around)
        whole = placement.npu_rows == rows and around.join == "concatenate"
        other = op.npu_output if whole else op.gpu_output
        return Segments(op.npu_output, other, rows, placement.npu_rows, join=around.join)

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
            return Segments(op.npu_output, op.gpu_output, rows, rows, join="sum")
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

    def _split(
        self, builder: PassBuilder, op: PlacedOp, gpu: Sequence[Step], around: Around = NOTHING
    ) -> None:
        """Append the steps of both processors.

        Args:
            builder: The pass so far.
            op: The operator.
            gpu: Steps of the GPU's shard, if it has one.
            around: Steps of a technique.
        """
        if op.codes is not None and not op.spec.follows_norm:
            tokens = min(sum(op.placement.npu_lengths), builder.tokens)
            columns = op.spec.input_columns
            launch = write_codes(self._layers, op.source, op.codes, tokens=tokens, columns=columns)
            writes = codes_of(op.codes)
            builder.kernel("rounding of inputs", op.layer, launch, reads=(op.source,), writes=writes)
        around.before()
        builder.hand_over(op, gpu, lambda: self._acquire(builder, op, around))
        around.run(lambda: self._graph_runs(builder, op))
        if not op.npu_source.coherent:
            builder.release(op)
            if op.npu_stream is not None:
                builder.on_host(op, "release", op.npu_stream.release, reads=(op.npu_stream,))
            around.release()
        if op.codes is not None:
            self._read_codes(builder, op, op.codes)
        if gpu or op.codes is not None:
            builder.end_operator(op.operator, op.layer)

    def _acquire(self, builder: PassBuilder, op: PlacedOp, around: Around) -> None:
        tokens, item = sum(op.placement.npu_lengths), self._npu_dtype(op).itemsize
        rows = _npu_rows(op.spec, op.placement)
        builder.acquire(op, tokens * op.spec.input_columns * item, tokens * rows * item)
        if (stream := op.npu_stream) is not None:
            size = tokens * op.spec.columns * item
            read = functools.partial(stream.acquire_to_read, size)
            builder.on_host(op, "acquire_to_read", read, reads=(builder.byte_range(stream, 0, size),))
        around.acquire()

    def _read_codes(self, builder: PassBuilder, op: PlacedOp, codes: NpuCodes) -> None:
        """Append the kernel that writes the values of the output's codes to the NPU's slot."""
        tokens = min(sum(op.placement.npu_lengths), builder.tokens)
        rows = _npu_rows(op.spec, op.placement)
        members = op.placement.npu_rows if op.spec.then is None else (rows,)
        launch = read_codes(self._layers, codes, op.npu_output, tokens=tokens, member_rows=members)
        row_bytes = rows * self._device.activation_dtype.itemsize
        written = _tokens_of(builder, op.npu_output, row_bytes, 0, tokens)
        reads, writes = (codes.outputs, codes.factors), (written, codes.counts)
        builder.kernel("reading of codes", op.layer, launch, reads=reads, writes=writes, ends=False)

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
        dtype, total = self._npu_dtype(op), sum(placement.npu_lengths)
        rows = _npu_rows(spec, placement)
        sources = {INPUT: (op.npu_source, spec.input_columns)}
        if op.npu_stream is not None:
            sources[STREAM] = op.npu_stream, spec.columns
        views = {name: memory.view(dtype, (total, own)) for name, (memory, own) in sources.items()}
        y = op.npu_target.view(dtype, (total, rows))
        shard = shard_name(op.name, spec, tuple((0, own) for own in placement.npu_rows))
        chosen = self._form(spec, placement)
        form = "" if chosen is None else f" as {chosen}"
        first = 0
        for length in placement.npu_lengths:
            if spec.then is None:
                work = LinearWork.of_rows(spec, length, rows)
            else:
                work = LinearWork.of_ffn(spec, length, placement.npu_rows[0])
            tokens = slice(first, first + length)
            reads = [
                _tokens_of(builder, memory, own * dtype.itemsize, first, length)
                for memory, own in sources.values()
            ]
            writes = _tokens_of(builder, op.npu_target, rows * dtype.itemsize, first, length)
            label = f"{shard} tokens {first}:{first + length}{form}"
            run: Call = NOT_RUN
            if builder.builds_graphs:
                graph = self._graph(spec, placement, chosen, length)
                run = graph.bind({name: x[tokens] for name, x in views.items()}, {OUTPUT: y[tokens]})
            builder.graph(op, run, label, reads, writes, work)
            first += length

    def _npu_dtype(self, op: PlacedOp) -> np.dtype[Any]:
        """Return the element type of the memory that the NPU reads and writes."""
        return self._device.activation_dtype if op.codes is None else op.codes.grid.dtype

    def _form(self, spec: OpSpec, placement: Placement) -> GraphForm | None:
        """Return the planned form for the bits of the ranges, or the default in place of one without."""
        form = cast("GraphForm | None", placement.form)
        ranges = self._ranges_of(spec, placement)
        if form not in INTEGER_FORMS or ranges is not None:
            return form_of_ranges(form, ranges)
        self._float_operators[operator_name(spec.group, spec.layer)] = None
        return None

    def _shard(self, graph: PlannedGraph) -> WeightShard:
        return planned_shard(self._weights, self._ranges, graph)

    def _graph(self, spec: OpSpec, placement: Placement, form: GraphForm | None, length: int) -> NpuGraph:
        npu = self._device.npu
        assert npu is not None  # loading has checked the plan
        key = PlannedGraph(spec, placement.npu_rows, length, form, placement.shadow and form is not None)
        if key not in self._graphs:
            # The shard is not kept: its stacked members are a second copy of the weights.
            self._graphs[key] = npu.prepare(self._shard(key), length, form)
        return self._graphs[key]

    def _ranges_of(self, spec: OpSpec, placement: Placement) -> StaticRanges | None:
        return shard_ranges(self._ranges, spec, placement.npu_rows, shadow=placement.shadow)


def _tokens_of(builder: PassBuilder, slot: SharedArray, row_bytes: int, first: int, count: int) -> Buffer:
    return builder.byte_range(slot, first * row_bytes, (first + count) * row_bytes)


def _npu_rows(spec: OpSpec, placement: Placement) -> int:
    """Return the rows of the NPU's output."""
    return sum(placement.npu_rows) if spec.then is None else spec.then.rows
