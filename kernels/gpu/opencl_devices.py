"""The list of OpenCL devices, and the properties that the driver reports of one."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from heterollm.base import DeviceError, OptionError, see
from heterollm.kernels.gpu.binding import OpenClError, cl
from heterollm.kernels.gpu.memory import MEMORY_KINDS, MemoryKind
from heterollm.kernels.gpu.signals import has_fine_grained_atomics
from heterollm.kernels.gpu.traits import DEFAULT_CACHE_BYTES, DeviceTraits, host_cache_bytes

logger = logging.getLogger(__name__)

FEATURES: Final = {
    "float16": ("cl_khr_fp16",),
    "subgroups": ("cl_khr_subgroups", "cl_intel_subgroups"),
    "integer dot product": ("cl_khr_integer_dot_product",),
}
"""Features of GPUs, each with the extensions of which one offers it."""


MEMORY_VARIABLE: Final = "HETEROLLM_SHARED_MEMORY"
"""Environment variable with the kind of shared memory of devices that are opened without one."""


def list_opencl_devices(
    asking: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> list[tuple[str, cl.Device]]:
    """Return every OpenCL device of the process with its platform's name.

    Args:
        asking: Returns the context in which to ask the platform of a name; drivers start their threads then.

    Raises:
        DeviceError: No OpenCL runtime is installed.
    """
    try:
        platforms = cl.get_platforms()
    except OpenClError as error:
        raise DeviceError(f"No OpenCL runtime was found ({error}).", fix=runtime_advice()) from error
    found: list[tuple[str, cl.Device]] = []
    for entry in platforms:
        with asking(entry.name):
            found.extend((entry.name, device) for device in _platform_devices(entry))
    return found


def _platform_devices(entry: cl.Platform) -> list[cl.Device]:
    """Return the devices of a platform; a phone's driver has refused the type ALL and answered to GPU."""
    try:
        return list(entry.get_devices())
    except OpenClError as error:
        logger.info("OpenCL platform %s refuses the list of all its devices: %s", entry.name, error)
    try:
        return list(entry.get_devices(cl.device_type.GPU))
    except OpenClError as error:
        logger.info("OpenCL platform %s has no usable device: %s", entry.name, error)
    return []


def is_cpu(device: cl.Device) -> bool:
    """Return whether a device is the host's CPU."""
    return bool(device.type & cl.device_type.CPU)


def gpu_features(device: cl.Device) -> str:
    """Return a GPU's kind of shared memory, compute units and features without opening it."""
    memory = f"{'svm' if has_fine_grained_atomics(device) else 'mapped'} memory"
    return ", ".join((memory, f"{device.max_compute_units} compute units", *_features(device)))


def _features(device: cl.Device) -> list[str]:
    extensions = set(device.extensions.split())
    return [name for name, offering in FEATURES.items() if extensions.intersection(offering)]


def runtime_advice() -> str:
    """Return the command that installs an OpenCL runtime for the CPU on this platform."""
    system, machine = platform.system(), platform.machine()
    advice = "Install the OpenCL driver of the machine's vendor."
    if (system, machine) in {("Linux", "x86_64"), ("Windows", "AMD64")}:
        advice = "Install one with `pip install 'heterollm[host]'`."
    elif system == "Linux":
        advice = "Install the distribution's PoCL, such as `apt install pocl-opencl-icd`."
    return f"{advice} {see('no-opencl-runtime-for-the-cpu')}"


def chosen_shared_memory(device: cl.Device, kind: MemoryKind | None) -> MemoryKind:
    """Return the kind of shared memory of a device; see :class:`OpenClRuntime`."""
    name, cpu = device.name.strip(), is_cpu(device)
    chosen = kind or os.environ.get(MEMORY_VARIABLE) or ""
    if chosen and chosen not in MEMORY_KINDS:
        raise OptionError(
            f"There is no kind of shared memory {chosen!r:.80}.",
            fix=f"Choose among {', '.join(MEMORY_KINDS)}, or unset {MEMORY_VARIABLE}.",
        )
    if not chosen:
        return "host" if cpu else "svm" if has_fine_grained_atomics(device) else "mapped"
    if chosen == "svm" and not has_fine_grained_atomics(device):
        raise DeviceError(
            f"{name!r} does not report fine-grained shared virtual memory with atomics.",
            fix="Choose the kind mapped. " + see("memory-is-mapped"),
        )
    if chosen == "host" and not cpu:
        raise DeviceError(
            f"{name!r} is no CPU, so that it may hold copies of the host's memory.",
            fix="Choose the kind svm or mapped. " + see("memory-is-mapped"),
        )
    return next(known for known in MEMORY_KINDS if known == chosen)


def device_traits(device: cl.Device, *, coherent: bool, has_matrix: bool) -> DeviceTraits:
    """Return the properties of a device, whose shared memory is coherent or not."""
    features = _features(device)
    return DeviceTraits(
        name=device.name.strip(),
        platform=device.platform.name.strip(),
        version=device.version.strip(),
        driver=device.driver_version.strip(),
        is_cpu=is_cpu(device),
        has_half="float16" in features,
        has_subgroups="subgroups" in features,
        has_matrix=has_matrix,
        has_integer_dot="integer dot product" in features,
        compute_units=device.max_compute_units,
        max_work_group=device.max_work_group_size,
        max_buffer_bytes=device.max_mem_alloc_size,
        global_bytes=device.global_mem_size,
        local_bytes=device.local_mem_size,
        cache_bytes=_cache_bytes(device),
        image_texels=device.image_max_buffer_size if device.image_support else 0,
        coherent=coherent,
        extensions=tuple(device.extensions.split()),
    )


def _cache_bytes(device: cl.Device) -> int:
    """Return the size of the last cache before memory."""
    # A GPU's driver does not report the cache that it shares with the SoC, so an upper estimate is assumed.
    if is_cpu(device):
        return host_cache_bytes()
    return max(DEFAULT_CACHE_BYTES, int(device.global_mem_cache_size))


def build_flags(device: cl.Device) -> list[str]:
    """Return the compiler options that a device gets beside the defines; none for CPUs.

    A GPU without a fast fused multiply-add may add after multiplying unless it is told that `mad` will do.
    The integer dot product is part of OpenCL C 3.0 alone.
    """
    if is_cpu(device):
        return []
    newest = device.opencl_c_version.startswith("OpenCL C 3")
    return ["-cl-mad-enable", *(["-cl-std=CL3.0"] if newest else [])]
