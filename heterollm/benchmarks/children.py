"""Child processes: fresh interpreters that end with this one and serve a model."""

from __future__ import annotations

import contextlib
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from heterollm.base import (
    CONTEXT,
    GRACE_S,
    EngineError,
    HeteroLLMError,
    quiet_libraries,
    scratch_folder,
    start_process,
)

TIMEOUT_S: Final = 1800.0
"""Longest time of one request: quantising a large model, or a long prompt in an emulator."""
TAIL: Final = 400
"""Characters of a dead child's output in the error."""


class ChildDiedError(EngineError):
    """A child process ended, or was stopped because it did not answer."""


class Child:
    """A child process with at most one model.

    Args:
        name: Name of the model's configuration, for errors.
        timeout_s: Longest time of one request.
    """

    def __init__(self, name: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._name = name
        self._timeout_s = timeout_s
        self._busy = False
        self._files = contextlib.ExitStack()
        self._output = self._files.enter_context(scratch_folder("heterollm-bench-")) / "output"
        self._output.touch()
        self._pipe, other = CONTEXT.Pipe()
        self._process = start_process(_serve, other, str(self._output))
        other.close()

    def ask(self, method: str, *arguments: object) -> Any:  # noqa: ANN401 - what the method returns
        """Call a method of the child's model.

        Raises:
            ChildDiedError: The process ended, or did not answer in time and was stopped.
            HeteroLLMError: The request failed; the process accepts others.
        """
        self._busy = True
        try:
            self._pipe.send((method, arguments))
            if not self._pipe.poll(self._timeout_s):
                how = f"did not answer for {self._timeout_s:.0f} s and was stopped"
                raise self._death(how, "Use shorter tests.")
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(GRACE_S)
            raise self._death(*_end_of(self._process.exitcode)) from None
        self._busy = False
        if isinstance(answer, HeteroLLMError):
            raise answer
        return answer

    def close(self) -> None:
        """End the process: during a request at once, else in order. May be called twice."""
        self._pipe.close()
        if not self._busy:
            self._process.join(GRACE_S)
        self._process.kill()
        self._process.join()
        self._files.close()

    def _death(self, how: str, fix: str) -> ChildDiedError:
        output = self._output.read_text("utf-8", "replace").strip()[-TAIL:]
        self.close()
        words = f" Its last words: {output}" if output else ""
        return ChildDiedError(f"The process of {self._name} {how}.{words}", fix=fix)


def _end_of(code: int | None) -> tuple[str, str]:
    """Return the end of a process in words, and an advice."""
    if code is None or code >= 0:
        return f"ended with exit code {code}", ""
    name = f" ({signal.Signals(-code).name})" if -code in set(signal.Signals) else ""
    out_of_memory = "Signal 9 is often the system running out of memory: lower --memory-gib."
    return f"ended by signal {-code}{name}", out_of_memory if code == -9 else ""


def _serve(pipe: Connection, output: str) -> None:
    """Answer requests until the parent closes the pipe; an unexpected exception ends the process."""
    # Ctrl-C reaches all processes; the parent decides what to do.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Path(output).open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    from heterollm.benchmarks.child import Model

    model = Model()
    with quiet_libraries(lambda _text: None, debug=False):
        while True:
            try:
                method, arguments = pipe.recv()
            except EOFError:
                break
            try:
                answer = getattr(model, method)(*arguments)
            except HeteroLLMError as error:
                answer = HeteroLLMError(error.message, fix=error.fix)
            pipe.send(answer)
    model.close()
