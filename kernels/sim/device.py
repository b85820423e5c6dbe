"""Opens a simulated SoC as a device on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from heterollm.base import GIB, OptionError
from heterollm.kernels.device import Device, DeviceStatus
from heterollm.kernels.npu import STANDARD_LENGTHS
from heterollm.kernels.sim.clock import MemoryRates, SimulatedClock
from heterollm.kernels.sim.jobs import ClockCosts
from heterollm.kernels.sim.npu import SimulatedNpu
from heterollm.kernels.sim.options import SIMULATED, Simulation
from heterollm.kernels.sim.runtime import SimulatedRuntime
from heterollm.kernels.sim.soc.memory_model import shared_rates
from heterollm.kernels.sim.soc.parameters import load_soc, soc_names
from heterollm.kernels.sim.soc.quantities import SocParameters
from heterollm.kernels.threads import ThreadSplit


def simulated_devices() -> list[DeviceStatus]:
    """Return the status of the SoCs that can be simulated by name."""
    return [
        DeviceStatus(
            name=f"{SIMULATED}{name}",
            usable=True,
            gpu="modelled",
            npu="modelled",
            reason="Its times are simulated, none is measured; auto never picks it.",
            fix="",
            time="simulated",
        )
        for name in soc_names()
    ]


def open_simulated(
    name: str, simulation: Simulation | None, *, with_npu: bool, compute_on: Callable[[], Device]
) -> Device:
    """Open a simulated SoC.

    Args:
        name: ``sim:`` and the name of a SoC or the path of a YAML file.
        simulation: Options of the simulation; None for the defaults.
        with_npu: Whether the device has an NPU.
        compute_on: Opens the device that computes the numerics.

    Raises:
        OptionError: There is no such SoC, or a parameter is not legal.
        DeviceError: The device for the numerics is missing or fails.
    """
    how = simulation or Simulation()
    soc = load_soc(name.removeprefix(SIMULATED), dict(how.overrides))
    clock = SimulatedClock(clock_costs(soc), _rates_of(soc), how.load)
    real = compute_on() if how.numerics else None
    gpu = SimulatedRuntime(soc, clock, None if real is None else real.gpu)
    lengths = tuple(sorted({*STANDARD_LENGTHS, *how.lengths}))
    npu = None
    if with_npu:
        real_npu = None if real is None else real.npu
        npu = SimulatedNpu(soc, clock, real_npu, gpu.settle_real, lengths=lengths, every_form=how.every_form)
    half = np.dtype(np.float16)
    return Device(
        name=f"{SIMULATED}{soc.name}",
        gpu=gpu,
        npu=npu,
        split=ThreadSplit((), ()),
        activation_dtype=half if real is None else real.activation_dtype,
        cache_dtype=half if real is None else real.cache_dtype,
        time_kind="simulated",
        memory_bytes=int(soc.memory.available_gib * GIB) or None,
    )


def clock_of(device: Device) -> SimulatedClock:
    """Return the virtual clock of a simulated device.

    Raises:
        OptionError: The device is not simulated.
    """
    return _simulated(device).clock


def soc_of(device: Device) -> SocParameters:
    """Return the parameters of a simulated device.

    Raises:
        OptionError: The device is not simulated.
    """
    return _simulated(device).soc


def _simulated(device: Device) -> SimulatedRuntime:
    if not isinstance(device.gpu, SimulatedRuntime):
        raise OptionError(
            f"Device {device.name} is not simulated.", fix="Open one such as sim:snapdragon-8gen3."
        )
    return device.gpu


def clock_costs(soc: SocParameters) -> ClockCosts:
    """Return the costs of the control thread's calls on a SoC."""
    return ClockCosts(
        submit_us=soc.cpu.submit_us,
        refill_us=soc.hand_over.refill_us,
        gap_us=soc.gpu.kernel_gap_us,
        finish_us=soc.hand_over.finish_us,
        write_us=soc.hand_over.write_us,
        poll_us=soc.hand_over.poll_us,
        sleep_us=soc.cpu.sleep_granularity_us,
        npu_start_share=soc.npu.execute_exposed_fraction,
        frames_wait=bool(soc.gpu.frames_wait),
    )


def _rates_of(soc: SocParameters) -> MemoryRates:
    def rates(
        gpu_gbps: float, npu_gbps: float, gpu_computes: bool, npu_computes: bool
    ) -> tuple[float, float]:
        return shared_rates(soc, gpu_gbps, npu_gbps, gpu_arithmetic=gpu_computes, npu_arithmetic=npu_computes)

    return rates
