"""The device ``intel``: an Intel GPU through OpenCL, an Intel NPU through OpenVINO; never run on an NPU."""

from __future__ import annotations

import numpy as np

from heterollm.kernels.device import Device
from heterollm.kernels.devices import gpu
from heterollm.kernels.devices.choice import find_gpus
from heterollm.kernels.devices.kind import DeviceKind, Opening
from heterollm.kernels.npu import OpenVinoNpu, find_openvino
from heterollm.kernels.threads import ThreadSplit

VENDOR = "Intel"


def open_intel(wanted: Opening) -> Device:
    """Open both processors, each after a small test."""
    npu = None if wanted.npu_threads == 0 else OpenVinoNpu()
    chosen, _ = find_gpus(wanted.split, VENDOR)
    runtime = gpu.open_gpu(chosen, wanted)
    gpu.self_test(runtime)
    half = np.dtype(np.float16)
    gpu.check_endings(runtime, half, half)
    if npu is not None:
        npu.self_test()
    return Device("intel", runtime, npu, ThreadSplit((), ()), half, half, "real", keeper=npu)


KIND = DeviceKind("intel", lambda: find_gpus(vendor=VENDOR)[1], find_openvino, open_intel)
