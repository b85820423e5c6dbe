"""Follows the reading of a prompt: its end when the answer is cancelled, its progress, and its pace."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from heterollm.base import Progress
from heterollm.kernels.gpu import Event, GpuRuntime, block_on

READING: Final = "Reading the prompt"
"""The name of the stage."""

LONG_PROMPT: Final = 128
"""Tokens from which on a prompt has progress: the first look waits for a layer's kernels."""

LOOK_S: Final = 0.25
"""Seconds between two looks at the progress."""

SHORTEST_S: Final = 1e-3
"""Least time that a clock of coarse steps may show."""


class PromptReading:
    """Tells the engine, between layers and chunks, whether to stop reading a prompt.

    The host runs ahead of the GPU, so that only a wait for the kernels shows the progress: once after the
    first layer, and then about every :data:`LOOK_S`.

    Args:
        tokens: Length of the prompt.
        cancel: Stops the reading when it is set.
        progress: Called with the stage's name, tokens read and tokens in all; None to report nothing.
        finish: Waits for the kernels that are enqueued.
    """

    __slots__ = ("_begin_s", "_cancel", "_finish", "_next", "_progress", "_tokens")

    def __init__(
        self, tokens: int, cancel: threading.Event, progress: Progress | None, finish: Callable[[], None]
    ) -> None:
        self._tokens = tokens
        self._cancel = cancel
        self._progress = progress if tokens >= LONG_PROMPT else None
        self._finish = finish
        self._next = 0.0
        self._begin_s = time.perf_counter()

    def __call__(self, part: float) -> bool:
        """Return whether to stop, when the kernels of this part of the prompt, 0 to 1, are enqueued."""
        if self._progress is not None and part >= self._next:
            self._finish()
            self._progress(READING, int(part * self._tokens), self._tokens)
            self._next = part * (1 + LOOK_S / max(time.perf_counter() - self._begin_s, SHORTEST_S))
        return self._cancel.is_set()


class QueuePace:
    """Keeps the host a layer ahead of the GPU, so that its clock tells how long a prompt has been read.

    Without the NPU's graphs nothing else would: a whole chunk is enqueued within milliseconds.

    Args:
        gpu: The GPU.
        clock: Returns the seconds of the device.
    """

    __slots__ = ("_clock", "_gpu", "_last", "_waited_s")

    def __init__(self, gpu: GpuRuntime, clock: Callable[[], float]) -> None:
        self._gpu = gpu
        self._clock = clock
        self.begin()

    def begin(self) -> None:
        """Forget the kernels so far."""
        self._last: Event | None = None
        self._waited_s = 0.0

    def keep(self) -> float:
        """Wait for the kernels before the last call; return when those behind it will end, about."""
        last, self._last = self._last, self._gpu.enqueue_marker()
        self._gpu.flush()
        if last is not None:
            block_on(last)
        before_s, self._waited_s = self._waited_s, self._clock()
        return self._waited_s + (self._waited_s - before_s if before_s else 0.0)
