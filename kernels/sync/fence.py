"""Fences: the host, and so the NPU, waits until the GPU's queue reaches a mark.

A fence is a prepared call at one place of a pass. The token loop calls it after the launches that produce the
data. It returns when everything enqueued before its mark is done and, in coherent memory, visible to the
host. Mapped memory must be acquired afterwards with every strategy.

The strategies (HeteroLLM, section 4.3, "fast synchronization"; measured on PoCL: a blocking wait returns 10
to 20 us after the kernel, a poll within 1 us):

``finish``
    The driver's blocking wait for the whole queue: the baseline.
``event``
    The driver's blocking wait for a marker; later launches may follow the marker.
``poll``
    Polls the marker's state.
``flag``
    Polls a word in shared memory, which a tiny kernel increments.
``sleep_poll``, ``sleep_flag``
    Sleep for most of the predicted time, then poll as above.

A poll yields to other threads at each turn. After the spin budget it sleeps between polls for a hundredth of
the time waited so far, and after the timeout it raises; that of a fence's first wait is longer, since the
driver may still compile the kernels before it. It never falls back to a blocking wait of the driver,
which has no timeout: ``finish`` and ``event`` return from a lost device only when the driver gives up.
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
from heterollm.kernels.sync.litmus import stale_memory

SLOW_POLL_FRACTION: Final = 0.01
"""Sleep between polls after the spin budget, as a fraction of the time waited so far."""

LONGEST_SLEEP_NS: Final = 5_000_000

STRONG_MEMORY_ORDER: Final = platform.machine().lower() in {"x86_64", "amd64", "i686", "x86"}
"""Whether the processor keeps a thread's reads in order."""


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """Bounds of one polling wait.

    Args:
        spin_us: Longest polling without sleep.
        timeout_s: Time after which it raises; far above the longest pass.
        compiling_s: Time that a fence's first wait may take beside that: some drivers, PoCL among them,
            compile a kernel when the queue first reaches it, which takes minutes on a busy machine.
    """

    spin_us: float = 10_000.0
    timeout_s: float = 60.0
    compiling_s: float = 600.0

    def __post_init__(self) -> None:
        if not self.spin_us >= 0 or not self.timeout_s > 0 or not self.compiling_s >= 0:
            raise OptionError(
                f"A wait cannot poll for {self.spin_us} us and give up after {self.timeout_s} s, the first "
                f"one {self.compiling_s} s later.",
                fix="The second must be more than 0, the others 0 or more.",
            )


class Fence(Protocol):
    """A prepared wait at one place of a pass, from :func:`prepare_fence`."""

    @property
    def strategy(self) -> Strategy:
        """Method of the wait."""

    @property
    def label(self) -> str:
        """Name of the place in messages."""

    @property
    def launch(self) -> Launch | None:
        """The kernel that sends the signal, or None; :meth:`sent` may replace :meth:`mark` for a kernel."""

    def mark(self) -> None:
        """Send the signal behind everything enqueued so far."""

    def sent(self) -> None:
        """Flush the queue and note that the caller has enqueued :attr:`launch`.

        The signal can thus be one of the kernels of a merged launch.
        """

    def wait(self) -> None:
        """Wait for the signal; later launches may still run.

        Raises:
            FenceError: The signal did not come within the timeout.
            KernelError: A kernel failed.
        """

    def __call__(self) -> None:
        """Mark and wait at once."""


# -- strategies of a device --------------------------------------------------------------------------

_refusals: weakref.WeakKeyDictionary[GpuRuntime, dict[Strategy, str]] = weakref.WeakKeyDictionary()


def strategies_for(runtime: GpuRuntime) -> tuple[Strategy, ...]:
    """Return the strategies that a device offers, in the order of ``STRATEGIES``.

    A device offers the flag if OpenCL guarantees that the host sees it, or if a short litmus test passes.
    """
    refused = refused_strategies(runtime)
    return tuple(strategy for strategy in STRATEGIES if strategy not in refused)


def refused_strategies(runtime: GpuRuntime) -> dict[Strategy, str]:
    """Return the strategies that a device does not offer, with the reason; checked once a device."""
    if runtime not in _refusals:
        reason = _flag_refusal(runtime)
        _refusals[runtime] = {"flag": reason, "sleep_flag": reason} if reason else {}
    return dict(_refusals[runtime])


def _flag_refusal(runtime: GpuRuntime) -> str:
    """Return why the host cannot rely on a flag, or an empty text."""
    try:
        flag = runtime.flag
        if flag is None:
            if runtime.traits.coherent:
                return "a simulated kernel writes at no simulated time"
            return "memory must be mapped, and no fine-grained SVM with atomics is reported"
    except KernelError as error:
        return f"the flag's kernel does not run ({error.message})"
    return "" if flag.promised else stale_memory(runtime)


def resynchronise(runtime: GpuRuntime) -> None:
    """Forget pending signals after a failure; the queue must be finished."""
    if runtime in _refusals and (flag := runtime.flag) is not None:
        flag.resynchronise()


# -- prepared calls ----------------------------------------------------------------------------------


