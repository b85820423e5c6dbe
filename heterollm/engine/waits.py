"""The fences between processors: the strategy of each phase, and its prepared calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final, Literal, cast, get_args

from heterollm.engine.step import Operator
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import HostClock, Strategy
from heterollm.kernels.ops import Phase
from heterollm.kernels.sync import Fence, WaitLimits, prepare_fence
from heterollm.solver import PhaseSync

LIMITS: Final = WaitLimits()


class Fences:
    """Makes the fences of passes.

    The constructor, on the engine thread, does the slow work at load: it queries the device's strategies and
    measures the precision of the host's sleep. Making the fences of a pass then takes microseconds.

    Args:
        device: The opened device.
        sync: The plan's strategies.

    Attributes:
        after_every_operator: Whether to finish the queue after each operator, without merged launches.

    Raises:
        OptionError: The device does not support the strategy; the message has the reason.
    """

    def __init__(self, device: Device, sync: PhaseSync) -> None:
        self._runtime = device.gpu
        self.after_every_operator = "operator" in (sync.prefill, sync.decode)
        self.strategies: dict[Phase, Strategy] = {
            phase: "finish" if self.after_every_operator else cast("Strategy", sync.of(phase))
            for phase in get_args(Phase)
        }
        self._clock: HostClock | None = None
        if not set(self.strategies.values()) <= {"finish", "event"}:
            self._clock = device.gpu.host_clock()
        for phase in get_args(Phase):
            self.prepare(phase, "loading")

    def watch(self, watched: Callable[[HostClock], HostClock]) -> None:
        """Wrap the clock of the fences that are made from now on, for example to record their sleeps."""
        if self._clock is not None:
            self._clock = watched(self._clock)

    def prepare(self, phase: Phase, label: str) -> Fence:
        """Return a fence with a label for errors."""
        strategy = self.strategies[phase]
        return prepare_fence(self._runtime, strategy, label, limits=LIMITS, clock=self._clock)

    def of_pass(self, phase: Phase, tokens: int) -> PassFences:
        """Return the fences of a pass, none of them made yet."""
        return PassFences(self, phase, tokens)


class PassFences:
    """The fences of a pass: operators that wait for equal work share one, since their waits are equally long.

    Most layers share it. Where less or more work precedes a wait (in the first layer, behind layers without
    waits, in layers of another kind or with another placement) a sleep that was learnt from the other waits
    would start the NPU late in every pass.
    """

    __slots__ = ("_alike", "_fences", "_made", "_phase", "_tokens")

    def __init__(self, fences: Fences, phase: Phase, tokens: int) -> None:
        self._fences = fences
        self._phase: Phase = phase
        self._tokens = tokens
        self._alike: dict[Hashable, Fence] = {}
        self._made: dict[tuple[str, int | None], Fence] = {}

    def before(
        self, operator: Operator | Literal["end"], layer: int | None, awaited: Callable[[], Hashable]
    ) -> Fence:
        """Return the fence before the NPU graphs of an operator, or at the end of the pass.

        Args:
            operator: The operator, or the end.
            layer: The layer; None outside of layers.
            awaited: Returns the work that the fence waits for; asked once for each operator and layer.
        """
        place = operator, layer
        if place not in self._made:
            alike = operator, awaited()
            if alike not in self._alike:
                label = f"{operator}, {self._phase} of {self._tokens}"
                self._alike[alike] = self._fences.prepare(self._phase, label)
            self._made[place] = self._alike[alike]
        return self._made[place]
