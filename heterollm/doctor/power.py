"""The doctor's checks of clocks and cores: what was asked for, and whether an effect was seen."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from typing import Final

from heterollm.base import see
from heterollm.doctor.case import DoctorCase, Seen
from heterollm.kernels.device import Device, PowerSwitch
from heterollm.kernels.gpu import OpenClRuntime
from heterollm.kernels.threads import allowed_cores, on_cores

CLOCKS: Final = "clocks"
CORES: Final = "cores of the engine thread"

NO_HINT: Final = "no hint"
RUNS: Final = 20
REST_S: Final = 0.1
FIX: Final = "Use `--power default`. " + see("clocks-and-cores")


def power_cases(device: Device) -> Iterator[DoctorCase]:
    """Yield the GPU's hint, the NPU's vote and the engine thread's cores."""
    hint = device.gpu.clock_hint if isinstance(device.gpu, OpenClRuntime) else NO_HINT
    if hint.startswith(NO_HINT):
        yield DoctorCase("GPU", CLOCKS, "", None, hint)
    else:
        # No query tells whether a driver follows its hint.
        yield DoctorCase("GPU", CLOCKS, "hint", partial(Seen, True, hint, verified=False))
    switch = device.power_switch
    if device.npu is not None:
        if switch is None:
            yield DoctorCase("NPU", CLOCKS, "", None, f"not asked for: {device.npu.name}")
        else:
            yield DoctorCase("NPU", CLOCKS, "vote", partial(_vote, switch, device.npu.time_kind == "real"))
    yield DoctorCase("GPU", CORES, "", partial(_cores, device))


def _vote(switch: PowerSwitch, has_clocks: bool) -> Seen:
    """Compare a small graph with and without the vote; the emulator has no clocks."""
    switch.wake()
    if switch.problem:
        return Seen(False, f"The vote is refused: {switch.problem}", FIX)
    awake_us = switch.run_us(RUNS)
    switch.rest()
    time.sleep(REST_S)
    resting_us = switch.run_us(RUNS)
    switch.wake()
    if switch.problem:
        return Seen(False, f"The vote is refused: {switch.problem}", FIX)
    if not has_clocks:
        return Seen(True, "accepted; the emulator has no clocks", verified=False)
    times = f"{awake_us:.0f} us for a small graph, {resting_us:.0f} us at rest"
    return Seen(True, times, verified=awake_us < resting_us)


def _cores(device: Device) -> Seen:
    wanted, allowed = device.engine_cores(), allowed_cores()
    with on_cores(wanted):
        pinned = set(allowed_cores()) == set(wanted)
    cores = ", ".join(map(str, wanted))
    if not pinned:
        return Seen(True, f"unpinned: this system pins no thread to {cores}", verified=False)
    if set(wanted) == set(allowed):
        return Seen(True, f"{cores}: all that are allowed")
    return Seen(True, f"{cores} of {len(allowed)}")
