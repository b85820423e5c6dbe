"""Platforms, devices, contexts and queues of the binding by ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final

from heterollm.kernels.gpu.ctypes_handles import (
    Handle,
    as_number,
    as_pointers,
    as_text,
    check,
    functions,
    handle_array,
    query,
)
from heterollm.kernels.gpu.opencl_library import Error as Error

DEVICE_NOT_FOUND: Final = -1


device_type = SimpleNamespace(CPU=2, GPU=4, ALL=0xFFFFFFFF)


CONTEXT_DEVICES: Final = 0x1081


PLATFORM_FACTS: Final = {"version": 0x0901, "name": 0x0902, "vendor": 0x0903}


DEVICE_TEXTS: Final = {
    "name": 0x102B,
    "vendor": 0x102C,
    "driver_version": 0x102D,
    "version": 0x102F,
    "extensions": 0x1030,
    "opencl_c_version": 0x103D,
}


DEVICE_NUMBERS: Final = {
    "type": 0x1000,
    "max_compute_units": 0x1002,
    "max_work_group_size": 0x1004,
    "max_mem_alloc_size": 0x1010,
    "image_support": 0x1016,
    "global_mem_cache_size": 0x101E,
    "global_mem_size": 0x101F,
    "local_mem_size": 0x1023,
    "host_unified_memory": 0x1035,
    "image_max_buffer_size": 0x1040,
    "svm_capabilities": 0x1053,
    "ext_mem_padding_in_bytes_qcom": 0x40A0,
}


DEVICE_PLATFORM: Final = 0x1031


class Platform(Handle):
    """A platform; see ``PLATFORM_FACTS`` for its attributes."""

    def __getattr__(self, name: str) -> str:
        if name not in PLATFORM_FACTS:
            raise AttributeError(name)
        return as_text(query("clGetPlatformInfo", self, PLATFORM_FACTS[name]))

    def get_devices(self, kind: int = device_type.ALL) -> list[Device]:
        """Return the devices of a type."""
        count = ctypes.c_uint32()
        status = functions.clGetDeviceIDs(self, kind, 0, None, ctypes.byref(count))
        if status == DEVICE_NOT_FOUND:
            return []
        check("clGetDeviceIDs", status)
        found = (ctypes.c_void_p * count.value)()
        check("clGetDeviceIDs", functions.clGetDeviceIDs(self, kind, count.value, found, None))
        return [Device(address) for address in found]


class Device(Handle):
    """A device; see ``DEVICE_TEXTS`` and ``DEVICE_NUMBERS`` for its attributes."""

    @property
    def platform(self) -> Platform:
        """Its platform."""
        return Platform(as_number(query("clGetDeviceInfo", self, DEVICE_PLATFORM)))

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - a text or a number
        if name in DEVICE_TEXTS:
            return as_text(query("clGetDeviceInfo", self, DEVICE_TEXTS[name]))
        if name in DEVICE_NUMBERS:
            return as_number(query("clGetDeviceInfo", self, DEVICE_NUMBERS[name]))
        raise AttributeError(name)


def get_platforms() -> list[Platform]:
    """Return all platforms of the library."""
    count = ctypes.c_uint32()
    check("clGetPlatformIDs", functions.clGetPlatformIDs(0, None, ctypes.byref(count)))
    found = (ctypes.c_void_p * count.value)()
    check("clGetPlatformIDs", functions.clGetPlatformIDs(count.value, found, None))
    return [Platform(address) for address in found]


class Context(Handle):
    """A context of devices, and the addresses of its queues."""

    release = "clReleaseContext"

    def __init__(self, devices: Sequence[Device]) -> None:
        super().__init__()
        self.devices = list(devices)
        self.queues: set[int] = set()
        self._create("clCreateContext", None, len(devices), handle_array(devices), None, None)

    @classmethod
    def from_int_ptr(cls, address: int, *, retain: bool) -> Context:
        """Return the context at an address, whose reference it takes over."""
        assert not retain
        context = cls.__new__(cls)
        context.value = address
        context.queues = set()
        context.devices = [
            Device(device) for device in as_pointers(query("clGetContextInfo", context, CONTEXT_DEVICES))
        ]
        return context


class CommandQueue(Handle):
    """A queue of a device."""

    release = "clReleaseCommandQueue"

    def __init__(self, context: Context, device: Device, properties: int = 0) -> None:
        super().__init__()
        self.context = context
        self.device = device
        self.properties = properties
        self._queues = context.queues
        self._create("clCreateCommandQueue", context, device, properties)
        self._queues.add(self.int_ptr)

    def __del__(self) -> None:
        # Memory of the commands may go next.
        if address := self.value:
            self._queues.discard(address)
            self.functions.clFinish(address)
        super().__del__()

    def flush(self) -> None:
        """Submit the commands."""
        check("clFlush", functions.clFlush(self))

    def finish(self) -> None:
        """Wait until all commands are done, as they are in a queue that was given back."""
        if self.value:
            check("clFinish", functions.clFinish(self))
