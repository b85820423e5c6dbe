"""What a GPU device reports about itself."""

from __future__ import annotations

from dataclasses import dataclass

from heterollm.kernels.tuning import DeviceIdentity

__all__ = ["DeviceTraits"]


@dataclass(frozen=True, slots=True)
class DeviceTraits:
    """What an OpenCL device reports about itself."""

    name: str
    platform: str
    version: str
    driver: str
    is_cpu: bool
    has_half: bool
    has_subgroups: bool
    has_integer_dot: bool
    compute_units: int
    max_work_group: int
    max_buffer_bytes: int
    global_bytes: int
    local_bytes: int
    coherent: bool
    extensions: tuple[str, ...]

    def identity(self, target: str | None = None) -> DeviceIdentity:
        """Return what tuned kernel parameters are filed under; ``target`` is what the compiler was told."""
        limits = self.compute_units, self.max_work_group, self.local_bytes
        driver = self.driver if target is None else f"{self.driver} for {target}"
        return DeviceIdentity(self.name, self.platform, *limits, driver)
