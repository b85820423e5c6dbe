"""An OpenCL context with Qualcomm's hint for the GPU's clocks (``cl_qcom_perf_hint``)."""

from __future__ import annotations

import ctypes
from typing import Final

from heterollm.kernels.gpu.binding import OpenClError, cl, opencl_library
from heterollm.kernels.ops import Power

EXTENSION: Final = "cl_qcom_perf_hint"
CONTEXT_PERF_HINT: Final = 0x40C2
HINTS: Final[dict[Power, tuple[int, str]]] = {"burst": (0x40C3, "high"), "balanced": (0x40C4, "normal")}
"""Values of the context's property, as Qualcomm's OpenCL headers define them."""

CONTEXT_PLATFORM: Final = 0x1084


def new_context(device: cl.Device, power: Power) -> tuple[cl.Context, str]:
    """Return a context of a device, and a text on its clocks that ``heterollm doctor`` shows.

    A driver that refuses the hint gets a context without it.

    Args:
        device: The device.
        power: The clocks to ask for.

    Raises:
        OpenClError: The driver makes no context.
    """
    if power not in HINTS:
        return cl.Context([device]), "no hint: power is left to the system"
    if EXTENSION not in device.extensions.split():
        return cl.Context([device]), f"no hint: the driver does not offer {EXTENSION}"
    value, name = HINTS[power]
    context, error = _hinted_context(device, value)
    if context is None:
        return cl.Context([device]), f"no hint: the driver refuses {EXTENSION} with OpenCL error {error}"
    return context, f"{EXTENSION} {name}"


def _hinted_context(device: cl.Device, value: int) -> tuple[cl.Context | None, int]:
    """Return a context with the hint, or None with OpenCL's error; pyopencl passes no vendor's properties."""
    create = opencl_library().clCreateContext
    create.restype = ctypes.c_void_p
    properties = (ctypes.c_ssize_t * 5)(
        *(CONTEXT_PLATFORM, device.platform.int_ptr, CONTEXT_PERF_HINT, value, 0)
    )
    devices, error = (ctypes.c_void_p * 1)(device.int_ptr), ctypes.c_int32(0)
    handle = create(properties, ctypes.c_uint32(1), devices, None, None, ctypes.byref(error))
    if not handle or error.value:
        return None, error.value
    try:
        return cl.Context.from_int_ptr(handle, retain=False), 0
    except OpenClError as refused:
        return None, int(getattr(refused, "code", -1))
