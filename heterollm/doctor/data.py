"""The small random data of the doctor's checks, and how it gets into a device's memory and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from numpy.typing import NDArray

from heterollm.kernels.device import Device
from heterollm.kernels.gpu import Launch, SharedArray

__all__ = ["COLUMNS", "SEED", "filled_slot", "run_launches", "slot_values"]

SEED: Final = 20260101
COLUMNS: Final = 256
"""Inputs of every linear layer."""


def filled_slot(device: Device, values: NDArray[Any]) -> SharedArray:
    """Return memory of the GPU part with these values."""
    slot = device.gpu.shared(values.shape, values.dtype)
    slot.acquire()
    slot.array[...] = values
    slot.release()
    return slot


def slot_values(slot: SharedArray) -> NDArray[Any]:
    """Return a copy of what the memory holds."""
    slot.acquire()
    values = slot.array.copy()
    slot.release()
    return values


def run_launches(device: Device, launches: Sequence[Launch]) -> None:
    """Run the launches one after the other and wait for the last."""
    for launch in launches:
        launch()
    device.gpu.finish()
