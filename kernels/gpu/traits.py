"""Properties of a GPU as its driver reports them."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from heterollm.base import MIB
from heterollm.kernels.gpu.tuning import DeviceIdentity

DEFAULT_CACHE_BYTES: Final = 32 * MIB
"""Assumed size if unknown: that of laptops, more than any phone's system-level cache."""

SYSFS: Final = Path("/sys/devices/system/cpu/cpu0/cache")
UNITS: Final = {"K": 1024, "M": MIB}


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """Properties of an OpenCL device, and the size of the last cache before memory."""

    name: str
    platform: str
    version: str
    driver: str
    is_cpu: bool
    has_half: bool
    has_subgroups: bool
    has_integer_dot: bool
    has_matrix: bool
    compute_units: int
    max_work_group: int
    max_buffer_bytes: int
    global_bytes: int
    local_bytes: int
    cache_bytes: int
    image_texels: int
    """Texels of the largest image over a buffer; 0 without images."""
    coherent: bool
    extensions: tuple[str, ...]

    def identity(self, target: str | None = None) -> DeviceIdentity:
        """Return the key of tuned parameters; ``target`` is the processor that code is compiled for."""
        limits = self.compute_units, self.max_work_group, self.local_bytes
        driver = self.driver if target is None else f"{self.driver} for {target}"
        features = int(self.has_subgroups), int(self.image_texels > 0)
        return DeviceIdentity(self.name, self.platform, *limits, driver, *features)


@functools.cache
def host_cache_bytes(folder: Path = SYSFS) -> int:
    """Return the size of the host's largest cache, as Linux reports it; 32 MiB where it does not."""
    sizes = []
    for path in folder.glob("index*/size"):
        try:
            text = path.read_text("ascii").strip()
            sizes.append(int(text[:-1]) * UNITS[text[-1]])
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return max(sizes, default=DEFAULT_CACHE_BYTES)
