"""Whether a device can compute at a precision: none is ever exchanged for another."""

from __future__ import annotations

from collections.abc import Iterable

from heterollm.base import DeviceError
from heterollm.kernels.device import Device
from heterollm.kernels.ops import OpSpec, Precision

__all__ = ["check_precision"]


def check_precision(device: Device, precision: Precision, specs: Iterable[OpSpec]) -> None:
    """Refuse a device whose NPU rounds no activations where the precision asks for it.

    Whatever the plan: one that uses the GPU alone would run there with numbers that no cut of it could give.

    Raises:
        DeviceError: It has no form of a group with int8 activations.
    """
    npu = device.npu
    if npu is None:
        return
    for spec in specs:
        if spec.integer_inputs and not any(
            npu.forms(spec.weight, columns=spec.columns, length=length, integer_inputs=True)
            for length in npu.standard_lengths
        ):
            raise DeviceError(
                f"Device {device.name} cannot run precision {precision}: {npu.name} computes "
                f"{spec.weight} weights with float activations only.",
                fix="Choose precision w4a16 or fp16, or device host.",
            )
