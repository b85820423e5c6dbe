"""Runs a module of this package in a child process, for work with QNN that can crash, hang or keep memory."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from heterollm.base import DeviceError, GraphError, HeteroLLMError, see


class ChildError(GraphError):
    """Failure of a child; ``log`` is its stderr."""

    def __init__(self, message: str, *, fix: str = "", log: str = "") -> None:
        super().__init__(message, fix=fix)
        self.log = log


def run_child(module: str, request: Mapping[str, Any], answer: Path, task: str, *, timeout_s: float) -> str:
    """Run a module that ends in :func:`answer_parent`, and return its stderr.

    Args:
        module: Name of the module.
        request: Its input, as JSON can hold it.
        answer: Path of the file that shows that the child reached its end.
        task: The task in messages, such as ``compiler of o of layer 3``.
        timeout_s: Longest time of the child.

    Raises:
        ChildError: The child crashed, hung, or raised a :class:`GraphError`.
        DeviceError: The child raised another error of this package.
    """
    answer.write_bytes(b"")  # an earlier child's is none of this one
    # -P: a folder named heterollm in the working directory must not be imported.
    command = [sys.executable, "-P", "-m", module]
    try:
        child = subprocess.run(  # noqa: S603 - our own interpreter and module
            command,
            input=json.dumps({**request, "answer": str(answer)}).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ChildError(f"The {task} took over {timeout_s:.0f} s and was stopped.") from error
    except OSError as error:
        raise ChildError(f"The child process for the {task} cannot be started: {error}.") from error
    log = child.stderr.decode(errors="replace")
    if child.returncode != 0 or not answer.stat().st_size:
        raise ChildError(
            f"The {task} crashed ({_exit_text(child.returncode)}). {log.strip()[-300:]}".strip(),
            fix="Choose another precision or form for the graph. " + see("the-graph-compiler-crashes"),
            log=log,
        )
    reply = json.loads(answer.read_bytes())
    if reply["kind"] == "GraphError":
        raise ChildError(reply["message"], fix=reply["fix"], log=log)
    if reply["kind"]:
        raise DeviceError(reply["message"], fix=reply["fix"])
    return log


def answer_parent(work: Callable[[dict[str, Any]], None]) -> None:
    """Run the child's work on the request of :func:`run_child`, and answer with its error, if any."""
    request = json.loads(sys.stdin.buffer.read())
    reply = {"message": "", "fix": "", "kind": ""}
    try:
        work(request)
    except HeteroLLMError as error:
        reply = {"message": error.message, "fix": error.fix, "kind": type(error).__name__}
    Path(request["answer"]).write_text(json.dumps(reply))


def _exit_text(code: int) -> str:
    if code < 0:
        return signal.Signals(-code).name
    return f"exit code {code:#x}" if code > 255 else f"exit code {code}"
