"""A process that serves one model on a port of this machine, for a server of several."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final, TypeAlias

from heterollm.base import CONTEXT, EngineError, HeteroLLMError, start_process

END_S: Final = 20.0
"""Time of a process to end its answers."""

Run: TypeAlias = Callable[[Connection], None]
"""Loads and serves a model in a process: sends its port, or the error of the load."""


class ModelProcess:
    """A process that serves one model.

    Args:
        name: The model's name.
        run: What the process runs; it is sent there.
    """

    def __init__(self, name: str, run: Run) -> None:
        self.port = 0
        """The port, once :meth:`wait` has returned."""
        self._name = name
        self._pipe, other = CONTEXT.Pipe(duplex=False)
        self._process = start_process(_run, run, other)
        other.close()

    @property
    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._process.is_alive()

    def wait(self) -> None:
        """Wait until the model is loaded.

        Raises:
            HeteroLLMError: It cannot be loaded; the process has ended.
        """
        try:
            found = self._pipe.recv()
        except (EOFError, OSError):
            self.close()
            found = EngineError(
                f"The process of {self._name!r} ended with exit code {self._process.exitcode}.",
                fix="The server's output says why; signal 9 is often the system running out of memory.",
            )
        if isinstance(found, HeteroLLMError):
            self.close()
            raise found
        self.port = found

    def close(self) -> None:
        """End the process: its answers have some seconds. May be called twice."""
        self._pipe.close()
        self._process.terminate()
        self._process.join(END_S)
        self.kill()
        self._process.join()

    def kill(self) -> None:
        """End the process and its answers at once."""
        self._process.kill()


def _run(run: Run, pipe: Connection) -> None:
    if hasattr(os, "setpgrp"):  # Ctrl-C is for the server, which ends its processes
        os.setpgrp()
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run(pipe)
    except HeteroLLMError as error:
        pipe.send(EngineError(error.message, fix=error.fix))
