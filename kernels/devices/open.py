"""Opens devices by name, and lists the devices of this machine.

The engine thread opens the device that it will run, because its affinity determines the cores.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from heterollm.base import DeviceError, OptionError
from heterollm.kernels.device import Device, DeviceStatus
from heterollm.kernels.devices.kind import AUTO, DEVICE_NAMES, ChooseThreads, DeviceKind, Opening, kind_of
from heterollm.kernels.devices.race import kept_race
from heterollm.kernels.ops import POWERS, Power
from heterollm.kernels.sim import SIMULATED, Simulation, is_simulated
from heterollm.kernels.threads import split_threads

if TYPE_CHECKING:
    from heterollm.kernels.gpu import MemoryKind


def open_device(
    name: str = "auto",
    *,
    gpu_threads: int | None = None,
    npu_threads: int | None = None,
    profiling: bool = False,
    shared_memory: MemoryKind | None = None,
    simulation: Simulation | None = None,
    power: Power = "burst",
    choose_threads: ChooseThreads | None = None,
) -> Device:
    """Open a device on the calling thread.

    Args:
        name: One of :data:`DEVICE_NAMES`; ``auto``, which is ``snapdragon`` if both of its processors pass
            a self-test, else ``opencl`` if its GPU is faster than the cores, else ``host``; or ``sim:``
            with the name of a SoC or of its YAML file.
        gpu_threads: Threads of OpenCL on the CPU.
        npu_threads: Threads of an NPU that runs on CPU cores; 0 opens any device but the emulator without
            an NPU.
        profiling: Whether OpenCL events carry timestamps.
        shared_memory: Kind of the memory that host and GPU share, ``svm``, ``mapped`` or ``host``; None for
            the one that the environment names, or the best one that the GPU has.
        simulation: Options of a simulated device.
        power: Clocks and cores to ask for on ``snapdragon``; the emulator accepts it, others ignore it.
        choose_threads: Chooses the threads of ``host`` where none are given; called before its OpenCL is.

    Raises:
        DeviceError: A processor is missing or fails; the message gives a fix.
        OptionError: The name, a thread count or the power is not legal.
    """
    if power not in POWERS:
        raise OptionError(f"There is no power {power!r:.80}.", fix=f"Choose {', '.join(POWERS)}.")
    wanted = Opening(gpu_threads, npu_threads, profiling, shared_memory, power, choose_threads)
    if is_simulated(name):
        from heterollm.kernels.sim import open_simulated

        def compute_on() -> Device:
            return kind_of("host").open(Opening(gpu_threads, npu_threads))

        return open_simulated(name, simulation, with_npu=npu_threads != 0, compute_on=compute_on)
    if name == "auto":
        return _open_first(wanted)
    if name in DEVICE_NAMES:
        return kind_of(name).open(wanted)
    fix = f"Choose auto, {', '.join(DEVICE_NAMES)}, or a simulated one such as {SIMULATED}snapdragon-8gen3."
    raise OptionError(f"There is no device {name!r}.", fix=fix)


def _open_first(wanted: Opening) -> Device:
    *first, last = map(kind_of, AUTO)
    why = last.reason
    for kind in first:
        reason = kind.reason
        if kind.race is not None:
            if (race := kind.race()) is None:
                continue
            reason = why = str(race)
            if not race.is_won:
                continue
        try:
            split = split_threads(wanted.gpu_threads, wanted.npu_threads)
            return _chosen(kind, replace(wanted, split=split), reason)
        except DeviceError as error:
            if kind.race is not None:  # its GPU would have been the better choice
                why = error.message.removesuffix(".")
    return _chosen(last, wanted, why)


def _chosen(kind: DeviceKind, wanted: Opening, reason: str) -> Device:
    device = kind.open(wanted)
    device.reason = reason
    return device


def shares_cores(name: str) -> bool:
    """Return whether the two processors of a device share CPU cores, or may."""
    kinds = AUTO if name == "auto" else (name,)
    return any(kind in DEVICE_NAMES and kind_of(kind).shares_cores for kind in kinds)


def opens_host(name: str) -> bool:
    """Return whether a name opens ``host``: itself, or ``auto`` without a Hexagon or a faster GPU."""
    if name != "auto":
        return name == "host"
    from heterollm.kernels.npu import qnn_available

    if qnn_available(emulator=False)[0]:
        return False
    return (race := kept_race()) is None or not race.is_won


def list_devices() -> list[DeviceStatus]:
    """Return the status of all devices, with reason and fix for unusable ones. Opens none."""
    return [_status(kind_of(name)) for name in DEVICE_NAMES]


def _status(kind: DeviceKind) -> DeviceStatus:
    texts: list[str] = []
    errors: list[DeviceError] = []
    for find in (kind.find_gpu, kind.find_npu):
        try:
            texts.append(find())
        except DeviceError as error:
            texts.append("missing")
            errors.append(error)
    gpu, npu = texts
    return DeviceStatus(
        name=kind.name,
        usable=not errors,
        gpu=gpu,
        npu=npu,
        reason=" ".join(error.message for error in errors),
        fix=" ".join(dict.fromkeys(error.fix for error in errors if error.fix)),
        time=kind.time,
    )
