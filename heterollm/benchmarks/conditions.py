"""Where a bench runs, and whether others compute meanwhile."""

from __future__ import annotations

import math
import os
import platform
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Final

__all__ = [
    "CORES",
    "TICK_S",
    "busy_s",
    "commit_of",
    "processor_name",
    "undisturbed",
    "versions",
    "wait_until_idle",
]

CORES: Final = os.cpu_count() or 1
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 0.01
OTHERS_FRACTION: Final = 0.04
"""Of all cores, what other processes may use during a sample that counts as undisturbed."""
IDLE_S: Final = 0.1

STAT: Final = Path("/proc/stat")
CPUINFO: Final = Path("/proc/cpuinfo")
LIBRARIES: Final = (
    "numpy",
    "onnxruntime",
    "onnxruntime-qnn",
    "pyopencl",
    "pocl-binary-distribution",
    "llama-cpp-python",
    "torch",
    "transformers",
)


def busy_s() -> float:
    """Return the seconds that the cores have been busy since the machine started, stolen time included.

    Not a number where the system does not say.
    """
    try:
        user, nice, system, _idle, _wait, irq, soft, steal, *_ = STAT.read_text().split()[1:11]
    except (OSError, ValueError):
        return math.nan
    return sum(map(int, (user, nice, system, irq, soft, steal))) * TICK_S


def wait_until_idle(give_up: float) -> None:
    """Wait for a moment in which no process computes, at most until ``give_up`` of the monotonic clock."""
    while time.monotonic() < give_up:
        busy = busy_s()
        time.sleep(IDLE_S)
        if not busy_s() - busy > TICK_S:  # also where it is not a number
            return


def undisturbed(others_s: float, wall_s: float) -> bool:
    """Whether processor time that others used during a sample is too little to matter."""
    return others_s <= OTHERS_FRACTION * CORES * wall_s + TICK_S


def processor_name() -> str:
    """Return the machine's processor and how many cores it has."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    model = next(named, platform.processor() or "unknown processor")
    return f"{platform.machine()} {model}, {CORES} cores"


def commit_of(folder: Path) -> str:
    """Return the commit that a folder is checked out at, ``-dirty`` where files differ, or nothing."""
    git = shutil.which("git")
    if git is None:
        return ""
    command = [git, "-C", str(folder), "describe", "--always", "--dirty", "--exclude", "*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - git's own path
    return found.stdout.strip()


def versions() -> dict[str, str]:
    """Return the versions of the libraries that times depend on, of those that are installed."""
    found: dict[str, str] = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
