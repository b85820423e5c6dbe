"""Graphs that fail, memory that goes stale, and a kernel that keeps the GPU until a test opens a gate."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from heterollm.base import GraphError
from heterollm.kernels.gpu import SOURCES, GpuRuntime, SharedArray
from heterollm.kernels.gpu.binding import cl
from heterollm.kernels.npu.session import SessionGraph


class StaleArray(SharedArray):
    """Memory that claims to be coherent, in which neither host nor device sees what the other has written.

    Args:
        memory: The memory that the device sees; the host sees a copy of its present content.
    """

    __slots__ = ("_of_device",)

    def __init__(self, memory: SharedArray) -> None:
        super().__init__(memory.read(), memory.buffer, memory.queue, coherent=True)
        self._of_device = memory


class Gate:
    """A kernel that runs until the host opens the gate: a signal that never comes.

    The kernel ends after some seconds in any case, so that a failed test leaves no device busy. Where a
    running kernel does not see the host's writes, the queue waits for an event of the host instead.

    Args:
        runtime: The device.
        turns: Polls of the gate after which the kernel ends.
    """

    def __init__(self, runtime: GpuRuntime, turns: int = 2_000_000_000) -> None:
        self._runtime = runtime
        self._event: cl.UserEvent | None = None
        if not runtime.traits.coherent:
            self._launch = self._wait_for_host
            return
        self._word = runtime.shared((64,), np.uint32)
        kernel = runtime.kernel(SOURCES, "stand_at_gate")
        self._launch = runtime.launch(kernel, (self._word, np.int32(turns)), (1,), (1,), "gate")

    def close(self) -> None:
        """Enqueue the kernel; later launches wait."""
        if self._runtime.traits.coherent:
            self._word.array[0] = 0
        self._launch()

    def open(self) -> None:
        """Let the kernel end."""
        if self._runtime.traits.coherent:
            self._word.array[0] = 1
        elif self._event is not None:
            self._event.set_status(cl.command_execution_status.COMPLETE)
            self._event = None

    def _wait_for_host(self) -> Any:
        if self._event is None:
            self._event = cl.UserEvent(self._runtime.context)
        return cl.enqueue_barrier(self._runtime.queue, wait_for=[self._event])


def failing_graphs(patch: pytest.MonkeyPatch) -> threading.Event:
    """Return an event; while it is set, each graph of the NPU that runs fails."""
    fails, bind = threading.Event(), SessionGraph.bind

    def bind_to_fail(graph: SessionGraph, inputs: Any, outputs: Any) -> Callable[[], None]:
        call = bind(graph, inputs, outputs)

        def run() -> None:
            if fails.is_set():
                raise GraphError("The graph failed while running: the device is gone.")
            call()

        return run

    patch.setattr(SessionGraph, "bind", bind_to_fail)
    return fails
