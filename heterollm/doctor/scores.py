"""The doctor's checks of attention scores on the NPU, in graphs of one and several heads without weights."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.doctor.case import DoctorCase, Seen
from heterollm.kernels.npu import NpuBackend
from heterollm.kernels.operators import ScoresCase

SCORES: Final = "attention scores, 8 bits"
LARGEST_FRACTION: Final = 0.01
"""Codes that may differ from the exact ones, by one: on the emulator 1 of 2000 does, between two codes."""

FIX: Final = (
    "Update onnxruntime, onnxruntime-qnn and the NPU driver. Only sparse attention needs such graphs."
)


def score_cases(npu: NpuBackend) -> Iterator[DoctorCase]:
    """Yield graphs of one, two and four heads; an NPU without such a form says so."""
    for heads in (1, 2, 4):
        case = ScoresCase(heads, tokens=32, keys=256, head_dim=64)
        if npu.forms(case.data()[0].shape, case.tokens):
            yield DoctorCase("NPU", SCORES, str(case), partial(_scores, npu, case))
        else:
            yield DoctorCase("NPU", SCORES, str(case), None, f"{npu.name} has no such graph")


def _scores(npu: NpuBackend, case: ScoresCase) -> Seen:
    return code_differences(*case.on_npu(npu), fix=FIX)


def code_differences(found: NDArray[Any], exact: NDArray[Any], *, fix: str) -> Seen:
    """Compare codes with the exact ones: few may differ, by one."""
    differences = np.abs(found.astype(np.int64) - exact)
    fraction, largest = float((differences > 0).mean()), int(differences.max())
    message = f"{fraction:.1%} of the codes differ, by {largest} at most"
    return Seen(fraction <= LARGEST_FRACTION and largest <= 1, message, fix)
