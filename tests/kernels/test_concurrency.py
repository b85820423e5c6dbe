"""Both parts of a cut operator run at once, by the timestamps of the OpenCL events and of the NPU's call."""

import time

import numpy as np
import pytest

from heterollm.kernels.gpu_linear import GpuLinear
from heterollm.kernels.npu import NpuSlice
from heterollm.kernels.npu_host import HostNpu
from heterollm.kernels.opencl_runtime import OpenClRuntime, list_opencl_devices
from heterollm.kernels.quantize import quantize
from heterollm.kernels.quantized_tensor import take_rows
from heterollm.kernels.tolerances import linear_errors

SIZE = 2048
TOKENS = 64
ATTEMPTS = 30
"""On a machine that is busy otherwise a part may have to wait for a core; one attempt must show both."""


@pytest.fixture(scope="module")
def profiled(runtime):
    """The same device as everywhere, with timestamps on its events."""
    device = next(device for _, device in list_opencl_devices() if device.name.strip() == runtime.traits.name)
    return OpenClRuntime(device, profiling=True)


@pytest.fixture(scope="module")
def weight():
    values = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32) / SIZE**0.5
    return quantize(values, bits=4, block=32, symmetric=True)


def clock_offset_ns(runtime, launch):
    """Return how far the clock of events is ahead: a launch lies between its call and the wait for it."""
    bounds = []
    for _ in range(10):
        before = time.perf_counter_ns()
        event = launch()
        runtime.finish()
        after = time.perf_counter_ns()
        bounds.append((event.profile.end - after, event.profile.start - before))
    low, high = max(low for low, _ in bounds), min(high for _, high in bounds)
    assert low <= high
    return (low + high) // 2


def overlap(first, second):
    return max(0, min(first[1], second[1]) - max(first[0], second[0]))


@pytest.mark.parametrize("kind", ["row", "sequence"])
@pytest.mark.parametrize("eighths", [2, 4, 6])
def test_both_parts_run_at_once(profiled, weight, kind, eighths):
    linear = GpuLinear.pack(profiled, [weight], activation_dtype=np.float32)
    rows = SIZE * eighths // 8 if kind == "row" else SIZE
    # Of a sequence cut the NPU takes one standard length, the GPU a quarter, a half or three quarters more.
    tokens = TOKENS if kind == "row" else TOKENS + TOKENS * eighths // 8
    npu = HostNpu()
    part = NpuSlice(take_rows(weight, [(0, rows)]), 0, "o", ((0, rows),), "concurrency")
    x = profiled.shared((tokens, SIZE), np.float32)
    x.array[:] = np.random.default_rng(1).standard_normal(x.array.shape)
    npu_y = profiled.shared((tokens, rows), np.float32)
    gpu_y = npu_y
    if kind == "row":
        gpu_y = profiled.shared((tokens, SIZE - rows), np.float32)
        launch = linear.launch(x, gpu_y, tokens=tokens, kept=((rows, SIZE),), label="gpu part")
    else:
        launch = linear.launch(x, npu_y, tokens=tokens - TOKENS, first_token=TOKENS, label="gpu part")
    call = npu.prepare(part, TOKENS).bind(x.array[:TOKENS], npu_y.array[:TOKENS])
    launch()
    call()
    profiled.finish()
    offset = clock_offset_ns(profiled, launch)
    best = 0.0
    for _ in range(ATTEMPTS):
        npu_y.array.fill(0)
        gpu_y.array.fill(0)
        event = launch()
        profiled.flush()
        start = time.perf_counter_ns()
        call()
        stop = time.perf_counter_ns()
        profiled.finish()
        gpu_span = event.profile.start - offset, event.profile.end - offset
        shorter = min(stop - start, gpu_span[1] - gpu_span[0])
        best = max(best, overlap(gpu_span, (start, stop)) / shorter)
        if best > 0.5:
            break
    npu.close()
    assert best > 0.5
    actual = np.hstack([npu_y.array, gpu_y.array]) if kind == "row" else npu_y.array
    expected = x.array.astype(np.float64) @ weight.dequantize().astype(np.float64).T
    assert linear_errors(actual, expected).within("fp32")
