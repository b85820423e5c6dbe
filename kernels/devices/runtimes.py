"""The OpenCL devices of this machine, and the threads of those that run on CPU cores.

CPU runtimes take their thread count once per process, from the environment, when OpenCL is first asked.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

from heterollm.base import (
    CACHE_VARIABLE,
    CacheError,
    DeviceError,
    check_process,
    make_parent,
    mark_device_opened,
    own_folder,
    scratch_folder,
    see,
)
from heterollm.kernels.gpu import guard_programs, target_for_this_machine
from heterollm.kernels.threads import ThreadSplit, biggest_cores, on_cores, split_threads

QUALCOMM: Final = "qualcomm"

THREADS_VARIABLE: Final = "POCL_MAX_PTHREAD_COUNT"
"""Environment variable by which PoCL takes its threads."""

_process_split: ThreadSplit | None = None


def opencl_devices(split: ThreadSplit | None = None) -> list[tuple[str, Any]]:
    """Return every OpenCL device; the first call of the process fixes the threads of CPU runtimes.

    Args:
        split: Required thread split; None for that of the process, or the default.

    Raises:
        DeviceError: There is no OpenCL, or it already runs with another split.
        EngineError: The process was forked from one that had opened a device.
    """
    global _process_split
    check_process()
    from heterollm.kernels.gpu import list_opencl_devices

    if _process_split is not None:
        if split is not None and split.gpu_cores != _process_split.gpu_cores:
            raise DeviceError(
                f"OpenCL is already open in this process with {len(_process_split.gpu_cores)} thread(s), "
                f"not {len(split.gpu_cores)}.",
                fix="Start another process for another split. " + see("the-thread-split-cannot-change"),
            )
        return list_opencl_devices()
    split = split or split_threads()
    make_pocl_cache()
    mark_device_opened()
    os.environ.setdefault(THREADS_VARIABLE, str(len(split.gpu_cores)))
    os.environ.setdefault("DPCPP_CPU_NUM_CUS", str(len(split.gpu_cores)))  # Intel's runtime
    cores, big = split.gpu_cores, biggest_cores()

    def asking(platform_name: str) -> AbstractContextManager[None]:
        # A driver's threads start with the first query and inherit the cores of the thread that makes it:
        # PoCL's workers belong on the GPU's cores, those of a phone's driver on no little ones.
        return on_cores(big if QUALCOMM in platform_name.lower() else cores)

    with on_cores(big):
        found = list_opencl_devices(asking)
    _process_split = split
    return found


def fixed_threads() -> int | None:
    """Return the GPU's threads in this process if they cannot change; None before OpenCL is opened."""
    if _process_split is not None:
        return len(_process_split.gpu_cores)
    stated = os.environ.get(THREADS_VARIABLE, "")
    return int(stated) if stated.isascii() and stated.isdigit() else None


def make_pocl_cache() -> None:
    """Create PoCL's cache folder; PoCL silently offers no device if it cannot write there."""
    try:
        default = own_folder("opencl") / f"pocl-{target_for_this_machine() or 'default'}"
    except CacheError as error:  # no device without it
        raise DeviceError(error.message, fix=error.fix) from error
    folder = Path(os.environ.get("POCL_CACHE_DIR", default))
    if folder.is_dir() and not os.access(folder, os.W_OK):
        folder = _writable_copy(folder)
    try:
        if folder == default:  # heterollm clears no other folder
            make_parent(folder)
            folder.mkdir(exist_ok=True)
            guard_programs(folder)
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeviceError(
            f"The folder of compiled OpenCL programs, {folder}, cannot be made: {error.strerror}.",
            fix=f"Point {CACHE_VARIABLE} (or POCL_CACHE_DIR) at another folder. "
            + see("the-cache-cannot-be-written"),
        ) from error
    os.environ["POCL_CACHE_DIR"] = str(folder)


def _writable_copy(folder: Path) -> Path:
    """Return a writable copy of a read-only folder, deleted at exit."""
    made = contextlib.ExitStack()
    copy = made.enter_context(scratch_folder("heterollm-opencl-"))
    atexit.register(made.close)
    for path in folder.rglob("*"):
        target = copy / path.relative_to(folder)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        elif path.is_file() and not path.name.startswith("."):
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
            target.chmod(0o700)
    return copy
