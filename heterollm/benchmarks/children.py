"""The parent's side of a child process: it asks, waits, and turns a death or silence into an error."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from typing import Any, Final, Protocol

from heterollm.base import EngineError, HeteroLLMError

__all__ = ["Child", "ChildDiedError", "Worker", "environment"]

TIMEOUT_S: Final = 1800.0
"""The longest that one request may take: quantising a large model, or a long prompt in an emulator."""
CLOSE_S: Final = 10.0
THREAD_VARIABLES: Final = ("POCL_MAX_PTHREAD_COUNT", "DPCPP_CPU_NUM_CUS")
TAIL: Final = 400
"""Characters of a dead child's last words that go into the error."""


class ChildDiedError(EngineError):
    """A child process ended, or was stopped as it did not answer."""


def environment() -> dict[str, str]:
    """Return the environment of a process that chooses its own number of threads.

    OpenCL runtimes of the CPU read theirs from it, and one that this process uses has left its own there.
    """
    return {name: value for name, value in os.environ.items() if name not in THREAD_VARIABLES}


class Worker(Protocol):
    """Whatever answers requests: a child process, or a stand-in of a test."""

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        ...

    def close(self) -> None:
        """End it."""
        ...


class Child:
    """A process of its own.

    Args:
        name: What it runs, for errors.
        timeout_s: The longest that an answer may take.
    """

    def __init__(self, name: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the child
        # -P keeps the working directory off the path: a checkout there has folders of other packages' names.
        command = [sys.executable, "-P", "-m", "heterollm.benchmarks.child"]
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment(),
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="heterollm-bench", daemon=True)
        self._reader.start()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Raises:
            ChildDiedError: The process ended or did not answer in time; it must not be asked again.
            HeteroLLMError: The request failed; the process lives on.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._died() from None
        try:
            line = self._lines.get(timeout=self._timeout_s)
        except queue.Empty:
            self._process.kill()
            self.close()
            raise ChildDiedError(
                f"The process of {self._name} did not answer for {self._timeout_s:.0f} s and was stopped.",
                fix="Use shorter tests.",
            ) from None
        if not line:
            raise self._died()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise HeteroLLMError(answer["error"], fix=answer["fix"])
        return answer

    def close(self) -> None:
        """End the process. May be called twice."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:
            pass  # it is gone already
        try:
            self._process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(CLOSE_S)
        self._errors.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as stream:
            for line in stream:
                self._lines.put(line)
        self._lines.put("")

    def _died(self) -> ChildDiedError:
        code = self._process.wait()
        self._errors.seek(0)
        words = self._errors.read().decode("utf-8", "replace").strip()[-TAIL:]
        self.close()
        how = f"by signal {_signal_name(-code)}" if code < 0 else f"with exit code {code}"
        said = f" Its last words: {words}" if words else ""
        return ChildDiedError(
            f"The process of {self._name} ended {how}.{said}",
            fix="Signal 9 is often the system running out of memory: lower --memory-gib."
            if code == -9
            else "",
        )


def _signal_name(number: int) -> str:
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:  # one of the nameless real-time signals
        return str(number)
