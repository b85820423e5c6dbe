"""What every bench of a whole model needs to know: where it runs, and whether others compute meanwhile."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any, Final

CORES: Final = os.cpu_count() or 1
TICK_S: Final = 1 / os.sysconf("SC_CLK_TCK")
OTHERS_FRACTION: Final = 0.04
"""Of all cores, what other processes may use during a sample that counts as undisturbed."""
IDLE_S: Final = 0.1


def busy_s() -> float:
    """Return the seconds that the cores have been busy since the machine started, stolen time included."""
    user, nice, system, _idle, _wait, irq, soft, steal, *_ = Path("/proc/stat").read_text().split()[1:11]
    return sum(map(int, (user, nice, system, irq, soft, steal))) * TICK_S


def wait_until_idle(give_up: float) -> None:
    """Wait for a moment in which no process computes, at most until ``give_up`` of the monotonic clock."""
    while time.monotonic() < give_up:
        busy = busy_s()
        time.sleep(IDLE_S)
        if busy_s() - busy <= TICK_S:
            return


def undisturbed(others_s: float, wall_s: float) -> bool:
    """Whether processor time that others used during a sample is too little to matter."""
    return others_s <= OTHERS_FRACTION * CORES * wall_s + TICK_S


def conditions() -> dict[str, Any]:
    """Return the machine, the commit, the load and any chosen processor, for every line of results."""
    from heterollm.kernels.pocl_target import chosen_target

    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    return {
        "machine": f"{platform.machine()} {model}, {CORES} cores",
        "commit": found.stdout.strip(),
        "load_average": os.getloadavg()[0],
        # Rows that name a processor compare with rows that name the same one only.
        "limited_to": chosen_target(),
    }
