"""What a GPU launch has to do, in numbers: a simulated GPU takes its time from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from heterollm.kernels.soc.gpu_model import GpuWork

__all__ = ["Demand", "GpuWork"]

Demand: TypeAlias = GpuWork | Callable[[], GpuWork]
"""The work of a launch, or a call that returns it where it depends on the step: attention reads as many
positions as the session holds."""
