"""Both shards of a split run at once: the NPU runs its graph while a kernel keeps the GPU busy."""

import numpy as np
import pytest
from faults import Gate

from heterollm.kernels.formats import linear_errors, quantize
from heterollm.kernels.formats.quantized_tensor import take_rows
from heterollm.kernels.gpu import GpuLinear, is_complete
from heterollm.kernels.npu import LinearShard
from heterollm.kernels.operators.data import fill_slot

SIZE, TOKENS = 256, 64


@pytest.fixture(scope="module")
def weight():
    floats = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32) / SIZE**0.5
    return quantize(floats, bits=4, block=32, symmetric=True)


@pytest.mark.parametrize("eighths", [2, 4, 6])
@pytest.mark.parametrize("kind", ["row", "sequence"])
def test_both_shards_run_at_once(host, weight, kind, eighths):
    """A row split gives the NPU some of the rows, a sequence split the first 64 tokens."""
    gpu, npu = host.gpu, host.npu
    rows = SIZE * eighths // 8 if kind == "row" else SIZE
    tokens = TOKENS if kind == "row" else TOKENS + TOKENS * eighths // 8
    linear = GpuLinear.pack(gpu, [weight], activation_dtype=np.float32)
    values = np.random.default_rng(eighths).standard_normal((tokens, SIZE)).astype(np.float32)
    x = fill_slot(gpu, values)
    npu_y = gpu_y = gpu.shared((tokens, rows), np.float32)
    if kind == "row":
        gpu_y = gpu.shared((tokens, SIZE - rows), np.float32)
        launch = linear.launch(x, gpu_y, tokens=tokens, kept=((rows, SIZE),), label="GPU shard")
    else:
        launch = linear.launch(x, npu_y, tokens=tokens - TOKENS, first_token=TOKENS, label="GPU shard")
    shard = LinearShard(take_rows(weight, [(0, rows)]), 0, "o", ((0, rows),), "concurrency")
    call = npu.prepare(shard, TOKENS).bind({"x": x.array[:TOKENS]}, {"y": npu_y.array[:TOKENS]})
    for y in (npu_y, gpu_y):
        y.write(np.nan)
    # A driver may not map memory while the gate is closed.
    x.acquire_to_read()
    npu_y.acquire(TOKENS * rows * npu_y.array.itemsize)
    gate = Gate(gpu)
    # Each kernel stands for some seconds at most: together they stand for a minute.
    gate.close()
    first = gate._launch()
    for _ in range(20):
        gate.close()
    launch()
    gpu.flush()
    call()
    try:
        assert not is_complete(first)
        assert not np.isnan(npu_y.array[:TOKENS]).any()
    finally:
        gate.open()
        npu_y.release()
        x.release()
        gpu.finish()
    actual = np.hstack([npu_y.read(), gpu_y.read()]) if kind == "row" else npu_y.read()
    exact = values.astype(np.float64) @ weight.dequantize().astype(np.float64).T
    assert linear_errors(actual, exact).within("fp32")
