"""The doctor's checks of the GPU operators between the linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import numpy as np

from heterollm.doctor.case import SEED, DoctorCase
from heterollm.kernels.cases import LayerCases, Numbers
from heterollm.kernels.device import Device
from heterollm.kernels.formats import LARGEST_CODE, CodeGrid
from heterollm.kernels.gpu import GpuGlue, GpuOutliers, HeadShape, Scores
from heterollm.kernels.ops import Join
from heterollm.kernels.outlier_cases import OutlierCases

SHAPE: Final = HeadShape(heads=4, kv_heads=2, head_dim=32, capacity=80)
PER_TOKEN: Final = CodeGrid(1 / LARGEST_CODE, 1 / LARGEST_CODE, per_token=True)
STATIC: Final = CodeGrid(8 / LARGEST_CODE, 8 / LARGEST_CODE, per_token=False)
STATIC_8_BITS: Final = CodeGrid(5 / 127, 5 / 127, False, 8, (5 / 127, 3 / 127, 4 / 127))
CAPPED: Final = Scores(SHAPE.head_dim**-0.5, soft_cap=0.5)


def gpu_layer_cases(device: Device) -> Iterator[DoctorCase]:
    """Yield every operator, with split inputs where it reads a linear layer's output."""
    layers = GpuGlue(device.gpu, device.activation_dtype, device.cache_dtype)

    def made(join: Join = "concatenate") -> LayerCases:
        generator = np.random.default_rng(SEED)
        return LayerCases(device.gpu, layers, device.activation_dtype, device.cache_dtype, generator, join)

    yield DoctorCase("GPU", "norm with residual", "5 tokens, split", lambda: made().norm(5, 192, 64)[0])
    yield DoctorCase(
        "GPU", "norm with residual", "normed delta", lambda: made().norm(5, 192, 64, post=True)[0]
    )
    yield DoctorCase(
        "GPU", "final norm", "3 of 5 tokens, split", lambda: made().final_norm(5, 192, 64, head_row=2)[0]
    )
    for member, name in enumerate(("queries", "keys", "values")):
        yield DoctorCase(
            "GPU", "RoPE and KV write", f"7 tokens at 11, split, {name}", _turned(made, member, False)
        )
    for member, name in enumerate(("queries", "keys")):
        yield DoctorCase("GPU", "RoPE and KV write", f"normed heads, {name}", _turned(made, member, True))
    yield DoctorCase("GPU", "attention, prefill", "37 tokens at 11", lambda: made().attention(37, 11, SHAPE))
    yield DoctorCase("GPU", "attention, decode", "1 token at 70", lambda: made().attention(1, 70, SHAPE))
    yield DoctorCase(
        *("GPU", "attention, decode", "1 token at 70, capped"),
        lambda: made().attention(1, 70, SHAPE, scores=CAPPED),
    )
    yield DoctorCase("GPU", "gated activation", "5 tokens, split", lambda: made().gated(5, 160, (64, 64)))
    yield DoctorCase(
        *("GPU", "gated activation", "5 tokens, GELU"),
        lambda: made().gated(5, 160, (64, 64), activation="gelu_tanh"),
    )
    yield DoctorCase("GPU", "soft cap of the logits", "1 row", lambda: made().soft_cap(1, 300, 30.0))
    for grid, name in (
        (PER_TOKEN, "a scale for each token"),
        (STATIC, "static"),
        (STATIC_8_BITS, "static, 8 bits"),
    ):
        yield DoctorCase("GPU", "codes for the NPU", f"5 tokens, {name}", _coded(made, grid))
    yield DoctorCase("GPU", "join of the logits", "3 tokens, split", lambda: made().logits(3, 300, 256))
    outliers = GpuOutliers(device.gpu, device.activation_dtype, device.cache_dtype)

    def product() -> Numbers:
        cases = OutlierCases(device.gpu, outliers, device.activation_dtype, np.random.default_rng(SEED))
        return cases.product(5, 192, (96, 64), (64, 32), channels=9, hot=8)

    yield DoctorCase("GPU", "shadow outliers", "9 of 192 channels", product)
    yield DoctorCase("GPU", "norm with residual", "5 tokens, sum", lambda: made("sum").norm(5, 192, 64)[0])
    yield DoctorCase(
        "GPU", "RoPE and KV write", "7 tokens, sum", lambda: made("sum").rope(7, 11, SHAPE, (64, 32, 0))[0]
    )
    yield DoctorCase("GPU", "gated activation", "5 tokens, sum", lambda: made("sum").gated(5, 160, (64, 64)))
    yield DoctorCase("GPU", "join of the logits", "3 tokens, sum", lambda: made("sum").logits(3, 300, 256))


def _coded(made: Callable[[], LayerCases], grid: CodeGrid) -> Callable[[], Numbers]:
    return lambda: made().codes(5, 192, grid)


def _turned(made: Callable[[], LayerCases], member: int, normed: bool) -> Callable[[], Numbers]:
    """Return a check of the queries (0), the keys (1) or the values (2) that one launch writes."""
    return lambda: made().rope(7, 11, SHAPE, (64, 32, 0), biased=True, normed=normed)[member]
