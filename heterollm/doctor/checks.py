"""All checks of the doctor: every operator of a device on small random data, and the flag of the host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Final

from heterollm.doctor.case import DoctorCase, Seen
from heterollm.doctor.contexts import context_cases
from heterollm.doctor.experts import expert_cases
from heterollm.doctor.layers import gpu_layer_cases
from heterollm.doctor.linears import gpu_linear_cases, npu_cases
from heterollm.doctor.npu_attention import attention_cases
from heterollm.doctor.power import power_cases
from heterollm.doctor.scores import score_cases
from heterollm.doctor.sparse import sparse_cases
from heterollm.kernels.device import Device
from heterollm.kernels.sync import LITMUS_ROUNDS, flag_litmus, refused_strategies

FLAG: Final = "flag seen by the host"
LIMIT_S: Final = 20.0
"""Limit for all rounds; a slower device runs fewer."""

FIX: Final = "Use `--sync sleep_poll`, and update the OpenCL driver."


def device_cases(device: Device) -> list[DoctorCase]:
    """Return every check of a device: GPU, NPU, flag, clocks and cores."""
    cases = [*gpu_linear_cases(device), *gpu_layer_cases(device), *sparse_cases(device)]
    if device.npu is not None:
        npu = device.npu
        cases += [*npu_cases(device, npu), *expert_cases(npu), *score_cases(npu), *attention_cases(npu)]
    return [*cases, *context_cases(device), *flag_cases(device), *power_cases(device)]


def flag_cases(device: Device) -> Iterator[DoctorCase]:
    """Yield the litmus test of the flag that a kernel raises for the host, or why the device needs none.

    Opening a device runs a few hundred rounds; the doctor runs all that the design asks for.
    """
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
