"""Compiled passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from heterollm.base import EngineError
from heterollm.engine.pauses import Pause, find_pauses
from heterollm.engine.placed import Delta
from heterollm.engine.state import is_state
from heterollm.engine.step import Buffer, Call, Step
from heterollm.engine.windows import PassPiece, Spare, Window, find_pieces, find_windows
from heterollm.kernels.gpu import DeviceMemory, Launch, MergedLaunch, OpenClError
from heterollm.kernels.ops import Phase

NO_NAMES: Final[Mapping[DeviceMemory, Buffer]] = MappingProxyType({})


@dataclass(slots=True, eq=False, weakref_slot=True)
class CompiledPass:
    """A pass through the layers or the head, ready to run.

    Args:
        steps: The steps in order.
        calls: The calls of the steps, which the engine runs.
        state_launches: The kernels that use the state of sessions.
        output: The output of the last layer; None for a head.
        lane: The lane of the output.
        names: The buffers of its slots.
        uses_npu: Whether it runs graphs.
        pauses: Places between layers; None until :meth:`find_pauses` looks for them.
        windows: Places for decode passes, likewise.
        pieces: Parts of a decode pass with its head, likewise.
    """

    steps: tuple[Step, ...]
    calls: tuple[Call, ...]
    state_launches: tuple[Launch | MergedLaunch, ...] = ()
    output: Delta | None = None
    lane: int = 0
    names: Mapping[DeviceMemory, Buffer] = field(default_factory=lambda: NO_NAMES)
    uses_npu: bool = False
    pauses: tuple[Pause, ...] | None = None
    windows: tuple[Window, ...] | None = None
    pieces: tuple[PassPiece, ...] | None = None

    @classmethod
    def of(
        cls,
        steps: tuple[Step, ...],
        output: Delta | None = None,
        lane: int = 0,
        names: Mapping[DeviceMemory, Buffer] = NO_NAMES,
    ) -> CompiledPass:
        """Return the pass with these steps."""
        calls = tuple(step.run for step in steps)
        launches = tuple(
            step.run
            for step in steps
            if isinstance(step.run, Launch | MergedLaunch) and any(map(is_state, (*step.reads, *step.writes)))
        )
        uses_npu = any(step.processor == "npu" for step in steps)
        return cls(steps, calls, launches, output, lane, names, uses_npu)

    def rebind(self) -> None:
        """Use the buffers that the memory of state has now; no kernel may be running."""
        for launch in self.state_launches:
            launch.rebind()

    def find_pauses(self, sizes: Callable[[], Mapping[str, int]]) -> tuple[Pause, ...]:
        """Return the places between layers at which the pass may pause; see :func:`find_pauses`."""
        if self.pauses is None:
            self.pauses = find_pauses(self.steps, self.names, sizes())
        return self.pauses

    def find_windows(self, spares: dict[tuple[str, int], Spare]) -> tuple[Window, ...]:
        """Return the places where decode passes may run beside graphs; see :func:`find_windows`."""
        if self.windows is None:
            self.windows = find_windows(self.steps, self.calls, spares)
        return self.windows

    def find_pieces(self, head: CompiledPass) -> tuple[PassPiece, ...]:
        """Return the pieces of a decode pass with its head, which is always the same."""
        if self.pieces is None:
            self.pieces = find_pieces((*self.steps, *head.steps), (*self.calls, *head.calls))
        return self.pieces


class StalePassError(EngineError):
    """The NPU failed in another pass while this one paused, so that it must start again."""


class PassError(EngineError):
    """The memory does not suffice to compile a pass."""


@contextlib.contextmanager
def compiling(phase: Phase, tokens: int) -> Iterator[None]:
    """Convert errors about memory to :class:`PassError`, which names the pass."""
    try:
        yield
    except (MemoryError, OpenClError) as error:
        raise PassError(
            f"Preparing a {phase} pass of {tokens} tokens failed: {str(error) or 'memory ran out'}.",
            fix="Close other programs, use a smaller context, or choose the plan level gpu.",
        ) from error
