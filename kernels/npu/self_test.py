"""The test of an NPU when it is opened: one small linear, against float64."""

from __future__ import annotations

import numpy as np

from heterollm.base import DeviceError, see
from heterollm.kernels.formats import linear_errors
from heterollm.kernels.npu.protocol import NpuBackend
from heterollm.kernels.npu.small_shard import exact_product, small_shard

TOKENS = 32


def check_small_linear(npu: NpuBackend, software: str) -> None:
    """Run a small linear with 4-bit weights.

    Args:
        npu: The NPU.
        software: Package of the NPU, which the advice names beside its driver.

    Raises:
        DeviceError: It computes wrong numbers.
        GraphError: The graph does not compile or run.
    """
    shard = small_shard("self_test")
    x = np.random.default_rng(1).standard_normal((TOKENS, shard.columns)).astype(npu.activation_dtype)
    y = np.zeros((TOKENS, shard.rows), npu.activation_dtype)
    npu.prepare(shard, TOKENS).bind({"x": x}, {"y": y})()
    errors = linear_errors(y, exact_product(shard, x))
    if not errors.within("fp16"):
        raise DeviceError(
            f"{npu.name} computes wrong numbers: NMSE {errors.nmse:.1e} on the self-test.",
            fix=f"Update the NPU driver and {software}. {see('a-part-computes-wrong-numbers')}",
        )
