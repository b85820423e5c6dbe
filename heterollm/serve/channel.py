"""The bounded buffer between the engine thread and the reader of a request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final

MOST_EVENTS: Final = 64
"""Events after which the engine waits for the reader."""

LARGE_BATCH: Final = MOST_EVENTS // 2
"""Events for which a reader that needs the end is woken: a wake for each would take time from the kernels."""


class Channel:
    """Takes events on the engine thread and gives them to a coroutine.

    Args:
        batch: Events for which the reader is woken, unless one is urgent.
        wake: Called after each read. The engine may have found the channel full at any moment of it, so
            that no count of the reader's tells whether the engine waits.
    """

    def __init__(self, wake: Callable[[], None], batch: int = 1) -> None:
        self._loop = asyncio.get_running_loop()
        self._wake = wake
        self._batch = batch
        self._events: deque[Any] = deque()
        self._filled = asyncio.Event()
        self._signalled = False
        self._closed = False

    @property
    def full(self) -> bool:
        """Whether the engine has to wait."""
        return len(self._events) >= MOST_EVENTS

    def put(self, event: Any, /, *, urgent: bool = True) -> None:  # noqa: ANN401 - steps, results, errors
        """Add an event, on the engine thread."""
        self._events.append(event)
        if not self._signalled and (urgent or len(self._events) >= self._batch):
            self._signalled = True
            try:
                self._loop.call_soon_threadsafe(self._filled.set)
            except RuntimeError:
                pass  # the loop has ended, and nobody reads

    def close(self) -> None:
        """End the reader's wait: its client has gone."""
        self._closed = True
        self._filled.set()

    async def read(self) -> list[Any] | None:
        """Return all events so far, at least one; None if the client has gone."""
        while True:
            await self._filled.wait()
            if self._closed:
                return None
            self._filled.clear()
            # An event that comes from here on signals again, though this read may take it.
            self._signalled = False
            events = [self._events.popleft() for _ in range(len(self._events))]
            if events:
                self._wake()
                return events
