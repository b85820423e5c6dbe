"""The test of an NPU when it is opened: one small linear, against float64."""

from __future__ import annotations

import numpy as np

from heterollm.base import DeviceError, see
from heterollm.kernels.formats import QuantizedTensor, linear_errors
from heterollm.kernels.npu.protocol import NpuBackend
from heterollm.kernels.npu.shards import LinearShard

ROWS, COLUMNS, TOKENS, BLOCK = 64, 256, 32, 32


def check_small_linear(npu: NpuBackend, software: str) -> None:
    """Run a small linear with 4-bit weights.

    Args:
        npu: The NPU.
        software: Package of the NPU, which the advice names beside its driver.

    Raises:
        DeviceError: It computes wrong numbers.
        GraphError: The graph does not compile or run.
    """
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 256, (ROWS, COLUMNS // BLOCK, BLOCK // 2), np.uint8)
    scales = generator.uniform(0.01, 0.02, (ROWS, COLUMNS // BLOCK)).astype(np.float16)
    weight = QuantizedTensor(codes, scales, None, 4, BLOCK)
    shard = LinearShard(weight, 0, "self_test", ((0, ROWS),), "self_test")
    x = generator.standard_normal((TOKENS, COLUMNS)).astype(npu.activation_dtype)
    y = np.zeros((TOKENS, ROWS), npu.activation_dtype)
    npu.prepare(shard, TOKENS).bind({"x": x}, {"y": y})()
    errors = linear_errors(y, x.astype(np.float64) @ weight.dequantize().astype(np.float64).T)
    if not errors.within("fp16"):
        raise DeviceError(
            f"{npu.name} computes wrong numbers: NMSE {errors.nmse:.1e} on the self-test.",
            fix=f"Update the NPU driver and {software}. {see('a-part-computes-wrong-numbers')}",
        )
