"""Hand-overs from the GPU to the host, and so to the NPU: how to wait until the queue got somewhere.

A hand-over is a prepared call. It stands at one place of a pass and is called in the token loop after the
launches that produce the data; it returns when everything enqueued before its signal is done and, on coherent
memory, visible to the host. Mapped memory must be acquired afterwards as always: a strategy replaces the
waiting and nothing else.

How the strategies differ (HeteroLLM, section 4.3, "fast synchronization"; measured on PoCL: a
blocking wait wakes up 10 to 20 us after the kernel, a poll within one):

``finish``
    The driver's blocking wait for the whole queue: the baseline.
``event``
    Its blocking wait for a marker, behind which more may be enqueued.
``poll``
    Asks for the marker's state over and over.
``flag``
    A tiny kernel at the end of the queue counts up a word in shared memory, which is polled.
``sleep_poll``, ``sleep_flag``
    Sleep for most of the predicted time, then as above.

Polling lets other threads run at each turn, and is bounded: after the spin budget it sleeps between looks,
for a hundredth of the time waited so far, and after the timeout it raises. It never ends in a blocking
wait of the driver, since no timeout reaches into one; ``finish`` and ``event`` are such waits by definition,
and come back from a lost device only when the driver gives up.
"""

from __future__ import annotations

import platform
import weakref
from dataclasses import dataclass
from typing import Final, Protocol

from heterollm.base import FenceError, KernelError, OptionError, see
from heterollm.kernels.gpu import (
    STRATEGIES,
    FlagSignal,
    GpuRuntime,
    HostClock,
    Launch,
    MarkerSignal,
    Strategy,
    WaitPrediction,
    block_on,
)
from heterollm.kernels.sync.litmus import LITMUS_QUICK_ROUNDS, flag_litmus

__all__ = [
    "STRATEGIES",
    "HandOver",
    "Strategy",
    "WaitLimits",
    "prepare_hand_over",
    "refused_strategies",
    "resynchronise",
    "strategies_for",
]

SLOW_LOOKS_FRACTION: Final = 0.01
"""Of the time waited so far: how long to sleep between looks once the spin budget is spent."""

LONGEST_SLEEP_NS: Final = 5_000_000

STRONG_MEMORY_ORDER: Final = platform.machine().lower() in {"x86_64", "amd64", "i686", "x86"}
"""Whether a thread's later reads never overtake an earlier one."""


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """Bounds of one polling wait.

    Args:
        spin_us: How long it may poll without sleeping.
        timeout_s: When it raises; far above the longest pass.
    """

    spin_us: float = 10_000.0
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.spin_us >= 0 or not self.timeout_s > 0:
            raise OptionError(
                f"A wait cannot poll for {self.spin_us} us and give up after {self.timeout_s} s.",
                fix="The first must be 0 or more, the second more than 0.",
            )


class HandOver(Protocol):
    """A prepared wait at one place of a pass; made by :func:`prepare_hand_over`."""

    @property
    def strategy(self) -> Strategy:
        """How it waits."""
        ...

    @property
    def label(self) -> str:
        """What to call the place in messages."""
        ...

    @property
    def launch(self) -> Launch | None:
        """The kernel that sends the signal, where it is one and :meth:`sent` may replace :meth:`mark`."""
        ...

    def mark(self) -> None:
        """Send the signal: everything enqueued so far is what :meth:`wait` waits for."""
        ...

    def sent(self) -> None:
        """Start what is enqueued and take note that :attr:`launch` is in it: the signal is on its way.

        So the signal can be one of many kernels of a merged launch, with others behind it.
        """
        ...

    def wait(self) -> None:
        """Wait for the signal; what was enqueued after :meth:`mark` may go on.

        Raises:
            FenceError: The signal did not come.
            KernelError: A kernel failed.
        """
        ...

    def __call__(self) -> None:
        """Mark and wait at once."""
        ...


# -- what a device offers ----------------------------------------------------------------------------

_refusals: weakref.WeakKeyDictionary[GpuRuntime, dict[Strategy, str]] = weakref.WeakKeyDictionary()


