"""Decode passes beside a prompt: the GPU runs their kernels while the NPU computes graphs of the prompt.

A graph's run blocks the engine thread, so that what the GPU is to do meanwhile is enqueued before, behind the
chunk's kernels: in a window. A decode pass is cut into pieces, and each window takes as many as are predicted
to end with the graph. The predictions are measured: times of decode passes alone, times of graphs, and
whether the GPU had nothing left to do when a graph ended.

The pass has a lane of its own and the same kernels as without a prompt, and the queue is in order. So all
values are those of both one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from heterollm.engine.pass_times import NEWEST
from heterollm.engine.passes import StalePassError
from heterollm.engine.step import Call
from heterollm.engine.windows import PassPiece, Window
from heterollm.kernels.gpu import GpuRuntime, MarkerSignal


@dataclass(slots=True)
class PassBeside:
    """A decode pass whose kernels are enqueued piece by piece.

    Args:
        pieces: The pieces.
        run: Runs calls on the queue, unless that hangs.
        logits: Returns its logits when they have run.
        release: Gives the memory of the logits back.
        seconds: Predicted time of the pass alone.
        next: The next piece.
        enqueued_s: Predicted time of those before it.
    """

    pieces: tuple[PassPiece, ...]
    run: Callable[[Sequence[Call]], None]
    logits: Callable[[], NDArray[np.float32]]
    release: Callable[[], None]
    seconds: float = 0.0
    next: int = field(default=0, init=False)
    enqueued_s: float = field(default=0.0, init=False)

    @property
    def is_enqueued(self) -> bool:
        """Whether no piece is left."""
        return self.next == len(self.pieces)

    def enqueue(self, seconds: float) -> float:
        """Enqueue the pieces whose larger part lies within a time, and return what it leaves of that.

        A piece that takes longer than any window waits until several have left time for it.
        """
        while not self.is_enqueued:
            piece = self.pieces[self.next]
            piece_s = piece.fraction * self.seconds
            if seconds < 0.5 * piece_s:
                return seconds
            self.run(piece.calls)
            self.next += 1
            self.enqueued_s += piece_s
            seconds -= piece_s
        return min(0.0, seconds)


class PassSource(Protocol):
    """Decides which decode passes run beside a prompt, and takes what they compute."""

    def begin_beside(self, left_s: float) -> PassBeside | None:
        """Return a pass that shall begin now, or None.

        Args:
            left_s: Predicted time that the windows of the prompt have left for it.
        """

    @property
    def is_due(self) -> bool:
        """Whether the pass must not wait for windows any more."""

    def accept_beside(self, logits: NDArray[np.float32]) -> None:
        """Take the logits of the pass, which the next one overwrites."""

    def fail_beside(self, error: BaseException) -> None:
        """Take the error of the pass."""


class Beside:
    """Runs the passes of a source beside the chunks of one prompt after the other.

    Args:
        gpu: The GPU.
        source: The source.

    Attributes:
        attends: Whether the present chunk has windows, so that passes need no turns of their own.
    """

    def __init__(self, gpu: GpuRuntime, source: PassSource) -> None:
        self._gpu = gpu
        self._source = source
        self._signal = MarkerSignal(gpu)
        self._running: PassBeside | None = None
        self._windows: Sequence[Window] = ()
        self._next, self._more_s = 0, 0.0
        # Spare time of the windows so far, that before the pass that runs, and how much of it a pass takes
        # over its time alone.
        self._passed_s = self._begun_s = 0.0
        self._stretch = 1.0
        self._saved_s = self._beside_s = 0.0
        self.attends = False

    def __enter__(self) -> Beside:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """End the pass that runs where a chunk fails, which may begin again alone."""
        if kind is not None:
            self.attends = False
            self.finish()

    @property
    def runs(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self._running is not None

    def begin_chunk(self, windows: Sequence[Window], *, last: bool) -> None:
        """Prepare for the windows of a chunk, behind which further ones may follow."""
        self.attends = bool(windows)
        self._windows, self._next = windows, 0
        self._more_s = 0.0 if last else float("inf")
        if not windows:
            self.finish()

    def fill(self) -> None:
        """Enqueue kernels for the next window, behind those of the chunk.

        Raises:
            StalePassError: They failed, and the chunk must begin again.
        """
        source, spare_s = self._source, self._windows[self._next].spare.seconds
        if self._running is not None and self._running.is_enqueued and self._signal.seen():
            stretch = (self._passed_s - self._begun_s) / self._running.seconds
            self._stretch += NEWEST * (max(1.0, stretch) - self._stretch)
            self._end(self._running)
        if self._running is None and self.attends:
            left_s = self._more_s + sum(window.spare.likely_s for window in self._windows[self._next :])
            self._running = source.begin_beside(left_s / self._stretch)
            self._begun_s, self._saved_s = self._passed_s, 0.0
        self._passed_s += spare_s
        if self._running is None:
            return
        try:
            time_s = float("inf") if source.is_due else self._saved_s + spare_s
            enqueued_s = self._running.enqueued_s
            self._saved_s = self._running.enqueue(time_s)
            self._beside_s = self._running.enqueued_s - enqueued_s
        except BaseException as error:
            self._fail(error)
            raise StalePassError("A decode pass failed beside this one.") from error
        self._signal.send()

    def learn(self, graph_s: float) -> None:
        """Take the time of the graphs of the window, which have just ended."""
        running, spare = self._running, self._windows[self._next].spare
        if running is None:
            spare.learn_alone(graph_s)
        else:
            waits = self._signal.seen()
            none_left = waits and running.is_enqueued
            spare.learn(graph_s, self._beside_s, None if none_left else waits)
        self._next += 1

    def finish(self) -> None:
        """End the pass that runs, if any: nothing else may use the head's slots meanwhile."""
        running = self._running
        if running is None:
            return
        try:
            running.enqueue(float("inf"))
            running.run((self._gpu.finish,))
        except BaseException as error:  # noqa: BLE001 - it is the error of the pass alone
            self._fail(error)
        else:
            self._end(running)

    def _end(self, running: PassBeside) -> None:
        try:
            logits = running.logits()
        except BaseException as error:  # noqa: BLE001 - as above
            self._fail(error)
            return
        self._running = None
        self._source.accept_beside(logits)
        running.release()

    def _fail(self, error: BaseException) -> None:
        self._running = None
        self._source.fail_beside(error)
