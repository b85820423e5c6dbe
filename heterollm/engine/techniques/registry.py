"""The techniques of an engine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from heterollm.engine.builder import PassBuilder
from heterollm.engine.experts.shares import ExpertShares
from heterollm.engine.npu_attention.steps import NpuAttentionSteps
from heterollm.engine.placed import PlacedOp
from heterollm.engine.shadow.steps import ShadowSteps
from heterollm.engine.sparse.steps import NO_SCALES, SparseAttentionSteps
from heterollm.engine.step import Operator
from heterollm.engine.techniques.technique import Around, TechniqueSteps
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import DeviceMemory
from heterollm.kernels.npu import StaticRanges
from heterollm.kernels.ops import Group
from heterollm.model import ModelWeights
from heterollm.solver import Plan

NOTHING: Final = Around()


class Techniques:
    """All techniques of an engine as one; those that the plan does not use hold nothing.

    Args:
        device: The device.
        weights: The model's weights.
        plan: The plan.
        context: Positions of every session.
        ranges: Calibrated ranges by layer and group.
        given: Calibrated values by technique: ``attention`` has the scales of key heads.

    Attributes:
        experts: The NPU's share of experts.
    """

    def __init__(
        self,
        device: Device,
        weights: ModelWeights,
        plan: Plan,
        context: int,
        ranges: Mapping[tuple[int, Group], StaticRanges],
        given: Mapping[str, Any],
    ) -> None:
        self.experts = ExpertShares(device, weights)
        sparse = SparseAttentionSteps(
            device, weights.config, plan, context, given.get("attention", NO_SCALES)
        )
        self._every: tuple[TechniqueSteps, ...] = (
            sparse,
            NpuAttentionSteps(device, weights.config, context),
            ShadowSteps(device, weights, plan, ranges),
            self.experts,
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on the passes so far."""
        return tuple(note for one in self._every for note in one.notes)

    @property
    def memories(self) -> dict[str, DeviceMemory]:
        """Memory for counts of all passes, by the name of the buffer."""
        return {name: memory for one in self._every for name, memory in one.memories.items()}

    def around(
        self, builder: PassBuilder, operator: Operator, layer: int, op: PlacedOp | None = None
    ) -> Around:
        """Return the steps of the technique around an operator, as :meth:`TechniqueSteps.around` does."""
        found = (one.around(builder, operator, layer, op) for one in self._every)
        return next((around for around in found if around is not None), NOTHING)

    def clear(self) -> None:
        """Drop graphs and weights; no compiled pass may run afterwards."""
        for one in self._every:
            one.clear()

    def reset(self) -> None:
        """Count from 0 again."""
        for one in self._every:
            one.reset()
