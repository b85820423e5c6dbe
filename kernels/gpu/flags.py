"""A flag in shared memory: a word that a kernel increments for the host to poll."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.kernels.gpu.launch import Launch

HALF_RANGE: Final = 1 << 31
WORD_MASK: Final = (1 << 32) - 1


class FlagWord:
    """The flag of one runtime: a word in shared memory that a tiny kernel increments.

    The queue is in order, so one counter shows its progress. The host never writes it, so a late signal of an
    abandoned wait is not mistaken for a newer one.

    Args:
        flush: Flushes the queue.
        array: The memory.
        launch: The kernel that increments the word.
        promised: Whether OpenCL guarantees that the host sees the flag and all writes before it.
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
        """Enqueue the kernel, flush the queue, and return the kernel's event."""
        event = self.launch()
        self.count()
        return event

    def count(self) -> None:
        """Flush the queue, in which the caller has enqueued the flag's kernel."""
        self._flush()
        self.sent = (self.sent + 1) & WORD_MASK

    def reached(self, number: int) -> bool:
        """Return whether the counter has reached ``number``, a value of ``sent``."""
        return (self.view[0] - number) & WORD_MASK < HALF_RANGE

    def resynchronise(self) -> None:
        """Adopt the counter's value; no signal may be pending."""
        self.sent = int(self.view[0])
