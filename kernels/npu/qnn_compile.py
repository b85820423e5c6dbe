"""Compiles graphs to a context binary, in this process or in a child process.

A compiled session keeps several times its weights in memory, and QNN's compiler can crash on graphs that it
should refuse. A child process contains both. Several graphs compile into one binary that holds equal weights
once; a failure midway leaves the provider's list of shared contexts unusable, so a child always compiles
them.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from heterollm.base import GraphError, see
from heterollm.kernels.npu.qnn_child import ChildError, answer_parent, run_child
from heterollm.kernels.npu.qnn_runtime import UNPLACED, QnnTarget, open_session

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
            _compile_in_child([model], [context], target, label)
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


def compile_shared(models: Sequence[Path], contexts: Sequence[Path], target: QnnTarget, label: str) -> None:
    """Compile several models into one binary, in a child: the ``_qnn.bin`` beside the first of ``contexts``.

    The provider names a graph by the path of its model, so that the paths must differ.

    Raises:
        DeviceError: The provider or its device is missing.
        GraphError: A graph does not compile, does not run on HTP as a whole, or crashed the child.
    """
    _compile_in_child(models, contexts, target, label)


def _reasons(model: Path, target: QnnTarget, label: str) -> str:
    """Return why the provider rejects nodes, from its verbose log."""
    try:
        log = _compile_in_child([model], None, target, label, log_severity=0)
    except ChildError as error:
        log = error.log
    nodes = re.findall(r"Operator type: (\w+)[^\n]*\s+REASON\s*:\s*([^\n]+)", log)
    lines = dict.fromkeys(f"{operator}: {reason.strip()}" for operator, reason in nodes)
    return "; ".join(lines) or "QNN gives no reason."


def _compile_in_child(
    models: Sequence[Path],
    contexts: Sequence[Path] | None,
    target: QnnTarget,
    label: str,
    *,
    log_severity: int = 4,
) -> str:
    """Open the sessions in a child and return its stderr."""
    request = {
        "models": [str(model) for model in models],
        "contexts": None if contexts is None else [str(context) for context in contexts],
        "emulator": target.emulator,
        "options": target.options,
        "label": label,
        "log_severity": log_severity,
    }
    answer = models[0].with_name(models[0].name + ".answer")
    return run_child(__spec__.name, request, answer, f"compiler of {label}", timeout_s=TIMEOUT_S)


def _compile(request: dict[str, Any]) -> None:
    models = request["models"]
    contexts = request["contexts"] or [None] * len(models)
    sessions = []
    for number, (model, context) in enumerate(zip(models, contexts, strict=True)):
        last = number == len(models) - 1
        sessions.append(
            open_session(
                Path(model),
                QnnTarget(request["emulator"], request["options"]),
                request["label"],
                context=None if context is None else Path(context),
                log_severity=request["log_severity"],
                sharing=None if len(models) == 1 else "last" if last else "more",
            )
        )


def _return_memory() -> None:
    """Return freed memory to the system; glibc keeps several times the weights after a compilation."""
    if sys.platform == "linux":
        trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


if __name__ == "__main__":
    answer_parent(_compile)