def strategies_for(runtime: GpuRuntime) -> tuple[Strategy, ...]:
    """Return the strategies that a device offers, in the order of ``STRATEGIES``.

    The flag is offered where OpenCL promises that the host sees it, or where a short litmus test did.
    """
    refused = refused_strategies(runtime)
    return tuple(strategy for strategy in STRATEGIES if strategy not in refused)


def refused_strategies(runtime: GpuRuntime) -> dict[Strategy, str]:
    """Return why a device does not offer the strategies that it does not; found out once."""
    if runtime not in _refusals:
        reason = _flag_refusal(runtime)
        _refusals[runtime] = {"flag": reason, "sleep_flag": reason} if reason else {}
    return dict(_refusals[runtime])


def _flag_refusal(runtime: GpuRuntime) -> str:
    """Return why the host cannot rely on a flag; empty if it can."""
    try:
        flag = runtime.flag
        if flag is None:
            if runtime.traits.coherent:
                return "a kernel's writes do not come at the time at which it is said to run"
            return "memory must be mapped, and no fine-grained SVM with atomics is reported"
        if flag.promised:
            return ""
        found = flag_litmus(runtime, LITMUS_QUICK_ROUNDS)
    except KernelError as error:
        return f"the flag's kernel does not run ({error.message})"
    if found.stale:
        return f"{found.stale} of {found.rounds} rounds of the litmus test were lost or saw stale data"
    return ""


def resynchronise(runtime: GpuRuntime) -> None:
    """Forget signals that were sent and not waited for, after a failure; the queue must be finished."""
    if runtime in _refusals and (flag := runtime.flag) is not None:
        flag.resynchronise()


# -- prepared calls ----------------------------------------------------------------------------------


def prepare_hand_over(
    runtime: GpuRuntime,
    strategy: Strategy,
    label: str,
    *,
    limits: WaitLimits | None = None,
    clock: HostClock | None = None,
) -> HandOver:
    """Return the prepared call of one place, on the thread that will call it.

    Args:
        runtime: The device to wait for.
        strategy: How to wait.
        label: What to call the place in messages.
        limits: Bounds of the polling; the default ones if None.
        clock: The host's clock; its own if None.

    Raises:
        OptionError: The device does not offer the strategy; the message says why.
    """
    if strategy not in STRATEGIES:
        raise OptionError(
            f"There is no hand-over strategy {strategy!r}.", fix=f"Choose among {', '.join(STRATEGIES)}."
        )
    # The baseline needs no litmus test.
    uses_flag = strategy.endswith("flag")
    if uses_flag and (reason := refused_strategies(runtime).get(strategy)):
        raise OptionError(
            f"{runtime.traits.name!r} does not offer the hand-over strategy {strategy!r}: {reason}.",
            fix=f"Choose among {', '.join(strategies_for(runtime))}.",
        )
    if strategy in ("finish", "event"):
        return BlockingHandOver(runtime, strategy, label)
    flag = runtime.flag if uses_flag else None
    signal = MarkerSignal(runtime) if flag is None else FlagSignal(runtime, flag)
    prediction = WaitPrediction() if strategy.startswith("sleep") else None
    clock = clock or runtime.host_clock()
    return PollingHandOver(strategy, label, signal, limits or WaitLimits(), clock, prediction)


class BlockingHandOver:
    """Waits inside the driver: ``finish`` for the whole queue, ``event`` for a marker.

    Its wait has no timeout, and ``finish`` also waits for what was enqueued after the mark.
    """

    __slots__ = ("_marker", "_runtime", "label", "strategy")

    def __init__(self, runtime: GpuRuntime, strategy: Strategy, label: str) -> None:
        self._runtime = runtime
        self._marker = MarkerSignal(runtime) if strategy == "event" else None
        self.strategy = strategy
        self.label = label

    @property
    def launch(self) -> None:
        """No kernel: the driver tells."""

    def sent(self) -> None:
        """See :meth:`HandOver.sent`; without a kernel there is nothing to note."""

    def mark(self) -> None:
        """Send the signal; see :meth:`HandOver.mark`."""
        if self._marker is None:
            self._runtime.flush()
        else:
            self._marker.send()

    def wait(self) -> None:
        """Wait for it; see :meth:`HandOver.wait`."""
        if self._marker is None:
            self._runtime.hand_to_host()
        elif self._marker.event is not None:
            block_on(self._marker.event)

    def __call__(self) -> None:
        """Mark and wait at once."""
        if self._marker is not None:
            self._marker.send()
        self.wait()


