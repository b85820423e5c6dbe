"""Snapdragon SoCs by Qualcomm's number, which is part of the key of compiled graphs.

The numbers are the ``QNN_SOC_MODEL_*`` values of the SDK's ``QnnTypes.h``.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["SOCS", "Soc", "this_soc"]


@dataclass(frozen=True, slots=True)
class Soc:
    """A Snapdragon with a Hexagon.

    Args:
        model: Qualcomm's number, as text, as QNN's options want it.
        machine: Linux's name for it in ``/sys/devices/soc0/machine``.
        name: Product name.
        architecture: Version of the Hexagon.
    """

    model: str
    machine: str
    name: str
    architecture: int


SOCS: Final[Mapping[str, Soc]] = {
    soc.model: soc
    for soc in (
        Soc("30", "SM8350", "Snapdragon 888", 68),
        Soc("36", "SM8450", "Snapdragon 8 Gen 1", 69),
        Soc("37", "SC8280X", "Snapdragon 8cx Gen 3", 68),
        Soc("42", "SM8475", "Snapdragon 8+ Gen 1", 69),
        Soc("43", "SM8550", "Snapdragon 8 Gen 2", 73),
        Soc("57", "SM8650", "Snapdragon 8 Gen 3", 75),
        Soc("60", "SC8380XP", "Snapdragon X Elite", 73),
        Soc("69", "SM8750", "Snapdragon 8 Elite", 79),
        Soc("87", "SM8850", "Snapdragon 8 Elite Gen 5", 81),
    )
}
"""Known SoCs by number."""


def this_soc() -> str:
    """Return Qualcomm's number of this machine's SoC, or the system's name for an unknown one."""
    try:
        machine = Path("/sys/devices/soc0/machine").read_text().strip()
    except OSError:  # not Linux, or a kernel that does not say
        machine = platform.processor() or platform.machine()
    return next((soc.model for soc in SOCS.values() if machine.upper().startswith(soc.machine)), machine)
