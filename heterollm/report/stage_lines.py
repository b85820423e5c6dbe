"""Lines that say where long work is, in place of a progress bar where no terminal shows one."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from heterollm.base import Progress, format_duration

LINE_S: Final = 10.0
"""Time after which work prints its first line, and then the next ones."""


@contextlib.contextmanager
def stage_lines(show: Callable[[str], None]) -> Iterator[Progress]:
    """Show the stage of long work every ten seconds, also while the work reports nothing.

    Args:
        show: Called with each line, on a thread.
    """
    lines = StageLines(time.monotonic)
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(LINE_S / 10):
            if (text := lines.due()) is not None:
                show(text)

    watcher = threading.Thread(target=watch, name="stage lines", daemon=True)
    watcher.start()
    try:
        yield lines.report
    finally:
        ended.set()
        watcher.join()


class StageLines:
    """The lines of work without a terminal.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stage, self._done, self._total = "", 0, 1
        self._since = self._last = clock()

    def report(self, stage: str, done: int, total: int) -> None:
        """Note where the work is."""
        if stage != self._stage:
            self._since = self._clock()
        self._stage, self._done, self._total = stage, done, total

    def due(self) -> str | None:
        """Return the next line; None before its time, and between two stages."""
        now = self._clock()
        if not self._stage or self._done >= self._total or now - max(self._last, self._since) < LINE_S:
            return None
        self._last = now
        share = self._done / max(self._total, 1)
        return f"{self._stage}: {share:.0%} after {format_duration(now - self._since)}"
