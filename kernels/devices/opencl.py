"""The device ``opencl``: any GPU through OpenCL, and ONNX Runtime on the CPU's cores as the NPU."""

from __future__ import annotations

import numpy as np

from heterollm.kernels.device import Device
from heterollm.kernels.devices import gpu, race
from heterollm.kernels.devices.choice import find_gpus
from heterollm.kernels.devices.kind import DeviceKind, Opening
from heterollm.kernels.devices.software import require_onnxruntime
from heterollm.kernels.threads import ThreadSplit, split_threads, whole_cores


def open_opencl(wanted: Opening) -> Device:
    """Open the GPU after a small test, and an NPU on all cores of the CPU.

    Both processors' activations are float32, as ONNX Runtime computes them; the KV cache is float16.
    """
    threads, cores = wanted.npu_threads, whole_cores()
    npu_cores = cores if threads is None else split_threads(None, threads).npu_cores
    if npu_cores:
        require_onnxruntime()
    chosen, _ = find_gpus(wanted.split)
    runtime = gpu.open_gpu(chosen, wanted)
    gpu.self_test(runtime)
    float32, float16 = np.dtype(np.float32), np.dtype(np.float16)
    gpu.check_endings(runtime, float32, float16)
    from heterollm.kernels.npu import HostNpu

    npu = HostNpu(threads=len(npu_cores)) if npu_cores else None
    return Device(*("opencl", runtime, npu, ThreadSplit((), npu_cores), float32, float16, "real"), keeper=npu)


KIND = DeviceKind(
    "opencl",
    lambda: find_gpus()[1],
    require_onnxruntime,
    open_opencl,
    options=frozenset({"npu_threads"}),
    race=lambda: race.kept_race(),
)