def prepare_fence(
    runtime: GpuRuntime,
    strategy: Strategy,
    label: str,
    *,
    limits: WaitLimits | None = None,
    clock: HostClock | None = None,
) -> Fence:
    """Return the fence of one place; call this on the thread that will wait.

    Args:
        runtime: The device to wait for.
        strategy: Method of the wait.
        label: Name of the place in messages.
        limits: Bounds of the polling; None for the defaults.
        clock: Clock of the host; None for the runtime's.

    Raises:
        OptionError: The device does not offer the strategy; the message gives the reason.
    """
    if strategy not in STRATEGIES:
        raise OptionError(
            f"There is no sync strategy {strategy!r}.", fix=f"Choose among {', '.join(STRATEGIES)}."
        )
    # The baseline needs no litmus test.
    uses_flag = strategy.endswith("flag")
    if uses_flag and (reason := refused_strategies(runtime).get(strategy)):
        raise OptionError(
            f"{runtime.traits.name!r} does not offer the sync strategy {strategy!r}: {reason}.",
            fix=f"Choose among {', '.join(strategies_for(runtime))}.",
        )
    if strategy in ("finish", "event"):
        return BlockingFence(runtime, strategy, label)
    flag = runtime.flag if uses_flag else None
    signal = MarkerSignal(runtime) if flag is None else FlagSignal(runtime, flag)
    prediction = WaitPrediction() if strategy.startswith("sleep") else None
    clock = clock or runtime.host_clock()
    return PollingFence(strategy, label, signal, limits or WaitLimits(), clock, prediction)


class BlockingFence:
    """A wait in the driver, without a timeout: ``finish`` for the whole queue, ``event`` for a marker."""

    __slots__ = ("_marker", "_runtime", "label", "strategy")

    def __init__(self, runtime: GpuRuntime, strategy: Strategy, label: str) -> None:
        self._runtime = runtime
        self._marker = MarkerSignal(runtime) if strategy == "event" else None
        self.strategy = strategy
        self.label = label

    @property
    def launch(self) -> None:
        """None: the driver signals."""

    def sent(self) -> None:
        """Do nothing: there is no kernel; see :meth:`Fence.sent`."""

    def mark(self) -> None:
        """Send the signal; see :meth:`Fence.mark`."""
        if self._marker is None:
            self._runtime.flush()
        else:
            self._marker.send()

    def wait(self) -> None:
        """Wait for it; see :meth:`Fence.wait`."""
        if self._marker is None:
            self._runtime.hand_to_host()
        elif self._marker.event is not None:
            block_on(self._marker.event)

    def __call__(self) -> None:
        """Mark and wait at once."""
        if self._marker is not None:
            self._marker.send()
        self.wait()


class PollingFence:
    """A wait that polls for a signal, after a predicted sleep if it has a prediction.

    Args:
        strategy: Name of the strategy.
        label: Name of the place in messages.
        signal: Signal to send and to poll for.
        limits: Bounds of the polling.
        clock: Clock of the host.
        prediction: Predictor of the time from mark to signal; None polls at once.
    """

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
        self._timeout_s = limits.timeout_s + limits.compiling_s

    @property
    def launch(self) -> Launch | None:
        """The kernel that raises the flag; None where a marker is polled."""
        return self._signal.launch if isinstance(self._signal, FlagSignal) else None

    def mark(self) -> None:
        """Send the signal; see :meth:`Fence.mark`."""
        self._signal.send()
        self._marked_ns = self._clock.now_ns()

    def sent(self) -> None:
        """Note that the flag's kernel was enqueued; see :meth:`Fence.sent`."""
        if isinstance(self._signal, FlagSignal):
            self._signal.sent()
            self._marked_ns = self._clock.now_ns()

    def __call__(self) -> None:
        """Mark and wait at once."""
        self.mark()
        self.wait()

    def wait(self) -> None:
        """Wait for it; see :meth:`Fence.wait`."""
        prediction = self.prediction
        slept = prediction is not None and self._sleep(prediction)
        first = self._seen()
        if not first:
            self._poll()
        if prediction is not None and (slept or not first):
            # A signal that came before the host slept carries no timing information.
            duration_us = (self._clock.now_ns() - self._marked_ns) / 1e3
            prediction.observe(duration_us, overslept=first)
        self._timeout_s = self._limits.timeout_s  # the kernels before it are compiled
        if not STRONG_MEMORY_ORDER:
            # Releasing and taking the interpreter lock is a memory barrier: data reads stay behind the
            # flag's.
            self._clock.yield_lock()

    def _sleep(self, prediction: WaitPrediction) -> bool:
        clock = self._clock
        length_us = prediction.sleep_us(clock.overshoot_us)
        if not length_us:
            return False
        left_us = min(length_us, self._timeout_s * 1e6) - (clock.now_ns() - self._marked_ns) / 1e3
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
        timeout_ns = int(self._timeout_s * 1e9)
        while not self._seen():
            waited_ns = now_ns() - begin_ns
            if waited_ns > timeout_ns or self._signal.lost():
                self._raise(waited_ns)
            self._clock.sleep_s(min(int(waited_ns * SLOW_POLL_FRACTION), LONGEST_SLEEP_NS) / 1e9)

    def _raise(self, waited_ns: int) -> None:
        raise FenceError(
            f"The fence {self.label!r} ({self.strategy!r}) got no signal in {waited_ns / 1e9:.3g} s.",
            fix="Run `heterollm doctor`; the strategy 'finish' waits without a flag and without a limit. "
            + see("a-fence-gets-no-signal"),
        )
