"""The doctor's checks of the GPU operators between the linear layers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from heterollm.doctor.case import SEED, DoctorCase
from heterollm.kernels.device import Device
from heterollm.kernels.gpu import GlueKernels
from heterollm.kernels.operators import Numbers, OperatorCheck, check_case, operator_checks


def gpu_layer_cases(device: Device) -> Iterator[DoctorCase]:
    """Yield the checks of all operators, with split inputs where one reads a linear layer's output."""
    kernels = GlueKernels(device.gpu, device.activation_dtype, device.cache_dtype)
    for check in operator_checks():
        yield DoctorCase("GPU", check.operator, check.title, partial(_numbers, kernels, check))


def _numbers(kernels: GlueKernels, check: OperatorCheck) -> Numbers:
    return check_case(check.case, kernels, np.random.default_rng(SEED))[check.output]
