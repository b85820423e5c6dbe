"""Emits the steps of shadow outliers before, beside and behind an operator's NPU graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from heterollm.engine.builder import PassBuilder
from heterollm.engine.lanes import Lane
from heterollm.engine.placed import PlacedOp
from heterollm.engine.shadows import ColdProduct, OutlierShadow, Shadows
from heterollm.engine.step import Operator, Step
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import Launch, SharedArray
from heterollm.kernels.npu import StaticRanges
from heterollm.kernels.operators import find_outliers, multiply_outliers
from heterollm.kernels.ops import Group, OpSpec
from heterollm.model import ModelWeights
from heterollm.solver import Placement, Plan


class ShadowEmitter:
    """Emits the steps of operators with a shadow; most methods append nothing for others.

    Args:
        device: The device.
        weights: The model's weights.
        ranges: Calibrated ranges by layer and group.
    """

    def __init__(
        self, device: Device, weights: ModelWeights, ranges: Mapping[tuple[int, Group], StaticRanges]
    ) -> None:
        self._gpu = device.gpu
        self._shadows = Shadows(device, weights, ranges)

    def load(self, plan: Plan) -> None:
        """Upload the weights of a plan's hot channels."""
        self._shadows.load(plan)

    def of(self, lane: Lane, spec: OpSpec, placement: Placement) -> OutlierShadow | None:
        """Return the shadow of an operator in a lane; None without one."""
        return self._shadows.of(lane, spec, placement)

    def clear(self) -> None:
        """Drop the weights."""
        self._shadows.clear()

    def notes(self) -> tuple[str, ...]:
        """Return the notes on channels that were read from disk."""
        return self._shadows.notes()

    def find(self, builder: PassBuilder, op: PlacedOp) -> None:
        """Append the kernels that list the channels with outliers, for the host and later kernels."""
        if op.shadow is None:
            return
        found = op.shadow.found
        covered = _covered(builder, op)
        finding, listing = find_outliers(
            self._shadows.kernels, op.source, found, op.shadow.hot, tokens=covered
        )
        name: Operator = "finding of outliers"
        flags = (found.flags,)
        builder.kernel(name, op.layer, finding, reads=(op.source,), writes=flags, ends=False)
        builder.kernel(name, op.layer, listing, reads=flags, writes=(*flags, found.found))

    def product(self, builder: PassBuilder, op: PlacedOp, shadow: OutlierShadow) -> Step:
        """Return the step that writes the products of hot channels to the NPU's rows in the GPU's slot."""
        launch = self._launch(builder, op, shadow)
        reads = (op.source, shadow.found.found)
        return builder.prepared("outliers", op.layer, launch, reads, (op.gpu_output,))

    def around(self, builder: PassBuilder, op: PlacedOp, graphs: Callable[[], None]) -> None:
        """Append the graph runs, between the reading of cold channels and their product.

        Args:
            builder: The pass so far.
            op: The operator.
            graphs: Appends the graph runs.
        """
        shadow = op.shadow
        if shadow is None:
            graphs()
            return
        found = shadow.found
        launch = self._launch(builder, op, shadow, fetched=shadow.cold_weights)
        reads, writes = (op.source, found.found, found.batch, shadow.cold_weights), (op.gpu_output,)
        kernel = builder.prepared("cold outliers", op.layer, launch, reads, writes)
        cold = ColdProduct(shadow, kernel, self._gpu)
        builder.on_host(op, "read_ahead", cold.read_ahead, reads=(found.found,))
        graphs()
        builder.on_host(op, "fetch", cold, reads=(found.found,), writes=writes)

    def acquire(self, builder: PassBuilder, op: PlacedOp) -> None:
        """Append the mapping of the list of channels."""
        if op.shadow is not None:
            found = op.shadow.found.found
            builder.on_host(op, "acquire_to_read", found.acquire_to_read, reads=(found,))

    def release(self, builder: PassBuilder, op: PlacedOp) -> None:
        """Append the unmapping of the list of channels."""
        if op.shadow is not None:
            found = op.shadow.found.found
            builder.on_host(op, "release", found.release, reads=(found,))

    def _launch(
        self, builder: PassBuilder, op: PlacedOp, shadow: OutlierShadow, fetched: SharedArray | None = None
    ) -> Launch:
        return multiply_outliers(
            self._shadows.kernels,
            op.source,
            shadow.found,
            shadow.hot,
            op.gpu_output,
            tokens=builder.tokens,
            covered=_covered(builder, op),
            npu_rows=op.placement.npu_rows,
            fetched=fetched,
        )


def _covered(builder: PassBuilder, op: PlacedOp) -> int:
    """Return the tokens of the pass that the NPU computes."""
    return min(sum(op.placement.npu_lengths), builder.tokens)
