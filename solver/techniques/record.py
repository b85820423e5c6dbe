"""The record of a technique in a plan, which its owner writes, reads, checks and counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from msgspec import Struct

from heterollm.kernels.npu import NpuBackend
from heterollm.kernels.ops import Activation, GraphMemory, OpSpec


@dataclass(frozen=True, slots=True)
class PlanTarget:
    """The model and the device that a plan is checked for.

    Args:
        specs: Every group of the model, and the experts of a mixture.
        npu: The device's NPU, if it has one.
        activation: Activation of the model's feed-forward networks.
        heads: Query heads and key heads of the model; without them no sparse attention passes.
    """

    specs: Sequence[OpSpec]
    npu: NpuBackend | None
    activation: Activation = "silu"
    heads: tuple[int, int] = (0, 0)


class TechniqueRecord(Struct, frozen=True):
    """The part of a technique in a plan: entries for passes of prefill, of which the first that fits decides.

    An entry has inclusive ranges, ``lengths`` of passes and ``layers`` among them. Cases without one run as
    they would without the technique.

    Args:
        entries: The entries.
    """

    KEY: ClassVar[str]
    """Field of a plan's file that holds the entries."""

    TITLE: ClassVar[str]
    """Words for the technique at the begin of a sentence."""

    entries: tuple[Any, ...] = ()

    @property
    def is_active(self) -> bool:
        """Whether any entry does other than a plan without the technique."""
        return bool(self.entries)

    @property
    def uses_npu(self) -> bool:
        """Whether the NPU works for any entry."""
        return False

    @property
    def changes_values(self) -> bool:
        """Whether passes have other results than on the GPU alone, beyond rounding."""
        return False

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that every user of the plan must know."""
        return ()

    def without_npu(self) -> Self:
        """Return the record of a plan that gives everything to the GPU."""
        return self if not self.uses_npu else type(self)()

    def borders(self, context: int) -> set[int]:
        """Return the numbers of keys between which passes of prefill are alike; none if keys do not matter.

        Args:
            context: Positions of a session.
        """
        del context
        return set()

    def npu_bytes(self, specs: Sequence[OpSpec], memory: GraphMemory, tokens: int | None = None) -> int:
        """Return the bytes that the NPU's graphs take.

        Args:
            specs: Every group of the model, and the experts of a mixture.
            memory: The way in which they count.
            tokens: Length of a pass whose graphs alone count; None for those of all passes.
        """
        del specs, memory, tokens
        return 0

    def check(self, target: PlanTarget) -> None:
        """Refuse entries that are not the model's, or that the device cannot run.

        Raises:
            PlanError: There is such an entry; the message names it.
        """
