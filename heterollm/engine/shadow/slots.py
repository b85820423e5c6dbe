"""The slots of shadow outliers, see :class:`heterollm.kernels.gpu.OutlierList`; all operators share them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Final

from heterollm.engine.techniques.slots import EngineSizes, TechniqueSlots
from heterollm.kernels.operators import found_bytes, outlier_flag_bytes
from heterollm.kernels.ops import Group, OpSpec

OUTLIER_FLAGS, OUTLIERS, OUTLIER_BATCH = "outlier_flags", "outliers", "outlier_batch"
COLD_WEIGHTS: Final = "cold_weights"

COLD_CHANNELS: Final = 32
"""Channels whose weights the slot ``cold_weights`` holds; more are read in several turns."""


class ShadowSlots(TechniqueSlots):
    """The slots of shadow outliers, and the float weights of channels that often have some."""

    PRIVATE: ClassVar[tuple[str, ...]] = (OUTLIER_FLAGS,)

    def sizes(self, of: EngineSizes, /) -> Iterator[tuple[str, int]]:
        """Yield what groups with a shadow need."""
        for spec in _shadowed(of):
            yield OUTLIER_FLAGS, outlier_flag_bytes(spec.columns)
            yield OUTLIERS, found_bytes(spec.columns)
            yield OUTLIER_BATCH, 8
            yield COLD_WEIGHTS, COLD_CHANNELS * spec.rows * of.item_bytes

    def memory(
        self, of: EngineSizes, _slots: Mapping[str, int], given: Mapping[str, Any], /
    ) -> dict[str, int]:
        """Return the float weights of the given number of channels of each operator with a shadow."""
        held: Mapping[tuple[int, Group], int] = given.get("shadow", {})
        sizes = (held.get((spec.layer, spec.group), 0) * spec.rows * of.item_bytes for spec in _shadowed(of))
        return {"weights of outliers": sum(sizes)}


def _shadowed(of: EngineSizes) -> Iterator[OpSpec]:
    """Yield the groups with a shadow in some pass."""
    entries = [entry for entry in of.plan.placed if entry.placement.shadow]
    return (spec for spec in of.specs if any(entry.holds(spec) for entry in entries))
