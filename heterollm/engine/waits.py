"""How the parts wait for each other: which hand-over strategy serves which phase, and its prepared calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, get_args

from heterollm.engine.sync import Sync
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import HostClock, Strategy
from heterollm.kernels.ops import Group, Phase
from heterollm.kernels.sync import HandOver, WaitLimits, prepare_hand_over, strategies_for

if TYPE_CHECKING:
    from heterollm.profiler.records import Profile

__all__ = ["HandOvers", "PassHandOvers", "PhaseStrategies", "default_strategies"]

LIMITS: Final = WaitLimits()


@dataclass(frozen=True, slots=True)
class PhaseStrategies:
    """The strategy of each phase."""

    prefill: Strategy
    decode: Strategy

    def of(self, phase: Phase) -> Strategy:
        """Return a phase's."""
        return self.prefill if phase == "prefill" else self.decode


def default_strategies(device: Device, profile: Profile | None = None) -> PhaseStrategies:
    """Return what ``auto`` stands for.

    With a profile, the best strategy that was measured. Without one, the driver's wait for a marker, which
    takes no core from anyone. There is one exception: a coherent device whose parts have cores of their own,
    as ``host`` usually has. There the engine thread's core idles while the thread waits, so that decode, in
    which waits are short and many, polls: a flag if the device offers it, otherwise the marker.

    Args:
        device: The opened device; asked on the engine thread, as finding out may run the litmus test.
        profile: What was measured on it.
    """
    offered = strategies_for(device.gpu)
    if profile is not None:
        from heterollm.solver import best_hand_over

        best = best_hand_over(profile)
        if best in offered:
            return PhaseStrategies(best, best)
    split = device.split
    own_cores = bool(split.npu_cores) and not set(split.npu_cores) & set(split.gpu_cores)
    if not (own_cores and device.gpu.traits.coherent):
        return PhaseStrategies("event", "event")
    return PhaseStrategies("event", "flag" if "flag" in offered else "poll")


class HandOvers:
    """Makes the prepared waits of passes; made itself when a model is loaded, on the engine thread.

    What takes long happens here once: finding out what the device offers, and how precise the host's sleep
    is. Making the waits of a pass takes microseconds afterwards.

    Args:
        device: The opened device.
        sync: What was asked for.
        profile: What was measured on the device, for ``auto``.
        used: Whether any pass has a hand-over; without one nothing is found out.

    Attributes:
        after_every_operator: Whether the queue is finished after each operator, and nothing is merged.

    Raises:
        OptionError: The device does not offer the strategy; the message says why.
    """

    def __init__(self, device: Device, sync: Sync, profile: Profile | None = None, *, used: bool) -> None:
        self._runtime = device.gpu
        self.after_every_operator = sync == "operator"
        self._clock: HostClock | None = None
        if sync == "operator" or (sync == "auto" and not used):
            self.strategies = PhaseStrategies("finish", "finish")
        elif sync == "auto":
            self.strategies = default_strategies(device, profile)
        else:
            self.strategies = PhaseStrategies(sync, sync)
        if not {self.strategies.prefill, self.strategies.decode} <= {"finish", "event"}:
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

    def prepare(self, phase: Phase, label: str) -> HandOver:
        """Return the wait of one place."""
        strategy = self.strategies.of(phase)
        return prepare_hand_over(self._runtime, strategy, label, limits=LIMITS, clock=self._clock)

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
        self._made: dict[tuple[Group | Literal["end"], bool], HandOver] = {}

    def before(self, group: Group | Literal["end"], layer: int = -1) -> HandOver:
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
