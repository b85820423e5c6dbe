"""A technique in an engine: what it holds on the device, and the steps that it adds to passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from heterollm.engine.builder import PassBuilder
from heterollm.engine.placed import PlacedOp
from heterollm.engine.step import Operator, Step
from heterollm.kernels.ops import Join

if TYPE_CHECKING:
    from heterollm.kernels.gpu import DeviceMemory


class Around:
    """Steps of a technique around an operator of a pass; the base adds none.

    Attributes:
        join: How the outputs of both processors become one: side by side, or summed where the GPU's has all
            rows.
    """

    join: Join = "concatenate"

    def before(self) -> None:
        """Append steps before the hand-over to the NPU."""

    def beside(self) -> list[Step]:
        """Return the first steps of the GPU's shard."""
        return []

    def run(self, default: Callable[[], None]) -> None:
        """Append steps around or in place of the default ones: runs of graphs, or dense attention."""
        default()

    def acquire(self) -> None:
        """Append maps of memory that is not coherent, behind those of the operator."""

    def release(self) -> None:
        """Append the ends of these maps."""


class TechniqueSteps:
    """A technique in an engine; the base holds and adds nothing."""

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on the passes so far."""
        return ()

    @property
    def memories(self) -> Mapping[str, DeviceMemory]:
        """Memory for counts of all passes, by the name of the buffer."""
        return {}

    def around(
        self, builder: PassBuilder, operator: Operator, layer: int, op: PlacedOp | None
    ) -> Around | None:
        """Return the steps around an operator; None without any.

        Args:
            builder: The pass so far.
            operator: A group of linears, ``attention`` or ``experts``.
            layer: Decoder layer; -1 for the head.
            op: The group of linears, or the one that reads the output of attention.
        """
        del builder, operator, layer, op
        return None

    def clear(self) -> None:
        """Drop graphs and weights; no compiled pass may run afterwards."""

    def reset(self) -> None:
        """Count from 0 again."""
