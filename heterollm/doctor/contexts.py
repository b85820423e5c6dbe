"""The doctor's check of contexts whose graphs share weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Final

from heterollm.base import see
from heterollm.doctor.case import DoctorCase, Seen
from heterollm.kernels.device import Device
from heterollm.kernels.npu import ContextPackager

CONTEXTS: Final = "lengths with shared weights"
FIX: Final = "heterollm uses contexts of one graph; update onnxruntime-qnn and the NPU driver. " + see(
    "contexts-with-shared-weights"
)


def context_cases(device: Device) -> Iterator[DoctorCase]:
    """Yield the self-test of a context of two lengths, in child processes."""
    packager = device.packager
    if packager is not None:
        yield DoctorCase("NPU", CONTEXTS, "2 lengths", functools.partial(_sharing, packager))


def _sharing(packager: ContextPackager) -> Seen:
    verdict = packager.test_sharing()
    message = verdict.reason
    if verdict.status == "pass":
        message += "; the library counts a buffer of all graphs once"
        if not verdict.reuses_io:
            message = f"{verdict.reason}; buffers of all graphs count for each: {verdict.io_reason}"
    return Seen(verdict.status != "fail", message, FIX, verified=verdict.status == "pass")
