"""Facts about the machine of a bench, and the load by other processes."""

from __future__ import annotations

import platform
import shutil
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Final

import psutil

from heterollm.kernels.threads import processor_model

CORES: Final = psutil.cpu_count() or 1
TICK_S: Final = 0.01
"""Resolution of the processors' times on Linux; other systems are finer."""
BUSY: Final = ("user", "nice", "system", "irq", "softirq", "steal")
"""Processor times of :mod:`psutil` that count as busy; a system may lack some."""
OTHERS_FRACTION: Final = 0.04
"""Fraction of all cores that other processes may use during an undisturbed sample."""
IDLE_S: Final = 0.1
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
    """Return the seconds that all cores were busy since the machine started, stolen time included."""
    times = psutil.cpu_times()
    return float(sum(getattr(times, name, 0.0) for name in BUSY))


def wait_until_idle(give_up_s: float) -> None:
    """Wait until no process computes, at most until ``give_up_s`` of the monotonic clock."""
    while time.monotonic() < give_up_s:
        before_s = busy_s()
        time.sleep(IDLE_S)
        if busy_s() - before_s <= TICK_S:
            return


def undisturbed(others_s: float, wall_s: float) -> bool:
    """Whether other processes used too little processor time during a sample to matter."""
    return others_s <= OTHERS_FRACTION * CORES * wall_s + TICK_S


def processor_name() -> str:
    """Return the machine's processor and its number of cores."""
    return f"{platform.machine()} {processor_model() or 'unknown processor'}, {CORES} cores"


def commit_of(folder: Path) -> str:
    """Return the commit of a checkout, with ``-dirty`` for changed files; empty outside of a checkout."""
    git = shutil.which("git")
    if git is None:
        return ""
    command = [git, "-C", str(folder), "describe", "--always", "--dirty", "--exclude", "*"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - git's own path
    return found.stdout.strip()


def versions() -> dict[str, str]:
    """Return the installed versions of the libraries that times depend on."""
    found: dict[str, str] = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
