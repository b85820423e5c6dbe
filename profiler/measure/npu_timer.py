"""The time of NPU graphs, from the call to its return on the calling thread, as the engine runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from numpy.typing import DTypeLike, NDArray

from heterollm.kernels.device import Device
from heterollm.kernels.gpu import SharedArray
from heterollm.kernels.npu import NpuBackend, NpuGraph
from heterollm.profiler.measure.sampling import MOST_SAMPLES, taken
from heterollm.profiler.measure.timing import Timer
from heterollm.profiler.records import Key, Record

FEW_SAMPLES: Final = 3
"""Samples on an NPU without real time: emulated times mean nothing, and modelled ones do not vary."""

# Rough rates for estimates, a second: measured on one core and on the emulator, published for a phone.
CORE_FLOPS: Final = 70e9
CORE_BYTES: Final = 10e9
MEMORY_BYTES: Final = 40e9
NPU_FLOPS: Final = 4e12
EMULATED_FLOPS: Final = 4e9
EMULATED_BYTES: Final = 6e6

Arrays: TypeAlias = Mapping[str, tuple[SharedArray, DTypeLike, tuple[int, ...]]]
"""Memory, number type and sizes of a graph's inputs or outputs, by name."""


def graph_record(
    key: Key,
    npu: NpuBackend,
    graph: NpuGraph,
    inputs: Arrays,
    outputs: Arrays,
    *,
    timer: Timer,
    evict: Callable[[], None] | None = None,
    values: Callable[[], Mapping[str, float]] = dict,
) -> Record:
    """Return the record of a graph that runs until its time is known.

    Args:
        key: Key of the record.
        npu: The NPU.
        graph: The graph.
        inputs: Its inputs, which may share memory with nothing else that runs.
        outputs: Its outputs.
        timer: The clock, in nanoseconds.
        evict: Empties the caches before each sample, outside of the time.
        values: Called after the samples; other numbers to record.
    """
    slots = [slot for slot, *_ in (*inputs.values(), *outputs.values())]
    for slot in slots:
        slot.acquire()
    try:
        call = graph.bind(_views(inputs), _views(outputs))

        def run_us() -> float:
            begin_ns = timer()
            call()
            return (timer() - begin_ns) / 1e3

        def once_us() -> float:
            if evict is not None:
                evict()
            return run_us()

        most = MOST_SAMPLES if npu.time_kind == "real" else FEW_SAMPLES
        return taken(key, once_us, run_us, values=values, most=most)
    finally:
        for slot in slots:
            slot.release()


def _views(arrays: Arrays) -> dict[str, NDArray[Any]]:
    return {name: slot.view(dtype, sizes) for name, (slot, dtype, sizes) in arrays.items()}


def npu_run_s(device: Device, flops: int, weight_bytes: int) -> float:
    """Return about how long a run of a graph takes."""
    if device.npu is not None and device.npu.time_kind == "emulated":
        rates = EMULATED_FLOPS, EMULATED_BYTES
    else:
        cores = len(device.split.npu_cores)
        rates = (CORE_FLOPS * cores, CORE_BYTES) if cores else (NPU_FLOPS, MEMORY_BYTES)
    return max(flops / rates[0], weight_bytes / rates[1])
