"""A flag in shared memory: a word that a kernel counts up when the queue comes to it, for the host to see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.gpu.launch import Launch

__all__ = ["FlagWord"]

HALF_RANGE: Final = 1 << 31
WORD_MASK: Final = (1 << 32) - 1


class FlagWord:
    """A word in memory that host and device share, counted up by a tiny kernel at the end of the queue.

    One for each runtime: the queue is in order, so that a count says how far it got. Nothing is written by
    the host, so that a signal that was given up and comes late is not mistaken for a later one.

    Args:
        flush: Starts what is enqueued.
        array: The memory.
        launch: The kernel that counts.
        promised: Whether OpenCL promises that the host sees the flag, and what was written before it.
    """

    __slots__ = ("_flush", "array", "launch", "promised", "sent", "view")

    def __init__(
        self, flush: Callable[[], None], array: NDArray[np.uint32], launch: Launch, *, promised: bool
    ) -> None:
        self._flush = flush
        self.launch = launch
        self.array = array
        self.view = array.data
        self.promised = promised
        self.sent = int(self.view[0])

    def send(self) -> Any:  # noqa: ANN401 - an event
        """Enqueue the kernel, start what is enqueued, and return the kernel's event."""
        event = self.launch()
        self.count()
        return event

    def count(self) -> None:
        """Start what is enqueued, the flag's kernel in it, which the caller has enqueued by itself."""
        self._flush()
        self.sent = (self.sent + 1) & WORD_MASK

    def reached(self, number: int) -> bool:
        """Whether the count has come to ``number``, one of the values of ``sent``."""
        return (self.view[0] - number) & WORD_MASK < HALF_RANGE

    def resynchronise(self) -> None:
        """Take the count as it is; only while no signal is on its way."""
        self.sent = int(self.view[0])
