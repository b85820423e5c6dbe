"""An observer of an engine: sees the steps of passes, and when passes begin and end."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from heterollm.engine.step import Call, Step
from heterollm.kernels.ops import Phase

if TYPE_CHECKING:
    from heterollm.kernels.gpu import HostClock

__all__ = ["EngineActivity", "Observer"]

EngineActivity: TypeAlias = Literal["bind", "step", "build"]
"""Work of the engine within a pass beside its steps: finding the compiled pass and naming the session's
memory, writing the step buffer, and compiling."""


class Observer(Protocol):
    """Given to an engine to follow what it does; all methods are called on the engine thread."""

    def during_pass(self, phase: Phase, tokens: int, position: int) -> AbstractContextManager[object]:
        """Return what is entered when a pass begins and left when it ends or fails.

        Args:
            phase: Which placements it uses.
            tokens: How many tokens it takes.
            position: Position of the first.
        """
        ...

    def during(self, activity: EngineActivity) -> AbstractContextManager[object]:
        """Return what is entered when a activity begins and left when it ends."""
        ...

    def call_of(self, step: Step) -> Call:
        """Return the call that the engine makes in place of a step's own; it must do the same."""
        ...

    def watch(self, clock: HostClock) -> HostClock:
        """Return the clock that waits use in place of the host's."""
        ...
