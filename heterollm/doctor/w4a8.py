"""The doctor's checks of precision ``w4a8``: inputs rounded to int8, and the same way on both parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from heterollm.doctor.case import COLUMNS, SEED, Case
from heterollm.kernels.cases import Numbers, fill_slot, run_launches, slot_values
from heterollm.kernels.device import Device
from heterollm.kernels.formats import LinearWeight, random_weight, reference
from heterollm.kernels.gpu import GpuLinear
from heterollm.kernels.npu import GraphForm, LinearShard, NpuBackend
from heterollm.kernels.ops import WeightFormat

__all__ = ["AGREEMENT", "w4a8_cases"]

FORMATS: Final = (WeightFormat(4, 32), WeightFormat(8, 32))
"""Of the layers and of the head."""

AGREEMENT: Final = "w4a8, both parts agree"
ROWS: Final = 256
LENGTHS: Final = (1, 32)


def w4a8_cases(device: Device) -> Iterator[Case]:
    """Yield each part against the oracle with rounded inputs, and the NPU against the GPU.

    A device whose NPU rounds no inputs refuses the precision whatever the plan, and its rows say so; the
    GPU's are run all the same.
    """
    for number_format in FORMATS:
        operator = f"linear {number_format}, w4a8"
        for length in LENGTHS:
            yield Case("GPU", operator, _tokens(length), _gpu_against_oracle(device, number_format, length))
        if device.npu is not None:
            yield from _npu_cases(device, device.npu, number_format, operator)


def _npu_cases(device: Device, npu: NpuBackend, number_format: WeightFormat, operator: str) -> Iterator[Case]:
    offered = {
        length: npu.forms(number_format, columns=COLUMNS, length=length, integer_inputs=True)
        for length in npu.standard_lengths
    }
    if not any(offered.values()):
        reason = f"cannot: {npu.name} has float activations only, so {device.name} refuses w4a8"
        yield Case("NPU", operator, "", None, reason)
        yield Case("NPU", AGREEMENT, str(number_format), None, reason)
        return
    for length in (length for length in LENGTHS if length in offered):
        for form in offered[length]:
            case = f"{form}, {_tokens(length)}"
            yield Case("NPU", operator, case, _npu_against_oracle(npu, number_format, length, form))
            agreement = _npu_against_gpu(device, npu, number_format, length, form)
            yield Case("NPU", AGREEMENT, f"{number_format}, {case}", agreement)


def _gpu_against_oracle(device: Device, number_format: WeightFormat, length: int) -> Callable[[], Numbers]:
    def run() -> Numbers:
        weight, x = _data(number_format, length, device.activation_dtype)
        return _on_gpu(device, weight, x), _exact(weight, x, number_format)

    return run


def _npu_against_oracle(
    npu: NpuBackend, number_format: WeightFormat, length: int, form: GraphForm
) -> Callable[[], Numbers]:
    def run() -> Numbers:
        weight, x = _data(number_format, length, npu.activation_dtype)
        return _on_npu(npu, weight, x, form), _exact(weight, x, number_format)

    return run


def _npu_against_gpu(
    device: Device, npu: NpuBackend, number_format: WeightFormat, length: int, form: GraphForm
) -> Callable[[], Numbers]:
    def run() -> Numbers:
        weight, x = _data(number_format, length, npu.activation_dtype)
        return _on_npu(npu, weight, x, form), _on_gpu(device, weight, x).astype(np.float64)

    return run


def _data(
    number_format: WeightFormat, length: int, dtype: np.dtype[Any]
) -> tuple[LinearWeight, NDArray[Any]]:
    generator = np.random.default_rng(SEED)
    weight = random_weight(generator, ROWS, COLUMNS, number_format)
    return weight, generator.standard_normal((length, COLUMNS), np.float32).astype(dtype)


def _exact(weight: LinearWeight, x: NDArray[Any], number_format: WeightFormat) -> NDArray[np.float64]:
    return reference.linear(reference.round_inputs(x, number_format.block), [weight])


def _on_gpu(device: Device, weight: LinearWeight, x: NDArray[Any]) -> NDArray[Any]:
    linear = GpuLinear.pack(device.gpu, [weight], activation_dtype=x.dtype, integer_inputs=True)
    y = device.gpu.shared((len(x), ROWS), x.dtype)
    run_launches(device.gpu, [linear.launch(fill_slot(device.gpu, x), y, tokens=len(x), label="doctor")])
    return slot_values(y)


def _on_npu(npu: NpuBackend, weight: LinearWeight, x: NDArray[Any], form: GraphForm) -> NDArray[Any]:
    y = np.zeros((len(x), ROWS), x.dtype)
    part = LinearShard(weight, 0, "doctor", ((0, ROWS),), f"doctor w4a8 {SEED}", integer_inputs=True)
    npu.prepare(part, len(x), form).bind(x, y)()
    return y


def _tokens(length: int) -> str:
    return f"{length} token{'s' * (length > 1)}"
