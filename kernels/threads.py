"""CPU cores: those of the ``host`` device's GPU and NPU, and the biggest or middle ones of a phone."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from heterollm.base import OptionError

logger = logging.getLogger(__name__)

CPU_FOLDER: Final = Path("/sys/devices/system/cpu")

CPUINFO: Final = Path("/proc/cpuinfo")
SPEED_FILES: Final = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")
"""Files of a core that rank it: the scheduler's capacity, which Arm kernels state; else the highest clock."""

SIBLINGS_FILE: Final = "topology/thread_siblings_list"
"""File of a core that names the threads of the same core, such as ``0,8`` or ``0-1``."""

FEWEST_CORES: Final = 2
"""Cores for the engine thread and a driver's thread beside it."""


@dataclass(frozen=True, slots=True)
class ThreadSplit:
    """The cores of GPU and NPU; they overlap only if there are fewer cores than threads."""

    gpu_cores: tuple[int, ...]
    npu_cores: tuple[int, ...]

    def __str__(self) -> str:
        return f"{len(self.gpu_cores)} GPU thread(s), {len(self.npu_cores)} NPU thread(s)"


def allowed_cores() -> tuple[int, ...]:
    """Return the cores that the calling thread may run on; off Linux, those of the process."""
    if hasattr(os, "sched_getaffinity"):
        # psutil reads the main thread's cores, and each engine thread is pinned to its own.
        return tuple(sorted(os.sched_getaffinity(0)))
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # not on macOS
        return tuple(sorted(process.cpu_affinity()))
    return tuple(range(psutil.cpu_count() or 1))


def whole_cores(cores: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return one of the threads of each core, since two share its arithmetic units.

    Args:
        cores: Core numbers; by default the allowed ones.

    Returns:
        All of them where the system does not say which share a core, or all are of one.
    """
    cores = allowed_cores() if cores is None else tuple(cores)
    firsts = {core: min(set(cores) & _siblings(core)) for core in cores}
    whole = tuple(core for core in cores if firsts[core] == core)
    return whole if len(whole) > 1 else cores


def _siblings(core: int) -> set[int]:
    """Return the numbers of a core's threads; its own where sysfs does not name them."""
    found = {core}
    try:
        for part in (CPU_FOLDER / f"cpu{core}" / SIBLINGS_FILE).read_text("ascii").split(","):
            first, _, last = part.strip().partition("-")
            found |= set(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return {core}
    return found


def split_threads(gpu_threads: int | None = None, npu_threads: int | None = None) -> ThreadSplit:
    """Divide the allowed cores between GPU and NPU, by default in halves.

    A core's second thread is taken only where the numbers exceed the cores.

    Args:
        gpu_threads: Threads of the GPU, at least 1.
        npu_threads: Threads of the NPU; 0 opens the device without an NPU.

    Raises:
        OptionError: A number is out of range, or both together exceed the allowed cores.
    """
    for name, count in (("gpu_threads", gpu_threads), ("npu_threads", npu_threads)):
        if count is not None and type(count) is not int:
            raise OptionError(f"{name} is {count!r}, but must be a whole number.")
    cores, whole = allowed_cores(), whole_cores()
    cores = whole if (gpu_threads or 0) + (npu_threads or 0) <= len(whole) else cores
    half = max(1, len(cores) // 2)
    if gpu_threads is None:
        gpu_threads = half if npu_threads is None else max(1, len(cores) - npu_threads)
    if npu_threads is None:
        npu_threads = max(1 if gpu_threads <= half else 0, len(cores) - gpu_threads)
    if gpu_threads < 1 or npu_threads < 0 or max(gpu_threads, npu_threads) > len(cores):
        raise OptionError(
            f"{gpu_threads} GPU and {npu_threads} NPU threads do not fit {len(cores)} cores.",
            fix="The GPU needs 1 thread or more, the NPU 0 or more.",
        )
    if gpu_threads + npu_threads > max(2, len(cores)):
        raise OptionError(
            f"{gpu_threads} GPU and {npu_threads} NPU threads exceed the {len(cores)} cores of this process.",
            fix="Lower one of them.",
        )
    return ThreadSplit(cores[:gpu_threads], cores[len(cores) - npu_threads :] if npu_threads else ())


def processor_model() -> str:
    """Return the name of the machine's processor; empty where the system does not tell it."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor())


def pin_current_thread(cores: tuple[int, ...]) -> bool:
    """Keep the calling thread on these cores; returns False, with a log line, where that fails."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return False
    try:
        os.sched_setaffinity(0, cores)
    except OSError as error:
        logger.warning("Cannot pin the engine thread to cores %s (%s); it runs unpinned", cores, error)
        return False
    return True


@contextlib.contextmanager
def on_cores(cores: Sequence[int]) -> Iterator[None]:
    """Keep the calling thread, and threads that it starts in this context, on some cores."""
    before = allowed_cores()
    pin_current_thread(tuple(cores))
    try:
        yield
    finally:
        pin_current_thread(before)


def biggest_cores(cores: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the fastest of some cores: the fastest kind, and the next ones until there are two cores.

    Args:
        cores: Core numbers; by default the allowed ones.

    Returns:
        All of them where they are alike or the system does not rank them.
    """
    cores = allowed_cores() if cores is None else tuple(cores)
    speeds = _speeds(cores)
    slowest = sorted(speeds.values(), reverse=True)[:FEWEST_CORES][-1]
    return tuple(core for core in cores if speeds[core] >= slowest)


def middle_cores(cores: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return some cores without the fastest and the slowest kind; of two kinds the slower one.

    A thread that polls needs no more (HeteroLLM, section 4.2: "a small/middle CPU core").

    Args:
        cores: Core numbers; by default the allowed ones.

    Returns:
        The biggest ones where fewer than two cores would be left.
    """
    cores = allowed_cores() if cores is None else tuple(cores)
    speeds = _speeds(cores)
    kinds = sorted(set(speeds.values()))
    middle = kinds[1:-1] or kinds[:1]
    found = tuple(core for core in cores if speeds[core] in middle)
    return found if len(found) >= FEWEST_CORES else biggest_cores(cores)


def _speeds(cores: Sequence[int]) -> dict[int, int]:
    """Return the rank of each core; equal ones where the system ranks not all."""
    for name in SPEED_FILES:
        with contextlib.suppress(OSError, ValueError):
            return {core: int((CPU_FOLDER / f"cpu{core}" / name).read_text("ascii")) for core in cores}
    return dict.fromkeys(cores, 0)
