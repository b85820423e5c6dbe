"""The protocol of observers, which follow an engine's passes and steps."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Final, Literal, Protocol, TypeAlias

from heterollm.engine.step import Call, Step
from heterollm.kernels.ops import Phase

if TYPE_CHECKING:
    from heterollm.kernels.gpu import HostClock

EngineActivity: TypeAlias = Literal["bind", "step", "build"]
"""The engine's work beside the steps of a pass: finding the compiled pass and binding the session's memory,
writing the step buffer, and compiling."""


UNOBSERVED: Final = nullcontext()
"""The context without an observer; shared, so that the token loop creates no object."""


class Observer(Protocol):
    """Follows an engine; the engine calls all methods on its thread."""

    def during_pass(self, phase: Phase, tokens: int, position: int) -> AbstractContextManager[object]:
        """Return the context of a pass of ``tokens`` tokens from ``position`` on."""
        ...

    def during(self, activity: EngineActivity) -> AbstractContextManager[object]:
        """Return the context of an activity."""
        ...

    def call_of(self, step: Step) -> Call:
        """Return the call that replaces a step's own and must do the same."""
        ...

    def watch(self, clock: HostClock) -> HostClock:
        """Return the clock that replaces the host's in waits."""
        ...


def during(observer: Observer | None, activity: EngineActivity) -> AbstractContextManager[object]:
    """Return the context of an activity, also without an observer."""
    return UNOBSERVED if observer is None else observer.during(activity)
