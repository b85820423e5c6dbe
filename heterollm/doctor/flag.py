"""The doctor's check of the flag that a kernel raises for the host: the litmus test in full.

Before a device's strategies are used a few hundred rounds are run; here as many as the design asks for.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from heterollm.doctor.case import DoctorCase, Seen
from heterollm.kernels.device import Device
from heterollm.kernels.sync import LITMUS_ROUNDS, flag_litmus, refused_strategies

__all__ = ["FLAG", "flag_cases"]

FLAG: Final = "flag seen by the host"
LIMIT_S: Final = 20.0
"""Longest that the rounds may take; a device that is slower is tested in fewer."""

FIX: Final = "Use `--sync sleep_poll`, and update the OpenCL driver."


def flag_cases(device: Device) -> Iterator[DoctorCase]:
    """Yield the litmus test, or why the device needs none."""
    refused = refused_strategies(device.gpu)
    if "flag" in refused:
        yield DoctorCase("GPU", FLAG, "", None, f"not offered: {refused['flag']}")
    else:
        yield DoctorCase("GPU", FLAG, f"{LITMUS_ROUNDS} rounds", lambda: _litmus(device))


def _litmus(device: Device) -> Seen:
    begin_s = time.perf_counter()
    found = flag_litmus(device.gpu, LITMUS_ROUNDS, limit_s=LIMIT_S)
    took_s = time.perf_counter() - begin_s
    message = f"{found.stale_bytes} stale bytes in {found.rounds} rounds, {took_s:.1f} s"
    if found.stale:
        message += f"; {found.stale} rounds were stale or lost the flag"
    return Seen(found.stale == 0, message, FIX)
