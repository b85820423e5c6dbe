"""The device ``intel:cpu``: the graphs of ``intel`` on OpenVINO's CPU device, and OpenCL on CPU cores.

It shows the numbers of an Intel NPU's graphs, not their speed.
"""

from __future__ import annotations

import numpy as np

from heterollm.kernels.device import Device
from heterollm.kernels.devices import gpu
from heterollm.kernels.devices.kind import DeviceKind, Opening
from heterollm.kernels.npu import OpenVinoNpu, find_openvino
from heterollm.kernels.threads import split_threads

CPU = "CPU"


def open_intel_cpu(wanted: Opening) -> Device:
    """Open both processors on CPU cores."""
    split = split_threads(wanted.gpu_threads, wanted.npu_threads)
    npu = OpenVinoNpu(CPU, len(split.npu_cores)) if split.npu_cores else None
    runtime = gpu.open_cpu(split, wanted)
    half = np.dtype(np.float16)
    return Device("intel:cpu", runtime, npu, split, half, half, "real", keeper=npu)


KIND = DeviceKind(
    "intel:cpu",
    gpu.find_cpu,
    lambda: find_openvino(CPU),
    open_intel_cpu,
    options=frozenset({"gpu_threads", "npu_threads"}),
    shares_cores=True,
)
