"""The device ``opencl``: any GPU through OpenCL, and ONNX Runtime on the CPU's cores as the NPU."""

from __future__ import annotations

from typing import Any

import numpy as np

from heterollm.base import DeviceError, see
from heterollm.kernels.device import Device
from heterollm.kernels.devices import gpu, race
from heterollm.kernels.devices.choice import choose_gpu, gpu_text, is_translated
from heterollm.kernels.devices.kind import DeviceKind, Opening
from heterollm.kernels.devices.runtimes import opencl_devices
from heterollm.kernels.devices.software import require_onnxruntime
from heterollm.kernels.threads import ThreadSplit, allowed_cores, split_threads


def open_opencl(wanted: Opening) -> Device:
    """Open the GPU after a small test, and an NPU on all cores of the CPU.

    Both processors' activations are float32, as ONNX Runtime computes them; the KV cache is float16.
    """
    threads, cores = wanted.npu_threads, allowed_cores()
    npu_cores = cores if threads is None else split_threads(None, threads).npu_cores
    if npu_cores:
        require_onnxruntime()
    chosen, _ = find_gpus(wanted.split)
    runtime = gpu.open_gpu(chosen, wanted)
    gpu.self_test(runtime)
    from heterollm.kernels.npu import HostNpu

    npu = HostNpu(threads=len(npu_cores)) if npu_cores else None
    float32, float16 = np.dtype(np.float32), np.dtype(np.float16)
    return Device("opencl", runtime, npu, ThreadSplit((), npu_cores), float32, float16, "real")


def find_gpus(split: ThreadSplit | None = None) -> tuple[Any, str]:
    """Return the GPU to use, and a text with all of them.

    GPUs with memory of their own come first, then those with most compute units, Microsoft's OpenCL last.

    Raises:
        DeviceError: There is none, or the environment names none.
    """
    devices = opencl_devices(split)
    from heterollm.kernels.gpu import gpu_features, is_cpu

    found = [(name, device) for name, device in devices if not is_cpu(device)]
    if not found:
        seen = ", ".join(device.name.strip() for _, device in devices) or "none"
        raise DeviceError(
            f"No GPU among the OpenCL devices ({seen}).",
            fix="Install the OpenCL driver of the GPU's vendor. " + see("a-gpu-is-not-listed"),
        )

    def rank(entry: tuple[str, Any]) -> tuple[bool, bool, int]:
        name, device = entry
        return is_translated(name, device), bool(device.host_unified_memory), -device.max_compute_units

    found.sort(key=rank)
    number, text = choose_gpu([gpu_text(*entry, gpu_features(entry[1])) for entry in found], "GPUs")
    return found[number][1], text


KIND = DeviceKind(
    "opencl",
    lambda: find_gpus()[1],
    require_onnxruntime,
    open_opencl,
    options=frozenset({"npu_threads"}),
    wins=race.gpu_wins,
)
