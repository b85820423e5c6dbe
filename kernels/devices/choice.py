"""The choice of a GPU where OpenCL offers several."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Final

from heterollm.base import DeviceError, see
from heterollm.kernels.devices.runtimes import opencl_devices
from heterollm.kernels.threads import ThreadSplit

GPU_VARIABLES: Final = ("HETEROLLM_GPU", "HETEROLLM_ADRENO")
"""Environment variables that choose among several GPUs, by a number of ``heterollm devices`` or a part of a
name or driver; the second one is the former name."""

OPENCL_ON_12: Final = "openclon12"
"""Microsoft's OpenCL over Direct3D 12, which offers the same GPU without its driver's compiler."""


def is_translated(platform: str, device: Any) -> bool:  # noqa: ANN401
    """Return whether a GPU is offered by Microsoft's OpenCL instead of its driver."""
    return OPENCL_ON_12 in f"{platform}{device.name}".lower()


def choose_gpu(
    found: Sequence[tuple[str, Any]], kind: str, features: Callable[[Any], str] = lambda _: ""
) -> tuple[Any, str]:
    """Return the GPU to use, and a text with all of them.

    Args:
        found: Platforms and GPUs, the default one first.
        kind: Name of such GPUs in the plural.
        features: Returns what the text says of a GPU beside its name and driver.

    Raises:
        DeviceError: The environment names none or several of them.
    """
    texts = [
        f"{device.name.strip()} ({platform.strip()} {device.driver_version.strip()}{features(device)})"
        for platform, device in found
    ]
    variable = next((name for name in GPU_VARIABLES if os.environ.get(name, "").strip()), GPU_VARIABLES[0])
    number = _number(variable, texts, kind)
    if len(texts) == 1:
        return found[0][1], texts[0]
    others = "; ".join(f"{other}: {text}" for other, text in enumerate(texts) if other != number)
    return found[number][1], f"{number}: {texts[number]}; {variable} can choose {others}"


def _number(variable: str, texts: Sequence[str], kind: str) -> int:
    wanted = os.environ.get(variable, "").strip()
    if not wanted:
        return 0
    if wanted.isascii() and wanted.isdigit() and int(wanted) < len(texts):
        return int(wanted)
    matches = [number for number, text in enumerate(texts) if wanted.lower() in text.lower()]
    if len(matches) != 1:
        every = "; ".join(f"{number}: {text}" for number, text in enumerate(texts))
        raise DeviceError(
            f"{variable} is {wanted!r:.80}, which names {len(matches)} of the {kind} here ({every}).",
            fix="Set it to one of these numbers, or unset it.",
        )
    return matches[0]


def find_gpus(split: ThreadSplit | None = None, vendor: str = "") -> tuple[Any, str]:
    """Return the GPU to use, and a text with all of them.

    GPUs with memory of their own come first, then those with most compute units, Microsoft's OpenCL last.

    Args:
        split: As of :func:`heterollm.kernels.devices.runtimes.opencl_devices`.
        vendor: The only vendor; empty for any.

    Raises:
        DeviceError: There is none, or the environment names none.
    """
    devices = opencl_devices(split)
    from heterollm.kernels.gpu import gpu_features, is_cpu

    found = [
        (name, device)
        for name, device in devices
        if not is_cpu(device) and vendor.lower() in device.vendor.lower()
    ]
    if not found:
        seen = ", ".join(device.name.strip() for _, device in devices) or "none"
        raise DeviceError(
            f"No {f'{vendor} ' if vendor else ''}GPU among the OpenCL devices ({seen}).",
            fix="Install the OpenCL driver of the GPU's vendor. " + see("a-gpu-is-not-listed"),
        )

    def rank(entry: tuple[str, Any]) -> tuple[bool, bool, int]:
        name, device = entry
        return is_translated(name, device), bool(device.host_unified_memory), -device.max_compute_units

    found.sort(key=rank)
    return choose_gpu(found, "GPUs", lambda device: f"; {gpu_features(device)}")
