"""The device ``emulator``: OpenCL on CPU cores, and Qualcomm's emulator of a Hexagon."""

from __future__ import annotations

import numpy as np

from heterollm.kernels.device import Device
from heterollm.kernels.devices import gpu, software
from heterollm.kernels.devices.kind import DeviceKind, Opening
from heterollm.kernels.sync import open_arenas
from heterollm.kernels.threads import split_threads


def open_emulator(wanted: Opening) -> Device:
    """Open the GPU on CPU cores, and the emulated NPU."""
    software.require_qnn(emulator=True)
    split = split_threads(wanted.gpu_threads)
    runtime = gpu.open_cpu(split, wanted)
    from heterollm.kernels.npu import QnnNpu

    npu = QnnNpu(emulator=True, power=wanted.power)
    npu.recall_memory()
    half = np.dtype(np.float16)
    return Device(
        *("emulator", runtime, npu, split, npu.activation_dtype, half, "emulated"),
        power_switch=npu.power,
        packager=npu,
        keeper=npu,
        arenas=open_arenas(runtime, npu),
    )


KIND = DeviceKind(
    "emulator",
    gpu.find_cpu,
    lambda: software.require_qnn(emulator=True),
    open_emulator,
    options=frozenset({"gpu_threads"}),
    time="emulated",
)
