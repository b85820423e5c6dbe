"""Packs the groups of linears for the GPU, and emits those of a pass where the plan places them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from heterollm.base import Progress
from heterollm.engine.builder import PassBuilder
from heterollm.engine.lanes import Lane
from heterollm.engine.placed import PlacedOp
from heterollm.engine.splits import NO_RANGES, SplitEmitter
from heterollm.engine.step import LinearWork
from heterollm.engine.techniques.registry import Techniques
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import GpuLinear, RoundedInputs, Segments
from heterollm.kernels.npu import StaticRanges
from heterollm.kernels.ops import STREAM_INPUT, Group, OpSpec
from heterollm.model import ModelWeights
from heterollm.solver import Placement, Plan


class LinearEmitter:
    """Emits the linears of a model; packs their weights for the GPU first.

    Args:
        device: The device.
        weights: The model's weights.
        plan: The plan.
        progress: Called while weights are packed.
        techniques: The techniques of the engine.
        ranges: Calibrated ranges of operators that the NPU computes in integers.

    Attributes:
        embedding: The token embedding.
        splits: The emitter of both processors' shards.
    """

    def __init__(
        self,
        device: Device,
        weights: ModelWeights,
        plan: Plan,
        progress: Progress,
        techniques: Techniques,
        ranges: Mapping[tuple[int, Group], StaticRanges] = NO_RANGES,
    ) -> None:
        self._packed: dict[tuple[int, Group], GpuLinear] = {}
        gpu, dtype = device.gpu, device.activation_dtype
        for done, spec in enumerate(weights.specs):
            progress("Packing weights for the GPU", done, len(weights.specs))
            members = weights.linear(spec.layer, spec.group)
            self._packed[spec.layer, spec.group] = GpuLinear.pack(
                gpu, members, activation_dtype=dtype, integer_inputs=spec.integer_inputs
            )
        progress("Packing weights for the GPU", len(weights.specs), len(weights.specs))
        if weights.embedding is weights.head:
            self.embedding = self._packed[-1, "head"]
        else:
            self.embedding = GpuLinear.pack(gpu, [weights.embedding], activation_dtype=dtype)
        self.splits = SplitEmitter(device, weights, plan, techniques, ranges)

    def clear(self) -> None:
        """Drop the weights; no compiled pass may run afterwards."""
        self._packed.clear()
        self.splits.clear()
        del self.embedding

    def packed(self, layer: int, group: Group) -> GpuLinear:
        """Return the GPU's weights of a group."""
        return self._packed[layer, group]

    def placed(self, builder: PassBuilder, layer: int, group: Group) -> PlacedOp:
        """Return an operator of a pass with its placement and buffers."""
        spec, placement = builder.placements[layer, group]
        lane, npu_output, gpu_output = builder.lane, "npu_output", "gpu_output"
        if spec.group == "head":
            # Without the NPU, the GPU writes the logits directly.
            split = bool(placement.npu_lengths)
            npu_output, gpu_output = ("head_npu_output", "head_gpu_output") if split else ("logits", "logits")
        return PlacedOp(
            spec,
            placement,
            source=lane.shared[spec.source],
            npu_output=lane.shared[npu_output],
            gpu_output=lane.shared[gpu_output] if gpu_output == "logits" else lane.private[gpu_output],
            rounded=self.rounded(lane, spec, placement),
            codes=self.splits.codes(lane, spec, placement),
            stream=None if spec.first is None else lane.shared[STREAM_INPUT],
            stream_codes=self.splits.stream_codes(lane, spec, placement),
        )

    def rounded(self, lane: Lane, spec: OpSpec, placement: Placement) -> RoundedInputs | None:
        """Return the buffers for int8 codes that the kernel before a group writes; None without them.

        That kernel writes codes if the GPU computes rows of all tokens. Under a sequence split the GPU
        rounds its own tokens while the NPU, which rounds its input itself, is busy.
        """
        if not spec.integer_inputs or placement.npu_rows == spec.member_rows:
            return None
        codes, blocks = lane.private[f"{spec.source}_codes"], lane.private[f"{spec.source}_blocks"]
        return RoundedInputs(codes, blocks, spec.weight.bits, spec.weight.block)

    def linear(self, builder: PassBuilder, op: PlacedOp) -> Segments:
        """Append a group of linears, and return its output."""
        *_, group = (op.spec.group, *op.spec.parts)
        return self.splits.linear(builder, op, self._packed[op.spec.layer, group])

    def head_of_gpu(self, builder: PassBuilder, op: PlacedOp) -> None:
        """Append the head as one kernel that writes the logits in float32."""
        launch = self._packed[-1, "head"].launch(
            op.source,
            op.gpu_output,
            tokens=builder.tokens,
            output_dtype=np.float32,
            rounded=op.rounded,
            label=op.name,
        )
        work = LinearWork.of_rows(op.spec, builder.tokens, op.spec.rows)
        builder.steps += builder.shard(op, launch, op.name, op.source, op.gpu_output, work, op.rounded)
        builder.end_operator(op.operator, op.layer)
