"""The GPU of a test run, `pytest --gpu NAME`: a real one, or a runtime for the CPU that is taken for one."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from heterollm.base import DeviceError
from heterollm.kernels.gpu import OpenClRuntime, SharedArray
from heterollm.kernels.gpu.binding import cl

IS_CPU = ("heterollm.kernels.gpu.is_cpu", "heterollm.kernels.gpu.opencl_devices.is_cpu")


class SeparateMemory(SharedArray):
    """Memory of the device alone: the host sees a copy, which is worthless unless it is acquired.

    Only the acquired bytes are copied, and copied back at the release.
    """

    __slots__ = ("reading", "transfers")

    def __init__(self, array: Any, buffer: Any, queue: Any, map_queue: Any) -> None:
        super().__init__(array, buffer, queue, False, map_queue)
        self.reading = False
        self.transfers = 0
        self._spoil()

    def _spoil(self) -> None:
        self.array.reshape(-1).view(np.uint8).fill(0xFF)

    def acquire(self, size_bytes: int | None = None) -> None:
        if self._mapped is None:
            self._mapped = self.array.reshape(-1).view(np.uint8)[:size_bytes]
            # In the queue of the maps: only fences order it behind the kernels that write.
            cl.enqueue_copy(self._map_queue or self._queue, self._mapped, self.buffer)
            self.transfers += 1

    def acquire_to_read(self, size_bytes: int | None = None) -> None:
        self.acquire(size_bytes)
        self.reading = True

    def release(self) -> None:
        if self._mapped is not None:
            if not self.reading:
                cl.enqueue_copy(self._queue, self.buffer, self._mapped)
            self._mapped = None
            self.reading = False
            self._spoil()


def separate_memory(patch: pytest.MonkeyPatch) -> list[SeparateMemory]:
    """Give mapped arrays of CPUs a memory of their own from now on; return the list of these."""
    made: list[SeparateMemory] = []
    shared = OpenClRuntime.shared

    def allocate(runtime: OpenClRuntime, shape: tuple[int, ...], dtype: Any) -> SharedArray:
        memory = shared(runtime, shape, dtype)
        if runtime.shared_memory != "mapped" or isinstance(memory, SeparateMemory):
            return memory
        flags = cl.mem_flags.READ_WRITE | cl.mem_flags.COPY_HOST_PTR
        buffer = cl.Buffer(runtime.context, flags, hostbuf=memory.array)
        made.append(SeparateMemory(memory.array, buffer, runtime.queue, runtime.map_queue))
        return made[-1]

    patch.setattr(OpenClRuntime, "shared", allocate)
    return made


def take_for_gpu(patch: pytest.MonkeyPatch, name: str = "") -> None:
    """Take CPUs whose name or platform contains a text for GPUs with separate memory from now on."""
    from heterollm.kernels.gpu import is_cpu, list_opencl_devices

    taken = {
        device.int_ptr
        for platform, device in list_opencl_devices()
        if name.lower() in f"{device.name} {platform} {device.driver_version}".lower()
    }

    def still_cpu(device: Any) -> bool:
        return is_cpu(device) and getattr(device, "int_ptr", 0) not in taken

    for place in IS_CPU:
        patch.setattr(place, still_cpu)
    patch.setenv("HETEROLLM_SHARED_MEMORY", "mapped")
    separate_memory(patch)


def use_gpu(name: str) -> bool:
    """Choose the GPU of the whole process by a number or text, as `HETEROLLM_GPU` does.

    Returns whether it is no GPU but a CPU that is taken for one.

    Raises:
        pytest.UsageError: No GPU and no CPU of OpenCL has this name.
    """
    from heterollm.kernels.devices.choice import find_gpus

    os.environ["HETEROLLM_GPU"] = name
    try:
        find_gpus()
        return False
    except DeviceError:
        take_for_gpu(pytest.MonkeyPatch(), name)
        try:
            find_gpus()
        except DeviceError as error:
            raise pytest.UsageError(f"--gpu: {error.message}") from error
        return True
