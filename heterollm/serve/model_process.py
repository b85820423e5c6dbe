"""A process that serves one model on a port of this machine, for a server of several."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Final, TypeAlias

from heterollm.base import CONTEXT, DeviceError, EngineError, HeteroLLMError, start_process

END_S: Final = 20.0
"""Time of a process to end its answers."""

Run: TypeAlias = Callable[[Connection, int], None]
"""Loads and serves a model in a process: takes the bytes that its sessions may have, and sends its port and
the bytes that they have at most, or the error of the load."""


class NoSessionError(DeviceError):
    """The memory for sessions holds none.

    Args:
        message: The bytes.
        needed_bytes: Bytes of one session.
        fix: The next step.
    """

    # The base class makes the error again in another process, and gives it its attributes afterwards.
    def __init__(self, message: str, *, needed_bytes: int = 0, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.needed_bytes = needed_bytes


class ModelProcess:
    """A process that serves one model.

    Args:
        name: The model's name.
        run: What the process runs; it is sent there.
        sessions_bytes: Bytes that its sessions may take.
    """

    def __init__(self, name: str, run: Run, sessions_bytes: int) -> None:
        self.port = 0
        """The port, once :meth:`wait` has returned."""
        self.sessions_bytes = sessions_bytes
        """Bytes of its sessions at most; it may need fewer, once :meth:`wait` has returned."""
        self._name = name
        self._pipe, other = CONTEXT.Pipe(duplex=False)
        self._process = start_process(_run, run, other, sessions_bytes)
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
        self.port, self.sessions_bytes = found

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


def _run(run: Run, pipe: Connection, sessions_bytes: int) -> None:
    if hasattr(os, "setpgrp"):  # Ctrl-C is for the server, which ends its processes
        os.setpgrp()
    else:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        run(pipe, sessions_bytes)
    except NoSessionError as error:
        pipe.send(error)
    except HeteroLLMError as error:
        pipe.send(EngineError(error.message, fix=error.fix))
