"""The slots and the memory of a technique."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from heterollm.kernels.ops import OpSpec
from heterollm.model import ModelConfig
from heterollm.solver import Plan


@dataclass(frozen=True, slots=True)
class EngineSizes:
    """The sizes that decide the slots and the memory of a technique.

    Args:
        config: The model.
        specs: Every group of it.
        plan: The plan.
        item_bytes: Size of an activation.
        context: Positions of a session.
    """

    config: ModelConfig
    specs: Sequence[OpSpec]
    plan: Plan
    item_bytes: int
    context: int


class TechniqueSlots:
    """The slots and the memory of a technique; the base has none.

    Attributes:
        PRIVATE: Slots that neither the host nor the NPU reads or writes.
        APART: Slots that :meth:`memory` counts; others are activations like those of the core.
    """

    PRIVATE: ClassVar[tuple[str, ...]] = ()
    APART: ClassVar[tuple[str, ...]] = ()

    def sizes(self, of: EngineSizes, /) -> Iterator[tuple[str, int]]:  # noqa: ARG002 - the base has none
        """Yield slots with the sizes that a plan needs; the largest of each slot counts."""
        return iter(())

    def memory(
        self,
        of: EngineSizes,  # noqa: ARG002 - the base has none
        slots: Mapping[str, int],  # noqa: ARG002
        given: Mapping[str, Any],  # noqa: ARG002
        /,
    ) -> dict[str, int]:
        """Return the bytes of further memory, by words for it.

        Args:
            of: The sizes.
            slots: Bytes of all slots.
            given: Calibrated values by technique.
        """
        return {}

    def graph_bytes(self, of: EngineSizes, /) -> int:  # noqa: ARG002 - the base has none
        """Return the bytes of graphs that are of no operator with weights, with their inputs and outputs."""
        return 0
