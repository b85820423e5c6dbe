"""The slots of the rows of experts that the NPU computes, in the order of its groups."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Final

from heterollm.engine.techniques.slots import EngineSizes, TechniqueSlots
from heterollm.solver import PlannedExperts

EXPERT_NPU_INPUT, EXPERT_NPU_OUTPUT = "expert_npu_input", "expert_npu_output"

EXPERT_SALIENCY: Final = "expert_saliency"
"""Slot of the saliency of each token, by which experts beyond their capacity drop tokens."""


class ExpertSlots(TechniqueSlots):
    """The slots of experts on the NPU."""

    PRIVATE: ClassVar[tuple[str, ...]] = (EXPERT_SALIENCY,)

    def sizes(self, of: EngineSizes, /) -> Iterator[tuple[str, int]]:
        """Yield input and output of a plan's groups of experts, and the saliency of tokens."""
        for entry in of.plan.technique(PlannedExperts).entries:
            if entry.placement.rows and entry.lengths[0] <= of.plan.chunk_length:
                size = entry.placement.rows * of.config.hidden_size * of.item_bytes
                yield EXPERT_NPU_INPUT, size
                yield EXPERT_NPU_OUTPUT, size
                if entry.placement.overflow == "drop":
                    yield EXPERT_SALIENCY, 4 * of.plan.chunk_length
