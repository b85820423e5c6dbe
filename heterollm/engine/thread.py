"""The engine thread, which opens the device and makes all its calls.

All calls to OpenCL and NPU sessions run on it, so that calls from several threads are serialised, and the
caller's thread is never pinned.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, TypeVar

from heterollm.base import EngineError, check_process, mark_device_opened

if TYPE_CHECKING:
    from heterollm.kernels.device import PowerSwitch

T = TypeVar("T")
Calls: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"

IDLE_S: Final = 0.25
"""Time without a call after which the processors rest: longer than a caller takes between two tokens."""


class Background(Protocol):
    """Work of the engine thread between calls."""

    def step(self) -> bool:
        """Do a part of the work, and return whether there was any; raises nothing."""

    def stop(self, error: EngineError) -> None:
        """Give up all work: the model is closed."""


class EngineThread:
    """Runs submitted calls in sequence on a thread of its own, until it is closed or dropped.

    Between two calls, and while none waits, it runs a step of the work in the background, if there is any.

    Raises:
        EngineError: The process was forked from one that had such a thread.
    """

    def __init__(self) -> None:
        self._calls: Calls = queue.SimpleQueue()  # first, for __del__ after a refusal
        check_process()
        mark_device_opened()
        self._switches: list[PowerSwitch] = []
        self.background: list[Background] = []
        """Work whose steps run between calls; a call on this thread removes it."""
        self._lock = threading.Lock()
        self._closed = False
        # A daemon, so that a program ends without closing the model. The thread holds the queue and not this
        # object, so that dropping a model without closing it ends the thread.
        self._thread = threading.Thread(
            target=_work,
            args=(self._calls, self._switches, self.background),
            name="heterollm-engine",
            daemon=True,
        )
        self._thread.start()

    @property
    def closed(self) -> bool:
        """Whether :meth:`submit` refuses calls."""
        return self._closed

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call and return its future.

        Raises:
            EngineError: The engine is closed, or lost in a fork.
        """
        check_process()
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise _closed()
            self._calls.put(partial(_answer, call, future))
        return future

    def run(self, call: Callable[[], T]) -> T:
        """Run a call on the engine thread and return its result.

        Raises:
            EngineError: The engine is closed.
        """
        if threading.current_thread() is self._thread:
            return call()
        return self.submit(call).result()

    def wake(self) -> None:
        """Look again for work in the background; does nothing if the model is closed."""
        self._calls.put(_look)

    def rest_when_idle(self, switch: PowerSwitch) -> None:
        """Let a processor rest whenever no call came for a while, and wake it before the next one."""
        self.run(lambda: self._switches.append(switch))

    def close(self, last: Callable[[], None] | None = None) -> None:
        """Let the queued calls finish, run ``last`` after them, and end the thread. May be called twice."""
        if not self._thread.is_alive():  # closed before, or lost in a fork
            return
        ended: Future[None] = Future()
        with self._lock:
            if not self._closed:
                self._closed = True
                if last is not None:
                    self._calls.put(partial(_answer, last, ended))
                self._calls.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            if ended.done():
                ended.result()

    def __del__(self) -> None:
        if hasattr(self, "_calls"):  # else the process was refused
            self._calls.put(None)


def _work(calls: Calls, switches: list[PowerSwitch], background: list[Background]) -> None:
    awake, busy = True, False
    while True:
        if not busy or not calls.empty():
            try:
                call = calls.get(timeout=IDLE_S if awake and switches else None)
            except queue.Empty:
                awake = False
                for switch in switches:
                    switch.rest()
                continue
            if call is None:
                break
            if not awake:
                awake = True
                for switch in switches:
                    switch.wake()
            call()
            # The memory of the last call must be freed while the thread waits.
            del call
        busy = False
        for work in background:
            busy |= work.step()
    for work in background:
        work.stop(_closed())


def _answer(call: Callable[[], T], future: Future[T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the future is read
            future.set_exception(error)
        finally:
            # The traceback of an error refers to this frame.
            del call, future


def _look() -> None:
    """Do nothing: a step follows each call."""


def _closed() -> EngineError:
    return EngineError("The model is closed.", fix="Load it again.")
