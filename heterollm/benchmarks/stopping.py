"""Early ends of a bench, which keep its rows: Ctrl-C, a signal, or a time limit."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Final

from heterollm.base import INTERRUPTED

SIGNALS: Final = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class TerminatedInterrupt(KeyboardInterrupt):
    """The system asked the process to end; handlers of Ctrl-C handle it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class TimeUpError(Exception):
    """The time limit of a bench is over; internal to the package."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Reason of an early end.

    Args:
        reason: ``Ctrl-C``, the name of a signal, or the limit.
        exit_code: Exit code of the command.
    """

    reason: str
    exit_code: int

    @classmethod
    def of(cls, error: BaseException) -> Stop:
        """Return the stop of an exception."""
        if isinstance(error, TimeUpError):
            return cls(str(error), 0)
        if isinstance(error, TerminatedInterrupt):
            return cls(str(error), 128 + error.number)
        return cls("Ctrl-C", INTERRUPTED)


@contextlib.contextmanager
def signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP interrupt the ``with`` body as Ctrl-C does, in the main thread only."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise TerminatedInterrupt(number)

    with contextlib.ExitStack() as stack:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:  # nohup's choice stays
                    before = signal.signal(number, interrupt)
                    stack.callback(signal.signal, number, before or signal.SIG_DFL)
        yield
