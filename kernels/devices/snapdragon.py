"""The device ``snapdragon``: an Adreno through OpenCL and a Hexagon through QNN."""

from __future__ import annotations

import os
from typing import Any, Final

import numpy as np

from heterollm.base import DeviceError, see
from heterollm.kernels.device import Device
from heterollm.kernels.devices import gpu, software
from heterollm.kernels.devices.kind import DeviceKind, Opening
from heterollm.kernels.devices.opencl import QUALCOMM, opencl_devices
from heterollm.kernels.threads import ThreadSplit, biggest_cores, on_cores

OPENCL_ON_12: Final = "openclon12"
"""Microsoft's OpenCL over Direct3D 12, which offers the same Adreno without its driver's compiler."""

ADRENO_VARIABLE: Final = "HETEROLLM_ADRENO"
"""Environment variable that chooses among several Adrenos: a number of ``heterollm devices``, or part of a
name or driver."""


def open_snapdragon(wanted: Opening) -> Device:
    """Open both processors, each after a small test, and wake the NPU."""
    with_npu, power = wanted.npu_threads != 0, wanted.power
    if with_npu:
        software.require_qnn(emulator=False)  # before OpenCL, whose first call fixes the threads of `host`
    chosen, _ = _adrenos(wanted.split)
    half = np.dtype(np.float16)
    # The drivers start threads here, which stay on this thread's cores; little ones would delay all calls.
    with on_cores(biggest_cores()):
        runtime = gpu.open_gpu(chosen, wanted, power)
        gpu.self_test(runtime)
        if not with_npu:
            return Device("snapdragon", runtime, None, ThreadSplit((), ()), half, half, "real", power=power)
        from heterollm.kernels.npu import QnnNpu, chosen_context_layers

        npu = QnnNpu(emulator=False, power=power)
        npu.self_test()
        npu.choose_contexts(chosen_context_layers())
        if npu.power is not None:
            npu.power.wake()
    split = ThreadSplit((), ())
    return Device(
        *("snapdragon", runtime, npu, split, npu.activation_dtype, half, "real"),
        power=power,
        power_switch=npu.power,
        packager=npu,
    )


def _adrenos(split: ThreadSplit | None = None) -> tuple[Any, str]:
    """Return the Adreno to use, and a text with all of them.

    The one with most compute units comes first, then the one with the newest driver, then the driver's order.

    Raises:
        DeviceError: There is none, or :data:`ADRENO_VARIABLE` names none.
    """
    devices = opencl_devices(split)
    found = [
        (name, device)
        for name, device in devices
        if QUALCOMM in device.vendor.lower() and OPENCL_ON_12 not in f"{name}{device.name}".lower()
    ]
    if not found:
        seen = ", ".join(f"{device.name.strip()}" for _, device in devices) or "none"
        raise DeviceError(
            f"No Adreno among the OpenCL devices ({seen}).",
            fix="If `clinfo -l` lists it, point OCL_ICD_VENDORS at the system's vendors folder. "
            + see("no-adreno-among-the-opencl-devices"),
        )
    found.sort(key=lambda entry: (entry[1].max_compute_units, entry[1].driver_version), reverse=True)
    texts = [
        f"{device.name.strip()} ({name.strip()} {device.driver_version.strip()})" for name, device in found
    ]
    wanted = os.environ.get(ADRENO_VARIABLE, "").strip()
    number = _adreno_number(wanted, texts)
    if len(found) == 1:
        return found[0][1], texts[0]
    others = "; ".join(f"{other}: {text}" for other, text in enumerate(texts) if other != number)
    return found[number][1], f"{number}: {texts[number]}; {ADRENO_VARIABLE} can choose {others}"


def _adreno_number(wanted: str, texts: list[str]) -> int:
    """Return the position of the wanted Adreno among all; the first one's if none is wanted."""
    if not wanted:
        return 0
    if wanted.isascii() and wanted.isdigit() and int(wanted) < len(texts):
        return int(wanted)
    matches = [number for number, text in enumerate(texts) if wanted.lower() in text.lower()]
    if len(matches) != 1:
        every = "; ".join(f"{number}: {text}" for number, text in enumerate(texts))
        raise DeviceError(
            f"{ADRENO_VARIABLE} is {wanted!r:.80}, which names {len(matches)} of the Adrenos here ({every}).",
            fix="Set it to one of these numbers, or unset it.",
        )
    return matches[0]


KIND = DeviceKind(
    "snapdragon",
    lambda: _adrenos()[1],
    lambda: software.require_qnn(emulator=False),
    open_snapdragon,
    options=frozenset({"power"}),
    reason="both processors passed a self-test",
)
