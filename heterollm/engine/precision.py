"""Checks that a device supports a precision; the runtime never substitutes another one."""

from __future__ import annotations

from collections.abc import Iterable

from heterollm.base import DeviceError
from heterollm.kernels.device import Device
from heterollm.kernels.npu import LinearShape
from heterollm.kernels.ops import OpSpec, Precision


def check_precision(device: Device, precision: Precision, specs: Iterable[OpSpec]) -> None:
    """Refuse a device whose NPU does not support the precision's int8 activations.

    Plans for the GPU alone are refused too: at ``w4a8`` no split of such a plan could give the same numbers.

    Raises:
        DeviceError: The NPU has no graph form with int8 activations for a group.
    """
    npu = device.npu
    if npu is None:
        return
    for spec in specs:
        rounded = spec.integer_inputs
        if (rounded or spec.weight.scales == "tensor") and not any(
            npu.forms(LinearShape(spec.weight, spec.columns, integer_inputs=rounded), length)
            for length in npu.standard_lengths
        ):
            raise DeviceError(
                f"Device {device.name} cannot run precision {precision}: {npu.name} computes "
                f"{spec.weight} weights with float activations only.",
                fix="Choose precision w4a16 or fp16, or device host.",
            )
