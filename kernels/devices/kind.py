"""The description of a device by its module, and the names of all devices."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Final, TypeAlias

from msgspec import Struct

from heterollm.base import PositiveNumber

if TYPE_CHECKING:
    from heterollm.kernels.device import Device
    from heterollm.kernels.gpu import MemoryKind
    from heterollm.kernels.npu import TimeKind
    from heterollm.kernels.ops import Power
    from heterollm.kernels.threads import ThreadSplit

DEVICE_NAMES: Final = ("snapdragon", "opencl", "intel", "host", "emulator", "intel:cpu")
"""Modules of this folder with a ``KIND`` (``:`` is ``_`` there), in the order of ``heterollm devices``."""

AUTO: Final = ("snapdragon", "opencl", "host")
"""Devices that ``auto`` tries in turn; the last one's refusal is the answer."""

ChooseThreads: TypeAlias = "Callable[[int | None], tuple[int | None, int | None]]"
"""Returns threads of GPU and NPU from those that OpenCL has already, None if it was not opened."""


Seconds: TypeAlias = tuple[PositiveNumber, PositiveNumber]
"""Times of the layer in decode and in prefill."""


class Race(Struct, frozen=True, forbid_unknown_fields=True):
    """The result of a race of a GPU against the cores of the CPU, with one linear layer.

    Args:
        gpu: Name of the GPU.
        gpu_s: Its times.
        cores_s: Those of all cores; None if they have no OpenCL.
    """

    gpu: str
    gpu_s: Seconds
    cores_s: Seconds | None

    @property
    def is_won(self) -> bool:
        """Whether the GPU is the faster one, in the geometric mean of decode and prefill."""
        return self.cores_s is None or math.prod(self.cores_s) > math.prod(self.gpu_s)

    def __str__(self) -> str:
        if self.cores_s is None:
            return f"{self.gpu} has OpenCL, and the cores of this machine have none"
        decode, prefill = (cores / gpu for cores, gpu in zip(self.cores_s, self.gpu_s, strict=True))
        return (
            f"{self.gpu} computes a linear layer {decode:.3g} times as fast in decode as all cores of "
            f"this machine, {prefill:.3g} times in prefill"
        )


@dataclass(frozen=True, slots=True)
class Opening:
    """Options of a device that is opened, as in :func:`heterollm.kernels.devices.open_device`."""

    gpu_threads: int | None = None
    npu_threads: int | None = None
    profiling: bool = False
    shared_memory: MemoryKind | None = None
    power: Power = "burst"
    choose_threads: ChooseThreads | None = None
    split: ThreadSplit | None = None
    """Cores of OpenCL's CPU threads, where another device may follow in this process."""


@dataclass(frozen=True, slots=True)
class DeviceKind:
    """Facts of a device that hold before it is opened.

    Args:
        name: Its name, that of its module.
        find_gpu: Returns the GPU's name without opening it; raises DeviceError with the package to install.
        find_npu: The same for the NPU.
        open: Opens both on the calling thread.
        options: Options of a load that it alone takes, of ``power``, ``gpu_threads`` and ``npu_threads``.
        shares_cores: Whether its two processors share CPU cores.
        time: Whether its times are real or emulated.
        reason: Why ``auto`` chose it.
        race: Returns its race against the cores of ``host``, None without a GPU; ``auto`` takes it if it won.
    """

    name: str
    find_gpu: Callable[[], str]
    find_npu: Callable[[], str]
    open: Callable[[Opening], Device]
    options: frozenset[str] = frozenset()
    shares_cores: bool = False
    time: TimeKind = "real"
    reason: str = ""
    race: Callable[[], Race | None] | None = None


def kind_of(name: str) -> DeviceKind:
    """Return the description of one of :data:`DEVICE_NAMES`."""
    kind: DeviceKind = import_module(f"{__package__}.{name.replace(':', '_')}").KIND
    return kind


def option_devices(option: str) -> tuple[str, ...]:
    """Return the devices that take an option of a load; ``auto`` takes those of all that it may open."""
    found = [name for name in DEVICE_NAMES if option in kind_of(name).options]
    return (*found, *(("auto",) if set(found) & set(AUTO) else ()))
