"""Fresh interpreters that end with this process."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.context import SpawnProcess
from types import ModuleType
from typing import Final

CONTEXT: Final = multiprocessing.get_context("spawn")
THREAD_VARIABLES: Final = ("POCL_MAX_PTHREAD_COUNT", "DPCPP_CPU_NUM_CUS")
GRACE_S: Final = 10.0
"""Time that a child gets to end in order."""
ORPHANED: Final = 1
"""Exit code of a child whose parent ended."""


def start_process(function: Callable[..., object], *arguments: object) -> SpawnProcess:
    """Call a function in a fresh interpreter, which ends when this process ends, even by a signal.

    The child does not inherit the OpenCL thread counts that a device of this process set in the environment,
    and does not import the main module, which may be a script without a guard.
    """
    process = CONTEXT.Process(target=_call, args=(function, arguments), daemon=True)
    kept = {name: os.environ.pop(name) for name in THREAD_VARIABLES if name in os.environ}
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        process.start()
    finally:
        sys.modules["__main__"] = main
        os.environ.update(kept)
    return process


def _call(function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    function(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # a command may keep its results as after Ctrl-C
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(GRACE_S)
    os._exit(ORPHANED)
