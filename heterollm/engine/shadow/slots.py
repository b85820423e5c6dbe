"""The slots of shadow outliers, see :class:`heterollm.kernels.gpu.OutlierList`; all operators share them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final

from heterollm.engine.techniques.slots import TechniqueSlots
from heterollm.kernels.operators import found_bytes, outlier_flag_bytes
from heterollm.kernels.ops import Group, OpSpec
from heterollm.model import ModelConfig
from heterollm.solver import Plan

OUTLIER_FLAGS, OUTLIERS, OUTLIER_BATCH = "outlier_flags", "outliers", "outlier_batch"
COLD_WEIGHTS: Final = "cold_weights"

COLD_CHANNELS: Final = 32
"""Channels whose weights the slot ``cold_weights`` holds; more are read in several turns."""


class ShadowSlots(TechniqueSlots):
    """The slots of shadow outliers, and the float weights of channels that often have some."""

    PRIVATE: ClassVar[tuple[str, ...]] = (OUTLIER_FLAGS,)

    def sizes(
        self, config: ModelConfig, specs: Sequence[OpSpec], plan: Plan, item_bytes: int, context: int
    ) -> Iterator[tuple[str, int]]:
        """Yield what groups with a shadow need."""
        del config, context
        shadowed = [entry for entry in plan.placed if entry.placement.shadow]
        for spec in specs:
            if any(entry.holds(spec) for entry in shadowed):
                yield OUTLIER_FLAGS, outlier_flag_bytes(spec.columns)
                yield OUTLIERS, found_bytes(spec.columns)
                yield OUTLIER_BATCH, 8
                yield COLD_WEIGHTS, COLD_CHANNELS * spec.rows * item_bytes

    def memory(
        self,
        plan: Plan,
        specs: Sequence[OpSpec],
        slots: Mapping[str, int],
        given: Mapping[str, Any],
        item_bytes: int,
    ) -> dict[str, int]:
        """Return the float weights of the given number of channels of each operator with a shadow."""
        del slots
        held: Mapping[tuple[int, Group], int] = given.get("shadow", {})
        shadowed = [entry for entry in plan.placed if entry.placement.shadow]
        size = sum(
            held.get((spec.layer, spec.group), 0) * spec.rows * item_bytes
            for spec in specs
            if any(entry.holds(spec) for entry in shadowed)
        )
        return {"weights of outliers": size}
