"""How the parts wait for each other: which hand-over strategy serves which phase, and its prepared calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, cast, get_args

from heterollm.kernels.device import Device
from heterollm.kernels.gpu import HostClock, Strategy
from heterollm.kernels.ops import Group, Phase
from heterollm.kernels.sync import Fence, WaitLimits, prepare_fence, strategies_for
from heterollm.solver import PhaseSync

__all__ = ["HandOvers", "PassHandOvers", "default_sync"]

LIMITS: Final = WaitLimits()


def default_sync(device: Device, measured: Strategy | None = None) -> PhaseSync:
    """Return the ways of waiting that suit a device.

    The best strategy that was measured, if any was. Otherwise the driver's wait for a marker, which takes no
    core from anyone. There is one exception: a coherent device whose processors have cores of their own, as
    ``host`` usually has. There the engine thread's core idles while the thread waits, so that decode, in
    which waits are short and many, polls: a flag if the device offers it, otherwise the marker.

    Args:
        device: The opened device; asked on the engine thread, as finding out may run the litmus test.
        measured: The strategy that was measured to be best on it.
    """
    offered = strategies_for(device.gpu)
    if measured in offered:
        return PhaseSync(measured, measured)
    split = device.split
    own_cores = bool(split.npu_cores) and not set(split.npu_cores) & set(split.gpu_cores)
    if not (own_cores and device.gpu.traits.coherent):
        return PhaseSync("event", "event")
    return PhaseSync("event", "flag" if "flag" in offered else "poll")


class HandOvers:
    """Makes the prepared waits of passes; made itself when a model is loaded, on the engine thread.

    What takes long happens here once: finding out what the device offers, and how precise the host's sleep
    is. Making the waits of a pass takes microseconds afterwards.

    Args:
        device: The opened device.
        sync: The plan's ways of waiting.

    Attributes:
        after_every_operator: Whether the queue is finished after each operator, and nothing is merged.

    Raises:
        OptionError: The device does not offer the strategy; the message says why.
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
        """Give the waits that are made from now on another clock, such as one whose sleeps are recorded.

        Args:
            watched: Returns the other from the one.
        """
        if self._clock is not None:
            self._clock = watched(self._clock)

    def prepare(self, phase: Phase, label: str) -> Fence:
        """Return the wait of one place."""
        strategy = self.strategies[phase]
        return prepare_fence(self._runtime, strategy, label, limits=LIMITS, clock=self._clock)

    def of_pass(self, phase: Phase, tokens: int) -> PassHandOvers:
        """Return the waits of one pass, none made yet."""
        return PassHandOvers(self, phase, tokens)


class PassHandOvers:
    """The waits of one pass: one for each group, whose layers take alike long and share a prediction.

    The first layer has waits of its own: no layer precedes it, so that one can be much shorter than those of
    its group, and a sleep that was learnt from them would start the NPU late in every pass.

    Args:
        hand_overs: Makes them.
        phase: Of the pass.
        tokens: Of the pass.
    """

    __slots__ = ("_hand_overs", "_made", "_phase", "_tokens")

    def __init__(self, hand_overs: HandOvers, phase: Phase, tokens: int) -> None:
        self._hand_overs = hand_overs
        self._phase: Phase = phase
        self._tokens = tokens
        self._made: dict[tuple[Group | Literal["end"], bool], Fence] = {}

    def before(self, group: Group | Literal["end"], layer: int = -1) -> Fence:
        """Return the wait for the input of a group's NPU graphs, or for the end of the pass.

        Args:
            group: The group, or the end.
            layer: Its layer; -1 where there is none.
        """
        place = group, layer == 0
        if place not in self._made:
            label = f"{group}, {self._phase} of {self._tokens}"
            self._made[place] = self._hand_overs.prepare(self._phase, label)
        return self._made[place]
