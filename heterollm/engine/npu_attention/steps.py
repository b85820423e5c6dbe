"""Emits attention on the NPU: the GPU writes the graph's inputs, and the NPU attends."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from heterollm.engine.builder import PassBuilder
from heterollm.engine.npu_attention.slots import attention_graph, attention_inputs
from heterollm.engine.placed import PlacedOp, SharedOp, codes_of
from heterollm.engine.step import NOT_RUN, Call, Operator
from heterollm.engine.techniques.technique import Around, TechniqueSteps
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import GlueKernels, HeadShape, RoundedInputs, SharedArray
from heterollm.kernels.npu import OUTPUT, AttentionShard, GraphTensors, NpuGraph, graph_tensors
from heterollm.kernels.operators import AttentionInputs, write_attention_inputs
from heterollm.model import AttentionBlock, ModelConfig
from heterollm.solver import NpuAttention, PlannedAttention


class NpuAttentionSteps(TechniqueSteps):
    """Emits the attention of layers on the NPU, whose graphs and bindings serve all layers.

    Args:
        device: The device.
        config: The model.
        context: Positions of every session.
    """

    def __init__(self, device: Device, config: ModelConfig, context: int) -> None:
        self._device, self._config, self._context = device, config, context
        self._blocks, own = config.blocks(AttentionBlock), config.attention
        self._heads = HeadShape(own.heads, own.kv_heads, own.head_dim, context)
        self._kernels = GlueKernels(device.gpu, device.activation_dtype, device.cache_dtype)
        self._graphs: dict[tuple[AttentionShard, int], NpuGraph] = {}
        self._runs: dict[tuple[SharedArray, AttentionShard, int], Call] = {}

    def clear(self) -> None:
        """Drop the graphs; no compiled pass may run afterwards."""
        self._graphs.clear()
        self._runs.clear()

    def around(
        self, builder: PassBuilder, operator: Operator, layer: int, op: PlacedOp | None
    ) -> NpuAttentionAround | None:
        """Return attention on the NPU in place of the GPU's."""
        if operator != "attention" or builder.phase != "prefill":
            return None
        planned = builder.plan.technique(PlannedAttention)
        if not isinstance(planned.of(builder.tokens, builder.keys, layer), NpuAttention):
            return None
        assert op is not None  # of the linear behind attention
        return NpuAttentionAround(self, builder, layer, op.rounded)

    def attention(self, builder: PassBuilder, layer: int, rounded: RoundedInputs | None) -> None:
        """Append the attention of a layer.

        Args:
            builder: The pass so far.
            layer: Decoder layer.
            rounded: Buffers for int8 codes of the output, or None.
        """
        lane, cache = builder.lane, builder.layer_cache(layer)
        shard, rows = attention_graph(self._config, self._context, builder.tokens, builder.keys)
        inputs, out, query = attention_inputs(lane), lane.shared["attention_output"], lane.private["query"]
        launch = write_attention_inputs(
            *(self._kernels, query, cache, inputs, lane.step),
            shape=self._heads,
            shard=shard,
            tokens=rows,
            scale=self._blocks[layer].scale,
        )
        reads = query, cache.memory, lane.step
        builder.kernel("attention inputs", layer, launch, reads=reads, writes=inputs.every)
        tensors = graph_tensors(shard, rows, self._device.activation_dtype)
        graph = _Graph(builder, SharedOp("attention", layer, inputs.queries, out), inputs, tensors)
        builder.hand_over(graph.op, [], graph.acquire)
        run = self._run(inputs, out, shard, rows) if builder.builds_graphs else NOT_RUN
        graph.append(run)
        if rounded is not None:
            columns = self._heads.query_columns
            rounding = self._kernels.round_output(out, rounded, builder.tokens, columns)
            builder.kernel("rounding of inputs", layer, rounding, reads=(out,), writes=codes_of(rounded))

    # -- helpers -------------------------------------------------------------------------------------

    def _run(self, inputs: AttentionInputs, out: SharedArray, shard: AttentionShard, rows: int) -> Call:
        """Return the run of a graph on the slots of a lane."""
        npu, place, bound = self._device.npu, (shard, rows), (out, shard, rows)
        assert npu is not None  # loading has checked the plan
        if bound not in self._runs:
            if place not in self._graphs:
                self._graphs[place] = npu.prepare(shard, rows)
            graph = self._graphs[place]
            own = zip(inputs.every, graph.tensors.inputs.items(), strict=True)
            views = {name: memory.view(tensor.dtype, tensor.shape) for memory, (name, tensor) in own}
            output = graph.tensors.outputs[OUTPUT]
            self._runs[bound] = graph.bind(views, {OUTPUT: out.view(output.dtype, output.shape)})
        return self._runs[bound]


@dataclass(frozen=True, slots=True)
class _Graph:
    """The graph of a layer's attention in a pass."""

    builder: PassBuilder
    op: SharedOp
    inputs: AttentionInputs
    tensors: GraphTensors

    @property
    def reads(self) -> dict[SharedArray, int]:
        """The inputs with the bytes that the graph reads."""
        sizes = (tensor.size_bytes for tensor in self.tensors.inputs.values())
        return dict(zip(self.inputs.every, sizes, strict=True))

    def append(self, run: Call) -> None:
        """Append the run, and the ends of the maps of its memory."""
        builder, op = self.builder, self.op
        reads = [builder.byte_range(memory, 0, size) for memory, size in self.reads.items()]
        written = builder.byte_range(op.npu_target, 0, self.tensors.outputs[OUTPUT].size_bytes)
        builder.graph(op, run, op.name, reads, written)
        if not op.npu_source.coherent:
            builder.release(op)
            for memory in self.inputs.every[1:]:
                builder.on_host(op, "release", memory.release, reads=(memory,))

    def acquire(self) -> None:
        """Append the maps of memory that is not coherent."""
        builder, op = self.builder, self.op
        (_, first), *others = self.reads.items()
        builder.acquire(op, first, self.tensors.outputs[OUTPUT].size_bytes)
        for memory, size in others:
            read = functools.partial(memory.acquire_to_read, size)
            builder.on_host(op, "acquire_to_read", read, reads=(builder.byte_range(memory, 0, size),))


@dataclass(frozen=True)
class NpuAttentionAround(Around):
    """Attention on the NPU of a layer of a pass; arguments as for :meth:`NpuAttentionSteps.attention`."""

    steps: NpuAttentionSteps
    builder: PassBuilder
    layer: int
    rounded: RoundedInputs | None

    def run(self, default: Callable[[], None]) -> None:
        """Append attention on the NPU."""
        del default
        self.steps.attention(self.builder, self.layer, self.rounded)
