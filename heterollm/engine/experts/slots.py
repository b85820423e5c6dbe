"""The slots of the rows of experts that the NPU computes, in the order of its groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from heterollm.engine.techniques.slots import TechniqueSlots
from heterollm.kernels.ops import OpSpec
from heterollm.model import ModelConfig
from heterollm.solver import Plan, PlannedExperts

EXPERT_NPU_INPUT, EXPERT_NPU_OUTPUT = "expert_npu_input", "expert_npu_output"


class ExpertSlots(TechniqueSlots):
    """The slots of experts on the NPU."""

    def sizes(
        self, config: ModelConfig, specs: Sequence[OpSpec], plan: Plan, item_bytes: int, context: int
    ) -> Iterator[tuple[str, int]]:
        """Yield input and output of a plan's groups of experts."""
        del specs, context
        for entry in plan.technique(PlannedExperts).entries:
            if entry.placement.rows and entry.lengths[0] <= plan.chunk_length:
                size = entry.placement.rows * config.hidden_size * item_bytes
                yield EXPERT_NPU_INPUT, size
                yield EXPERT_NPU_OUTPUT, size