class PollingHandOver:
    """Looks for a signal over and over, after a predicted sleep if it has a prediction.

    Args:
        strategy: Its name.
        label: What to call the place in messages.
        signal: What is sent and looked for.
        limits: Bounds of the polling.
        clock: The host's clock.
        prediction: Learns the time from mark to signal; None to poll at once.
    """

    __slots__ = (
        "_clock",
        "_limits",
        "_marked_ns",
        "_seen",
        "_signal",
        "_spin_ns",
        "label",
        "prediction",
        "strategy",
    )

    def __init__(
        self,
        strategy: Strategy,
        label: str,
        signal: MarkerSignal | FlagSignal,
        limits: WaitLimits,
        clock: HostClock,
        prediction: WaitPrediction | None,
    ) -> None:
        self.strategy = strategy
        self.label = label
        self.prediction = prediction
        self._signal = signal
        self._seen = signal.seen
        self._limits = limits
        self._spin_ns = int(limits.spin_us * 1e3)
        self._clock = clock
        self._marked_ns = 0

    @property
    def launch(self) -> Launch | None:
        """The kernel that raises the flag; None where a marker is polled."""
        return self._signal.launch if isinstance(self._signal, FlagSignal) else None

    def mark(self) -> None:
        """Send the signal; see :meth:`HandOver.mark`."""
        self._signal.send()
        self._marked_ns = self._clock.now_ns()

    def sent(self) -> None:
        """Take note that the kernel of the flag was enqueued; see :meth:`HandOver.sent`."""
        if isinstance(self._signal, FlagSignal):
            self._signal.sent()
            self._marked_ns = self._clock.now_ns()

    def __call__(self) -> None:
        """Mark and wait at once."""
        self.mark()
        self.wait()

    def wait(self) -> None:
        """Wait for it; see :meth:`HandOver.wait`."""
        prediction = self.prediction
        slept = prediction is not None and self._sleep(prediction)
        first = self._seen()
        if not first:
            self._poll()
        if prediction is not None and (slept or not first):
            # A signal that came before the host slept carries no timing information.
            duration_us = (self._clock.now_ns() - self._marked_ns) / 1e3
            prediction.observe(duration_us, overslept=first)
        if not STRONG_MEMORY_ORDER:
            # Giving up and taking the interpreter lock is a fence: the data is not read before the flag.
            self._clock.yield_lock()

    def _sleep(self, prediction: WaitPrediction) -> bool:
        clock = self._clock
        length_us = prediction.sleep_us(clock.overshoot_us)
        if not length_us:
            return False
        left_us = min(length_us, self._limits.timeout_s * 1e6) - (clock.now_ns() - self._marked_ns) / 1e3
        if left_us <= clock.overshoot_us or self._seen():
            return False
        clock.sleep_s(left_us / 1e6)
        return True

    def _poll(self) -> None:
        seen, yield_lock, now_ns = self._seen, self._clock.yield_lock, self._clock.now_ns
        stop_ns = now_ns() + self._spin_ns
        while not seen():
            yield_lock()
            if now_ns() > stop_ns:
                self._poll_slowly()
                return

    def _poll_slowly(self) -> None:
        now_ns, begin_ns = self._clock.now_ns, self._marked_ns
        timeout_ns = int(self._limits.timeout_s * 1e9)
        while not self._seen():
            waited_ns = now_ns() - begin_ns
            if waited_ns > timeout_ns or self._signal.lost():
                self._raise(waited_ns)
            self._clock.sleep_s(min(int(waited_ns * SLOW_LOOKS_FRACTION), LONGEST_SLEEP_NS) / 1e9)

    def _raise(self, waited_ns: int) -> None:
        raise FenceError(
            f"The hand-over of {self.label!r} by {self.strategy!r} got no signal in {waited_ns / 1e9:.3g} s.",
            fix="Run `heterollm doctor`; the strategy 'finish' waits without a flag and without a limit. "
            + see("a-hand-over-gets-no-signal"),
        )
