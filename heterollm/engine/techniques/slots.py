"""The slots and the memory of a technique."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from heterollm.kernels.ops import OpSpec
from heterollm.model import ModelConfig
from heterollm.solver import Plan


class TechniqueSlots:
    """The slots and the memory of a technique; the base has none.

    Attributes:
        PRIVATE: Slots that neither the host nor the NPU reads or writes.
        APART: Slots that :meth:`memory` counts; others are activations like those of the core.
    """

    PRIVATE: ClassVar[tuple[str, ...]] = ()
    APART: ClassVar[tuple[str, ...]] = ()

    def sizes(
        self, config: ModelConfig, specs: Sequence[OpSpec], plan: Plan, item_bytes: int, context: int
    ) -> Iterator[tuple[str, int]]:
        """Yield slots with the sizes that a plan needs; the largest of each slot counts.

        Args:
            config: The model.
            specs: Every group of it.
            plan: The plan.
            item_bytes: Size of an activation.
            context: Positions of a session.
        """
        del config, specs, plan, item_bytes, context
        return iter(())

    def memory(
        self,
        plan: Plan,
        specs: Sequence[OpSpec],
        slots: Mapping[str, int],
        given: Mapping[str, Any],
        item_bytes: int,
    ) -> dict[str, int]:
        """Return the bytes of further memory, by words for it.

        Args:
            plan: The plan.
            specs: Every group of the model.
            slots: Bytes of all slots.
            given: Calibrated values by technique.
            item_bytes: Size of an activation.
        """
        del plan, specs, slots, given, item_bytes
        return {}

    def graph_bytes(self, config: ModelConfig, plan: Plan, context: int) -> int:
        """Return the bytes of graphs that are of no operator with weights, with their inputs and outputs."""
        del config, plan, context
        return 0
