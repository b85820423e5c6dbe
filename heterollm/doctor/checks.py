"""Every operator of every part of a device, run on small random data against the float64 oracle."""

from __future__ import annotations

from heterollm.doctor.case import DoctorCase
from heterollm.doctor.flag import flag_cases
from heterollm.doctor.layers import gpu_layer_cases
from heterollm.doctor.linears import gpu_linear_cases, npu_cases
from heterollm.kernels.device import Device

__all__ = ["device_cases"]


def device_cases(device: Device) -> list[DoctorCase]:
    """Return every check of a device: those of the GPU, of the NPU, and of the flag."""
    cases = [*gpu_linear_cases(device), *gpu_layer_cases(device)]
    if device.npu is not None:
        cases += npu_cases(device, device.npu)
    return [*cases, *flag_cases(device)]
