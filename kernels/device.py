"""Devices: a GPU, an NPU, and shared memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from heterollm.kernels.npu import ContextPackager, GraphKeeper, NpuBackend, TimeKind
from heterollm.kernels.ops import Power
from heterollm.kernels.threads import (
    ThreadSplit,
    allowed_cores,
    biggest_cores,
    middle_cores,
    pin_current_thread,
)

if TYPE_CHECKING:
    from heterollm.kernels.gpu import GpuRuntime
    from heterollm.kernels.sync import SharedArenas


NPU_MEMORY: Final = "npu_memory_bytes"
"""Entry of a description: what all process domains of the NPU hold, where that is not what one addresses."""


class PowerSwitch(Protocol):
    """Asks the system for a processor's clocks; a refusal raises nothing."""

    problem: str
    """Why the system refuses; empty if it does not."""

    def wake(self) -> None:
        """Ask for high clocks, before work."""

    def rest(self) -> None:
        """Ask for none, after work."""

    def run_us(self, runs: int) -> float:
        """Return the median microseconds of a small graph."""


@dataclass(slots=True)
class Device:
    """An opened device.

    Args:
        name: Its name: ``sim:`` and that of a simulated SoC, or one of
            :data:`heterollm.kernels.devices.DEVICE_NAMES`.
        gpu: The GPU.
        npu: The NPU; None if the device was opened without one.
        split: CPU cores of GPU and NPU, if they run on CPU cores.
        activation_dtype: Storage type of the inputs and outputs of linear layers.
        cache_dtype: Storage type of the KV cache.
        time_kind: Whether times measured on it are real, emulated or simulated.
        reason: Why ``auto`` chose it; empty otherwise.
        power: Clocks and cores asked for; ``default`` where the processors are CPU cores or modelled.
        power_switch: The switch of the NPU's clocks; None where nothing is asked for. The emulator's accepts
            all and has no clocks, so that the engine does not use it.
        packager: The NPU, if it can put several graphs into one context.
        keeper: The NPU, if it can keep graphs in a folder.
        memory_bytes: Memory that a model can have on a modelled phone; None where the system is asked.
        arenas: Memory that both processors use without copies; None where no driver offers it.
    """

    name: str
    gpu: GpuRuntime
    npu: NpuBackend | None
    split: ThreadSplit
    activation_dtype: np.dtype[Any]
    cache_dtype: np.dtype[Any]
    time_kind: TimeKind
    reason: str = ""
    power: Power = "default"
    power_switch: PowerSwitch | None = None
    packager: ContextPackager | None = None
    keeper: GraphKeeper | None = None
    memory_bytes: int | None = None
    arenas: SharedArenas | None = None

    @property
    def standard_lengths(self) -> tuple[int, ...]:
        """Lengths for which NPU graphs exist; empty without an NPU."""
        return () if self.npu is None else self.npu.standard_lengths

    @property
    def is_simulated(self) -> bool:
        """Whether its times are modelled, not measured."""
        return self.time_kind == "simulated"

    def now_s(self) -> float:
        """Return the seconds of its clock, real or virtual."""
        return self.gpu.now_ns() / 1e9

    def pin(self) -> bool:
        """Pin the calling thread (the engine thread) to its cores."""
        return pin_current_thread(self.engine_cores())

    def engine_cores(self) -> tuple[int, ...]:
        """Return the cores of the engine thread, which also polls.

        They are those of an NPU on CPU cores, else by power: the biggest ones, middle ones, or all.
        """
        if self.split.npu_cores:
            return self.split.npu_cores
        chosen = {"burst": biggest_cores, "balanced": middle_cores, "default": allowed_cores}
        return chosen[self.power]()

    def description(self) -> dict[str, Any]:
        """Return processors, drivers and thread split, which identify measurements."""
        traits = self.gpu.traits
        power = {} if self.power == "default" else {"power": self.power}
        # Devices without a limit keep the description, and with it the profiles, that they had before.
        memory: dict[str, Any] = {}
        if self.npu is not None and self.npu.addressable_bytes is not None:
            memory["npu_addressable_bytes"] = self.npu.domain_bytes
            if self.npu.addressable_bytes != self.npu.domain_bytes:
                memory[NPU_MEMORY] = self.npu.addressable_bytes
        if self.npu is not None and self.npu.io_by_graph:
            memory["npu_io_by_graph"] = True
        if self.npu is not None and self.npu.reuses_io:
            memory["npu_reuses_io"] = True
        if self.npu is not None and self.npu.unrolls_blocks:
            memory["npu_unrolls_blocks"] = True
        if self.gpu.maps_beside_kernels:
            memory["maps_beside_kernels"] = True
        if self.npu is not None and self.npu.graphs_by_length != self.npu.copies_by_length:
            memory["npu_graphs_by_length"] = self.npu.graphs_by_length
        return power | {
            "device": self.name,
            "time": self.time_kind,
            "gpu": traits.name,
            "gpu_driver": f"{traits.platform} {traits.identity(self.gpu.target).driver}",
            "npu": None if self.npu is None else self.npu.name,
            "npu_versions": {} if self.npu is None else self.npu.versions(),
            "npu_standard_lengths": list(self.standard_lengths),
            "npu_row_alignment": 0 if self.npu is None else self.npu.row_alignment,
            "coherent": traits.coherent,
            "cache_bytes": traits.cache_bytes,
            "npu_copies_by_length": self.npu is not None and self.npu.copies_by_length,
            "gpu_threads": len(self.split.gpu_cores),
            "npu_threads": len(self.split.npu_cores),
            # The numerics of a simulated device do not affect its times.
            "activation_dtype": "float16" if self.is_simulated else self.activation_dtype.name,
            **memory,
        }

    def fingerprint(self) -> str:
        """Return a short hash of :meth:`description`."""
        return fingerprint_of(self.description())

    def close(self) -> None:
        """Release the NPU's sessions; OpenCL memory is freed with its last reference."""
        if self.npu is not None:
            self.npu.close()


def fingerprint_of(description: Mapping[str, Any]) -> str:
    """Return the short hash of a device's description, the key of measurements.

    No measurement depends on the number of the NPU's process domains.
    """
    text = json.dumps({key: value for key, value in description.items() if key != NPU_MEMORY}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class DeviceStatus:
    """Status of a device on this machine: usable or not with reason and fix, and its type of time."""

    name: str
    usable: bool
    gpu: str
    npu: str
    reason: str
    fix: str
    time: TimeKind = "real"
