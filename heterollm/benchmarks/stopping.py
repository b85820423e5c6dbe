"""What ends a bench before its time: Ctrl-C, a signal, or a limit. What was measured is kept."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from heterollm.base import INTERRUPTED

__all__ = ["Stop", "TerminatedInterrupt", "TimeUpError", "signals_interrupt"]

SIGNALS: Final = ("SIGTERM", "SIGHUP")
"""What asks a process to end, as far as the system has them."""


class TerminatedInterrupt(KeyboardInterrupt):
    """The system asked the process to end; what handles Ctrl-C handles this."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class TimeUpError(Exception):
    """The time that a bench may take is over; never leaves the package."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Why a bench ended early.

    Args:
        reason: For people and rows: ``Ctrl-C``, the name of a signal, or the limit.
        exit_code: What the command ends with.
    """

    reason: str
    exit_code: int

    @classmethod
    def of(cls, error: BaseException) -> Stop:
        """Return the stop that an exception means."""
        if isinstance(error, TimeUpError):
            return cls(str(error), 0)
        if isinstance(error, TerminatedInterrupt):
            return cls(str(error), 128 + error.number)
        return cls("Ctrl-C", INTERRUPTED)


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Let signals that end a process interrupt the block as Ctrl-C does.

    Handlers belong to the main thread; elsewhere nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}

    def interrupt(number: int, _frame: Any) -> None:  # noqa: ANN401 - a frame
        raise TerminatedInterrupt(number)

    # Who ignores a signal, as nohup does, goes on ignoring it.
    ours = [number for number in numbers if before[number] != signal.SIG_IGN]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, before[number] or signal.SIG_DFL)
