"""The device ``snapdragon``: an Adreno through OpenCL and a Hexagon through QNN."""

from __future__ import annotations

from typing import Any

import numpy as np

from heterollm.base import DeviceError, see
from heterollm.kernels.device import Device
from heterollm.kernels.devices import gpu, software
from heterollm.kernels.devices.choice import choose_gpu, is_translated
from heterollm.kernels.devices.kind import DeviceKind, Opening
from heterollm.kernels.devices.runtimes import QUALCOMM, opencl_devices
from heterollm.kernels.sync import open_arenas
from heterollm.kernels.threads import ThreadSplit, biggest_cores, on_cores


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
        gpu.check_endings(runtime, half, half)
        if not with_npu:
            return Device("snapdragon", runtime, None, ThreadSplit((), ()), half, half, "real", power=power)
        from heterollm.kernels.npu import QnnNpu, chosen_context_layers

        npu = QnnNpu(emulator=False, power=power)
        npu.self_test()
        npu.choose_contexts(chosen_context_layers())
        npu.recall_memory()
        arenas = open_arenas(runtime, npu)
        if npu.power is not None:
            npu.power.wake()
    split = ThreadSplit((), ())
    return Device(
        *("snapdragon", runtime, npu, split, npu.activation_dtype, half, "real"),
        power=power,
        power_switch=npu.power,
        packager=npu,
        keeper=npu,
        arenas=arenas,
    )


def _adrenos(split: ThreadSplit | None = None) -> tuple[Any, str]:
    """Return the Adreno to use, and a text with all of them.

    The one with most compute units comes first, then the one with the newest driver, then the driver's order.

    Raises:
        DeviceError: There is none, or the environment names none.
    """
    devices = opencl_devices(split)
    found = [
        (name, device)
        for name, device in devices
        if QUALCOMM in device.vendor.lower() and not is_translated(name, device)
    ]
    if not found:
        seen = ", ".join(f"{device.name.strip()}" for _, device in devices) or "none"
        raise DeviceError(
            f"No Adreno among the OpenCL devices ({seen}).",
            fix="If `clinfo -l` lists it, point OCL_ICD_VENDORS at the system's vendors folder. "
            + see("no-adreno-among-the-opencl-devices"),
        )
    found.sort(key=lambda entry: (entry[1].max_compute_units, entry[1].driver_version), reverse=True)
    return choose_gpu(found, "Adrenos")


KIND = DeviceKind(
    "snapdragon",
    lambda: _adrenos()[1],
    lambda: software.require_qnn(emulator=False),
    open_snapdragon,
    options=frozenset({"power"}),
    reason="both processors passed a self-test",
)
