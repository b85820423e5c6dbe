"""Snapdragon SoCs by Qualcomm's number, which is part of the key of compiled graphs.

Numbers and architectures are those of the SDK (QAIRT 2.51): for each number its emulator logs the name of the
chip and the architecture of its Hexagon. Number 93, which it does not name, is that of
https://github.com/google-ai-edge/LiteRT/pull/8345. Chips whose graphs take no float16 are listed
to be refused by name.
"""

from __future__ import annotations

import contextlib
import importlib
import platform
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from heterollm.base import DeviceError
from heterollm.kernels.npu.qnn_runtime import provider_metadata

SOC_FOLDER: Final = Path("/sys/devices/soc0")
DEVICE_TREE: Final = Path("/proc/device-tree/compatible")
PROCESSOR_KEY: Final = r"HARDWARE\DESCRIPTION\System\CentralProcessor\0"

ANDROID_PROPERTIES: Final = "getprop"
"""Android's program that prints a property of the system."""

PROPERTY_S: Final = 5.0
"""Time that it has."""

FEWEST_BLOCK_ARCHITECTURE: Final = 69
"""Oldest Hexagon that runs MatMulNBits: QNN refuses it elsewhere ("expected >= 69")."""


@dataclass(frozen=True, slots=True)
class Soc:
    """A Snapdragon with a Hexagon.

    Args:
        model: Qualcomm's number, as text, as QNN's options want it.
        names: Names of the chip in system files, drivers and the registry, in upper case, that of the SDK
            first. A longer name that begins with one is the same chip.
        name: Product name.
        architecture: Version of the Hexagon.
        soc_ids: Linux's numbers for it (``dt-bindings/arm/qcom,ids.h``), which are not Qualcomm's above.
        takes_float16: Whether it runs graphs with float16 activations.
    """

    model: str
    names: tuple[str, ...]
    name: str
    architecture: int
    soc_ids: tuple[int, ...] = ()
    takes_float16: bool = True

    @property
    def takes_4_bits(self) -> bool:
        """Whether it runs MatMulNBits: 4-bit weights with float activations."""
        return self.takes_float16 and self.architecture >= FEWEST_BLOCK_ARCHITECTURE

    @property
    def refusal(self) -> str:
        """Why it takes no 4-bit weights with float activations; empty if it does."""
        if self.takes_4_bits:
            return ""
        floats = "only float16 weights with" if self.takes_float16 else "no"
        return (
            f"the Hexagon v{self.architecture} of {self.name} takes {floats} float activations; 4-bit "
            f"weights with float activations need v{FEWEST_BLOCK_ARCHITECTURE} or newer"
        )


SOCS: Final[Mapping[str, Soc]] = {
    soc.model: soc
    for soc in (
        Soc("30", ("SM8350",), "Snapdragon 888", 68, (439,)),
        Soc("36", ("SM8450",), "Snapdragon 8 Gen 1", 69, (457,)),
        Soc("37", ("SC8280X", "8CX GEN 3"), "Snapdragon 8cx Gen 3", 68, (449,), takes_float16=False),
        Soc("42", ("SM8475",), "Snapdragon 8+ Gen 1", 69, (530, 531, 540)),
        Soc("43", ("SM8550", "QCM8550"), "Snapdragon 8 Gen 2", 73, (519, 604)),
        Soc("57", ("SM8650",), "Snapdragon 8 Gen 3", 75, (557,)),
        # X1P-64 and X1P-66 are the same silicon with fewer cores.
        Soc("60", ("SC8380XP", "X1E", "X1P64", "X1P66", "HAMOA"), "Snapdragon X Elite and Plus", 73, (555,)),
        Soc("66", ("QCS8550",), "Dragonwing QCS8550", 73, (603,)),
        Soc("69", ("SM8750",), "Snapdragon 8 Elite", 79, (618, 639)),
        Soc("77", ("QCS9100", "QCS9075", "SA8775P"), "Dragonwing IQ-9 (QCS9100)", 73, (534, 667, 676)),
        Soc("82", ("QCS8300", "QCS8275"), "Dragonwing IQ-8 (QCS8300)", 75, (674, 675)),
        Soc("87", ("SM8850",), "Snapdragon 8 Elite Gen 5", 81, (660,)),
        Soc("88", ("SC8480XP", "X2E", "GLYMUR"), "Snapdragon X2 Elite", 81),
        Soc("92", ("SM8850L",), "Snapdragon SM8850L", 81),
        Soc(
            *("93", ("QCS6490", "QCM6490", "SC7280"), "Dragonwing QCS6490", 68),
            soc_ids=(487, 497, 498),
            takes_float16=False,
        ),
        Soc("94", ("SC8440XP", "X2P", "MAHUA"), "Snapdragon X2 Plus", 81),
        Soc("97", ("SM8845",), "Snapdragon 8 Gen 5", 81),
        # The eight-core chips of the first X series.
        Soc("120", ("SC8340XP", "X1P42", "X1P46", "X126", "PURWA"), "Snapdragon X and X Plus, 8 cores", 73),
    )
}
"""Known SoCs by number."""


def this_soc() -> str:
    """Return Qualcomm's number of this machine's SoC, or the system's name for an unknown one.

    The provider's metadata name the chip on Windows; then come the registry, ``/sys/devices/soc0`` and the
    device tree.
    """
    metadata: tuple[str, ...] = ()
    with contextlib.suppress(DeviceError):
        metadata = provider_metadata()
    texts = tuple(filter(None, _system_texts()))
    known = next(filter(None, map(find_soc, (*metadata, *texts))), None)
    return known.model if known is not None else next(iter(texts), platform.machine())


def find_soc(text: str) -> Soc | None:
    """Return the chip that a text names, such as a processor's or a driver's name; None if it names none."""
    plain = re.sub(r"\((R|TM)\)|[-_]", "", text.upper())
    matches = [
        (len(name), soc)
        for soc in SOCS.values()
        for name in soc.names
        if re.search(rf"(?<![A-Z0-9]){re.escape(name)}", plain)
    ]
    return max(matches, key=lambda match: match[0], default=(0, None))[1]


def _system_texts() -> Iterator[str]:
    """Yield texts of the system that may name the chip, the most reliable first."""
    if platform.system() == "Windows":
        yield from _registry_name()
    if hasattr(sys, "getandroidapilevel"):  # Python before 3.13 calls Android Linux
        yield from _android_property("ro.soc.model")
    with contextlib.suppress(OSError):
        yield (SOC_FOLDER / "machine").read_text("ascii", "replace").strip()
    with contextlib.suppress(OSError, ValueError):
        number = int((SOC_FOLDER / "soc_id").read_text("ascii"))
        yield next((soc.names[0] for soc in SOCS.values() if number in soc.soc_ids), f"soc_id {number}")
    with contextlib.suppress(OSError):
        # The board's name comes first, the chip's last.
        yield " ".join(reversed(DEVICE_TREE.read_text("ascii", "replace").strip("\0").split("\0")))
    yield platform.processor()


def _android_property(name: str) -> Iterator[str]:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = [ANDROID_PROPERTIES, name]
        found = subprocess.run(command, capture_output=True, text=True, timeout=PROPERTY_S, check=True)  # noqa: S603
        yield found.stdout.strip()


def _registry_name() -> Iterator[str]:
    try:
        winreg: Any = importlib.import_module("winreg")
    except ImportError:
        return
    with contextlib.suppress(OSError), winreg.OpenKey(winreg.HKEY_LOCAL_MACHINE, PROCESSOR_KEY) as key:
        yield str(winreg.QueryValueEx(key, "ProcessorNameString")[0])
