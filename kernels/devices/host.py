"""The device ``host``: OpenCL and ONNX Runtime on the CPU cores of this machine, which they share."""

from __future__ import annotations

import numpy as np

from heterollm.kernels.device import Device
from heterollm.kernels.devices import gpu, runtimes
from heterollm.kernels.devices.kind import DeviceKind, Opening
from heterollm.kernels.devices.software import require_onnxruntime
from heterollm.kernels.threads import split_threads


def open_host(wanted: Opening) -> Device:
    """Open both processors on CPU cores."""
    require_onnxruntime()
    threads = wanted.gpu_threads, wanted.npu_threads
    if wanted.choose_threads is not None and threads == (None, None):
        threads = wanted.choose_threads(runtimes.fixed_threads())
    split = split_threads(*threads)
    runtime = gpu.open_cpu(split, wanted)
    from heterollm.kernels.npu import HostNpu

    npu = HostNpu(threads=len(split.npu_cores)) if split.npu_cores else None
    float32, half = np.dtype(np.float32), np.dtype(np.float16)
    return Device("host", runtime, npu, split, float32, half, "real", keeper=npu)


KIND = DeviceKind(
    "host",
    gpu.find_cpu,
    require_onnxruntime,
    open_host,
    options=frozenset({"gpu_threads", "npu_threads"}),
    shares_cores=True,
    reason="no Snapdragon can be used, so this machine's cores compute; see `heterollm devices`",
)
