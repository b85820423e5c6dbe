"""The host's clock and sleeps, and the prediction of waits.

The precision of a sleep is measured. Polling lets other threads of the interpreter run at every turn.
"""

from __future__ import annotations

import ctypes
import functools
import os
import select
import statistics
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

Strategy = Literal["finish", "event", "poll", "flag", "sleep_poll", "sleep_flag"]
"""Method by which the host waits for the GPU; see :mod:`heterollm.kernels.sync.fence`."""

STRATEGIES: Final[tuple[Strategy, ...]] = get_args(Strategy)

SyncChoice: TypeAlias = Literal["operator", Strategy]
"""Synchronisation of passes: a strategy, or ``operator``, which finishes the GPU's queue after every
operator, the baseline of fast waits."""

SYNC_CHOICES: Final[tuple[SyncChoice, ...]] = get_args(SyncChoice)

SET_TIMER_SLACK: Final = 29
"""``PR_SET_TIMERSLACK`` of Linux's ``prctl``."""

PROBES: Final = 15
PROBE_US: Final = 100.0

LEAST_MARGIN_US: Final = 30.0
MARGIN_DEVIATIONS: Final = 2.0
"""Deviations by which a sleep ends before the predicted end; from 2 on the wait sees the end at once."""

GAIN: Final = 0.25
"""Weight of a new observation in the averages."""

OVERSLEPT_STEP: Final = 0.05
OVERSLEPT_LIMIT: Final = 0.5

_slack = threading.local()


@dataclass(frozen=True, slots=True)
class HostClock:
    """Clock and sleep of the host; tests replace it.

    Args:
        now_ns: Returns nanoseconds since any fixed moment.
        sleep_s: Sleeps for a number of seconds.
        yield_lock: Lets other threads of the interpreter run.
        overshoot_us: Usual lateness of a sleep.
    """

    now_ns: Callable[[], int]
    sleep_s: Callable[[float], object]
    yield_lock: Callable[[], object]
    overshoot_us: float

    @classmethod
    def of_this_thread(cls) -> HostClock:
        """Return the host's own clock and lower the calling thread's timer slack."""
        lower_timer_slack()
        return cls(time.perf_counter_ns, time.sleep, yield_interpreter(), sleep_overshoot_us())


def lower_timer_slack() -> bool:
    """Lower the calling thread's timer slack on Linux and Android; return whether that worked.

    The default lets a thread wake up to 50 us late.
    """
    if not hasattr(_slack, "lowered"):
        _slack.lowered = False
        if sys.platform in ("linux", "android"):
            try:
                _slack.lowered = ctypes.CDLL(None).prctl(SET_TIMER_SLACK, 1, 0, 0, 0) == 0
            except (OSError, AttributeError):
                _slack.lowered = False
    return bool(_slack.lowered)


def _by_select() -> None:
    select.select((), (), (), 0)


def _by_sleep() -> None:
    time.sleep(0)


@functools.cache
def yield_interpreter() -> Callable[[], None]:
    """Return the cheapest call that releases the interpreter lock for a moment, measured once.

    ``time.sleep(0)`` works everywhere, but uses a timer: 40 to 80 us on one Linux machine, where an empty
    ``select`` took 0.7 us.
    """
    if os.name != "posix":
        return _by_sleep  # an empty select is an error on Windows
    return min(_by_select, _by_sleep, key=lambda call: _median_us(call, PROBES))


def _median_us(call: Callable[[], object], count: int) -> float:
    samples = []
    for _ in range(count):
        begin = time.perf_counter_ns()
        call()
        samples.append(time.perf_counter_ns() - begin)
    return statistics.median(samples) / 1e3


@functools.cache
def sleep_overshoot_us() -> float:
    """Return the usual lateness of a short sleep on this platform, measured once."""
    lower_timer_slack()
    return max(0.0, _median_us(lambda: time.sleep(PROBE_US / 1e6), PROBES) - PROBE_US)


class WaitPrediction:
    """Predicts the waits at one place by moving averages of duration and deviation.

    Attributes:
        mean_us: Average duration; 0 before the first observation.
        deviation_us: Average absolute deviation.
    """

    __slots__ = ("_overslept", "deviation_us", "mean_us")

    def __init__(self) -> None:
        self.mean_us = 0.0
        self.deviation_us = 0.0
        self._overslept = 0

    def observe(self, duration_us: float, *, overslept: bool = False) -> None:
        """Add a wait.

        Args:
            duration_us: Time from mark to signal.
            overslept: Whether the signal came before the sleep ended.
        """
        # An overslept wait hides its end, so its duration is reduced, more with each such wait in a row: one
        # late wake-up changes little, and a much shorter load is followed within a few waits. A long wait is
        # clipped: a prediction that is too long makes the fence late, one that is too short only costs
        # polling.
        if overslept:
            share = OVERSLEPT_STEP * (1 << min(self._overslept, 8))
            duration_us *= 1.0 - min(OVERSLEPT_LIMIT, share)
            self._overslept += 1
        else:
            self._overslept = 0
        if not self.mean_us:
            self.mean_us, self.deviation_us = duration_us, duration_us / 4
            return
        longest = self.mean_us + max(4 * self.deviation_us, 4 * LEAST_MARGIN_US)
        error = min(duration_us, longest) - self.mean_us
        self.mean_us += GAIN * error
        self.deviation_us += GAIN * (abs(error) - self.deviation_us)

    def sleep_us(self, overshoot_us: float) -> float:
        """Return the length of a sleep after the mark; 0 if it is too short for the sleep's precision."""
        margin_us = max(LEAST_MARGIN_US, MARGIN_DEVIATIONS * self.deviation_us) + overshoot_us
        length_us = self.mean_us - margin_us
        return length_us if length_us > overshoot_us else 0.0
