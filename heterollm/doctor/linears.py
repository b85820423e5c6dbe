"""The doctor's checks of linear layers, on each processor and of one against the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Final

from heterollm.doctor.case import DoctorCase
from heterollm.kernels.device import Device
from heterollm.kernels.npu import LinearShape, NpuBackend
from heterollm.kernels.operators import LINEARS, LinearCase

AGREEMENT: Final = "w4a8, GPU and NPU agree"
LENGTHS: Final = (1, 32, 256)
"""Standard lengths to check; each has its own graph."""

LENGTHS_OF_INTEGERS: Final = (32, 64)
"""The same of integer graphs, of 16 bits and of 8."""

PADDING: Final = 5
"""Padded rows of a graph."""


def gpu_linear_cases(device: Device) -> Iterator[DoctorCase]:
    """Yield every number format, for one token and many, whole and split."""
    for case in LINEARS:
        run = partial(case.on_gpu, device.gpu, device.activation_dtype)
        yield DoctorCase("GPU", _operator(case), str(case), run)


def _operator(case: LinearCase) -> str:
    return f"linear {case.weight}{', w4a8' * case.integer_inputs}"


def npu_cases(device: Device, npu: NpuBackend) -> Iterator[DoctorCase]:
    """Yield every number format in every legal form, and at ``w4a8`` the NPU against the GPU.

    A device whose NPU does not round inputs refuses ``w4a8`` for every plan, and its rows say so.
    """
    for case in {(case.weight, case.integer_inputs): case for case in LINEARS}.values():
        yield from _npu_linear(device, npu, replace(case, rows=(256,), kept=None, inputs=None))


def _npu_linear(device: Device, npu: NpuBackend, case: LinearCase) -> Iterator[DoctorCase]:
    # The emulator takes a second for each graph.
    most = 2 if npu.time_kind == "emulated" or case.integer_inputs else 3
    integer = case.integer_inputs
    wanted = LENGTHS_OF_INTEGERS if case.weight.scales == "tensor" else LENGTHS
    lengths = [length for length in npu.standard_lengths if length in wanted][:most]
    shape = LinearShape(case.weight, case.columns, integer)
    legal = {length: npu.forms(shape, length) for length in lengths}
    operator = _operator(case)
    if not any(legal.values()):
        reason = f"cannot: {npu.name} has float activations only, so {device.name} refuses w4a8"
        yield DoctorCase("NPU", operator, "", None, reason if integer else "")
        if integer:
            yield DoctorCase("NPU", AGREEMENT, str(case.weight), None, reason)
    for form in dict.fromkeys(form for forms in legal.values() for form in forms):
        for length in (length for length in lengths if form in legal[length]):
            padded = replace(case, tokens=max(1, length - PADDING))
            name = f"{form}, {length} token{'s' * (length > 1)}"
            yield DoctorCase("NPU", operator, name, partial(padded.on_npu, npu, length, form))
            if integer:
                run = partial(padded.on_both, device.gpu, npu, length, form)
                yield DoctorCase("NPU", AGREEMENT, f"{case.weight}, {name}", run)
