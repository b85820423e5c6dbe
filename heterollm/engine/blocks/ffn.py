"""Emits a feed-forward network, as two groups of linears or as one operator."""

from __future__ import annotations

from statistics import NormalDist

from heterollm.engine.blocks.gate import append_norm
from heterollm.engine.builder import PassBuilder
from heterollm.engine.glue import GlueEmitter
from heterollm.engine.linears import LinearEmitter
from heterollm.engine.placed import Begun, Delta, PlacedOp, codes_of, segments_of
from heterollm.engine.slots import GATE_CUTOFFS, GATED_OUTPUT
from heterollm.engine.step import LinearWork, Step, shard_name
from heterollm.engine.tensors import GlueTensors
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import DeviceMemory, GlueKernels, Launch, RoundedInputs, Segments
from heterollm.kernels.operators import activate, find_cutoffs, gate_tokens
from heterollm.kernels.ops import OpSpec
from heterollm.model import FfnBlock, ModelConfig, norm_before


class FfnEmitter:
    """Emits feed-forward networks."""

    def __init__(
        self,
        device: Device,
        config: ModelConfig,
        linears: LinearEmitter,
        tensors: GlueTensors,
        glue: GlueEmitter,
    ) -> None:
        self._kernels = GlueKernels(device.gpu, device.activation_dtype, device.cache_dtype)
        self._config, self._linears, self._tensors, self._glue = config, linears, tensors, glue

    def begin(self, builder: PassBuilder, layer: int, block: FfnBlock) -> Begun:
        """Return a layer's network, whose norm comes next."""
        group = next((one for one in ("o_ffn", "ffn") if (layer, one) in builder.placements), "gate_up")
        op = self._linears.placed(builder, layer, group)
        emit = self._gate_up_and_down if group == "gate_up" else self._ffn
        codes = None if op.spec.fused else op.input_codes
        return Begun(
            codes,
            lambda: self._gated(builder, layer, block, emit(builder, block, op)),
            reads="nothing" if op.spec.fused else "norm",
        )

    def _gated(self, builder: PassBuilder, layer: int, block: FfnBlock, output: Segments) -> Delta:
        """Append the gate of whole tokens, if the network has one, and return the output."""
        if not block.token_gated:
            return Delta(output, self._tensors.bias(layer, "down"))
        x, out = builder.lane.shared["linear_input"], builder.lane.private[GATED_OUTPUT]
        launch = gate_tokens(
            self._kernels, x, self._tensors.token_gate(layer), output, out, tokens=builder.tokens
        )
        builder.kernel("token gate", layer, launch, reads=(x, *segments_of(output)), writes=(out,))
        return Delta(Segments(out, out, output.rows, (0,)))

    def _gate_up_and_down(self, builder: PassBuilder, block: FfnBlock, op: PlacedOp) -> Segments:
        """Append the network as two operators, of which ``op`` is the first."""
        layer = op.spec.layer
        gate_up = self._linears.linear(builder, op)
        down = self._linears.placed(builder, layer, "down")
        rounded = None if block.inner_norm else down.rounded
        cutoffs = self._cutoffs(builder, layer, block, gate_up)
        launch = self._activation(builder, layer, block, gate_up, rounded, *cutoffs)
        reads = (*segments_of(gate_up), *cutoffs)
        writes = (builder.lane.shared["activated"], *codes_of(rounded))
        builder.kernel("activation", layer, launch, reads=reads, writes=writes)
        if block.inner_norm:
            norm = self._tensors.norm(layer, "network_inner")
            append_norm(builder, self._kernels, norm, down, self._config.rms_norm_eps)
        return self._linears.linear(builder, down)

    def _cutoffs(
        self, builder: PassBuilder, layer: int, block: FfnBlock, gate_up: Segments
    ) -> tuple[DeviceMemory, ...]:
        """Append the cutoffs of gates and return their slot, if the network has some."""
        if not block.sparsity:
            return ()
        out, deviations = builder.lane.private[GATE_CUTOFFS], NormalDist().inv_cdf(block.sparsity)
        launch = find_cutoffs(self._kernels, gate_up, out, tokens=builder.tokens, deviations=deviations)
        builder.kernel("gate cutoff", layer, launch, reads=segments_of(gate_up), writes=(out,))
        return (out,)

    def _activation(
        self,
        builder: PassBuilder,
        layer: int,
        block: FfnBlock,
        gate_up: Segments,
        rounded: RoundedInputs | None,
        cutoffs: DeviceMemory | None = None,
        *,
        start: int = 0,
    ) -> Launch:
        """Return the kernel of the activation; ``start`` is the first row of each of gate and up."""
        return activate(
            self._kernels,
            gate_up,
            builder.lane.shared["activated"],
            tokens=builder.tokens,
            intermediate=gate_up.rows[0],
            activation=block.activation,
            bias=self._tensors.bias(layer, "gate_up", start),
            rounded=rounded,
            slopes=self._tensors.slopes(layer),
            cutoffs=cutoffs,
        )

    def _ffn(self, builder: PassBuilder, block: FfnBlock, op: PlacedOp) -> Segments:
        """Append the network as one operator, split along its width; the outputs of both shards are added.

        The GPU's queue runs three kernels while the NPU runs one graph.
        """
        if op.spec.fused and (op.spec.layer, "norm_qkv") not in builder.placements:
            self._glue.copy_stream(builder, op.spec.layer, None, op.stream_codes)
        (width, *_), (whole, *_) = op.placement.npu_rows, op.spec.member_rows
        gpu = [] if width == whole else self._gpu_ffn(builder, block, op, width, whole)
        return self._linears.splits.ffn(builder, op, gpu)

    def _own_input(self, builder: PassBuilder, op: PlacedOp, o: OpSpec) -> list[Step]:
        """Return the steps of o, its sum with the residual stream, and the norm, for the GPU's shard.

        The NPU computes them, too: its graph hands its outputs over at its end.
        """
        out, label = op.gpu_output, f"{op.name} o"
        launch = self._linears.packed(o.layer, o.group).launch(
            op.source, out, tokens=builder.tokens, label=op.name
        )
        work = LinearWork.of_rows(o, builder.tokens, o.rows)
        delta = Delta(Segments(out, out, o.member_rows, (0,)))
        norm = norm_before(self._config, o.layer, "gate_up")
        normed = self._glue.prepared_norm(builder, o.layer, norm, delta)
        return [*builder.shard(op, launch, label, op.source, out, work), normed]

    def _gpu_ffn(
        self, builder: PassBuilder, block: FfnBlock, op: PlacedOp, width: int, whole: int
    ) -> list[Step]:
        """Return the steps of the GPU's shard: the intermediate width from ``width`` to ``whole``."""
        lane, ffn, then, out = builder.lane, op.spec, op.spec.then, op.gpu_output
        activated = lane.shared["activated"]
        assert then is not None
        members = len(ffn.members)
        tokens, rows = builder.tokens, ((width, whole),) * members
        source, found = op.source, list[Step]()
        if ffn.first is not None:
            source, found = lane.shared["linear_input"], self._own_input(builder, op, ffn.first)
        gate_up = self._linears.packed(ffn.layer, "gate_up").launch(
            source, out, kept=rows, rounded=op.rounded, tokens=tokens, label=op.name
        )
        rounded = self._linears.rounded(lane, then, op.placement)
        outputs = Segments(out, out, (whole - width,) * members, (0,) * members)
        activation = self._activation(builder, ffn.layer, block, outputs, rounded, start=width)
        # The activation has read the rows of gate and up, so that the same slot can take the sum.
        down = self._linears.packed(ffn.layer, "down").launch(
            activated, out, columns=(width, whole), rounded=rounded, tokens=tokens, label=op.name
        )
        work = LinearWork.of_rows(ffn, tokens, members * (whole - width))
        label = shard_name(op.name, ffn, rows)
        found += builder.shard(op, gate_up, label, source, out, work, op.rounded)
        writes = (activated, *codes_of(rounded))
        found.append(builder.prepared("activation", ffn.layer, activation, (out,), writes))
        work = LinearWork.of_columns(then, tokens, whole - width)
        label = f"{op.name} down[:, {width}:{whole}]"
        return found + builder.shard(op, down, label, activated, out, work, rounded)
