"""The doctor's checks of contexts whose graphs share weights, and of memory without copies."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Final

from heterollm.base import see
from heterollm.doctor.case import DoctorCase, Seen
from heterollm.kernels.device import Device
from heterollm.kernels.npu import ContextPackager
from heterollm.kernels.sync import SharedArenas

CONTEXTS: Final = "lengths with shared weights"
MEMORY: Final = "memory shared with the GPU"
FIX: Final = "heterollm uses contexts of one graph; update onnxruntime-qnn and the NPU driver. " + see(
    "contexts-with-shared-weights"
)


def context_cases(device: Device) -> Iterator[DoctorCase]:
    """Yield the self-tests of a context of two lengths, and of shared memory, in child processes."""
    packager = device.packager
    if packager is not None:
        yield DoctorCase("NPU", CONTEXTS, "2 lengths", functools.partial(_sharing, packager))

    arenas = device.arenas
    if arenas is not None:
        if arenas.offered:
            yield DoctorCase("NPU", MEMORY, "each edge", functools.partial(_memory, arenas))
        else:
            yield DoctorCase("NPU", MEMORY, "", None, f"inputs and outputs are {arenas.edges}")


def _memory(arenas: SharedArenas) -> Seen:
    # Without it values are copied, which is slower and as right.
    edges = arenas.test()
    return Seen(True, f"inputs and outputs of graphs: {edges}", verified=edges.usable)


def _sharing(packager: ContextPackager) -> Seen:
    verdict = packager.test_sharing()
    message = verdict.reason
    if verdict.status == "pass":
        message += "; the library counts a buffer of all graphs once"
        if not verdict.reuses_io:
            message = f"{verdict.reason}; buffers of all graphs count for each: {verdict.io_reason}"
    return Seen(verdict.status != "fail", message, FIX, verified=verdict.status == "pass")
