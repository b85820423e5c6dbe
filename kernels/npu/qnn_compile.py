"""Compiles a graph to a context binary, in this process or in a child process.

A compiled session keeps several times its weights in memory, and QNN's compiler can crash on graphs that it
should refuse. A child process contains both.
"""

from __future__ import annotations

import ctypes
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from heterollm.base import DeviceError, GraphError, HeteroLLMError, see
from heterollm.kernels.npu.qnn_runtime import UNPLACED, QnnTarget, open_session

__all__ = ["compile_graph"]

TIMEOUT_S = 1800.0
"""Longest compile time; the largest shard measured took 36 s."""


def compile_graph(model: Path, context: Path, target: QnnTarget, label: str, *, in_child: bool) -> None:
    """Compile ``model`` into ``context`` (``.onnx``, with ``_qnn.bin`` beside it).

    Raises:
        DeviceError: The provider or its device is missing.
        GraphError: The graph does not compile, does not run on HTP as a whole, or crashed the child.
    """
    try:
        if in_child:
            _run_child(model, context, target, label, log_severity=4)
        else:
            open_session(model, target, label, context=context)
    except GraphError as error:
        if UNPLACED not in error.message:
            raise
        raise GraphError(
            f"{label} does not run on the NPU as a whole: {_reasons(model, target, label)}",
            fix="Choose another precision or form for it. "
            + see("a-graph-does-not-run-on-the-npu-as-a-whole"),
        ) from error
    finally:
        if not in_child:
            _return_memory()


def _reasons(model: Path, target: QnnTarget, label: str) -> str:
    """Return why the provider rejects nodes, from its verbose log."""
    try:
        log = _run_child(model, None, target, label, log_severity=0)
    except _ChildError as error:
        log = error.log
    nodes = re.findall(r"Operator type: (\w+)[^\n]*\s+REASON\s*:\s*([^\n]+)", log)
    lines = dict.fromkeys(f"{operator}: {reason.strip()}" for operator, reason in nodes)
    return "; ".join(lines) or "QNN gives no reason."


class _ChildError(GraphError):
    """Failure of the child; ``log`` is its stderr."""

    def __init__(self, message: str, *, fix: str = "", log: str = "") -> None:
        super().__init__(message, fix=fix)
        self.log = log


def _run_child(model: Path, context: Path | None, target: QnnTarget, label: str, *, log_severity: int) -> str:
    """Open the session in a child and return its stderr."""
    answer = model.with_name(model.name + ".answer")
    answer.unlink(missing_ok=True)
    request = {
        "model": str(model),
        "context": None if context is None else str(context),
        "emulator": target.emulator,
        "options": target.options,
        "label": label,
        "log_severity": log_severity,
        "answer": str(answer),
    }
    # -P: a folder named heterollm in the working directory must not be imported.
    command = [sys.executable, "-P", "-m", "heterollm.kernels.npu.qnn_compile"]
    try:
        child = subprocess.run(  # noqa: S603 - our own interpreter and module
            command,
            input=json.dumps(request).encode(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _ChildError(f"Compiling {label} took over {TIMEOUT_S:.0f} s and was stopped.") from error
    except OSError as error:
        raise _ChildError(f"The child that compiles {label} cannot be started: {error}.") from error
    log = child.stderr.decode(errors="replace")
    if child.returncode != 0 or not answer.exists():
        raise _ChildError(
            f"The compiler of {label} crashed ({_exit_text(child.returncode)}). {log.strip()[-300:]}".strip(),
            fix="QNN cannot compile this graph: choose another precision or form for it. "
            + see("the-graph-compiler-crashes"),
            log=log,
        )
    reply = json.loads(answer.read_bytes())
    if reply["kind"] == "GraphError":
        raise _ChildError(reply["message"], fix=reply["fix"], log=log)
    if reply["kind"]:
        raise DeviceError(reply["message"], fix=reply["fix"])
    return log


def _exit_text(code: int) -> str:
    if code < 0:
        return signal.Signals(-code).name
    return f"exit code {code:#x}" if code > 255 else f"exit code {code}"


def _return_memory() -> None:
    """Return freed memory to the system; glibc keeps several times the weights after a compilation."""
    if sys.platform == "linux":
        trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _child_main() -> None:
    request = json.loads(sys.stdin.buffer.read())
    reply = {"message": "", "fix": "", "kind": ""}
    try:
        open_session(
            Path(request["model"]),
            QnnTarget(request["emulator"], request["options"]),
            request["label"],
            context=None if request["context"] is None else Path(request["context"]),
            log_severity=request["log_severity"],
        )
    except HeteroLLMError as error:
        reply = {"message": error.message, "fix": error.fix, "kind": type(error).__name__}
    Path(request["answer"]).write_text(json.dumps(reply))


if __name__ == "__main__":
    _child_main()
