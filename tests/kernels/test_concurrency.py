"""Both parts of a cut operator run at once, by the timestamps of the OpenCL events and of the NPU's call.

In a process of its own, where the device can give each part its own core.
"""

import json
import subprocess
import sys

import pytest

CASES = [[kind, eighths] for kind in ("row", "sequence") for eighths in (2, 4, 6)]

MEASURE = """
import json
import sys
import time

import numpy as np

from heterollm.base.errors import DeviceError
from heterollm.kernels.open import open_device
from heterollm.kernels.gpu.linear import GpuLinear
from heterollm.kernels.npu import LinearShard
from heterollm.kernels.formats.quantisation import quantize
from heterollm.kernels.formats.quantized_tensor import take_rows
from heterollm.kernels.formats.tolerances import linear_errors

SIZE, TOKENS, ATTEMPTS = 2048, 64, 40
generator = np.random.default_rng(0)
try:
    device = open_device("host", profiling=True)
except DeviceError as error:
    print(json.dumps(error.message))
    sys.exit()
device.pin()
gpu, npu = device.gpu, device.npu
weight = quantize(
    generator.standard_normal((SIZE, SIZE)).astype(np.float32) / SIZE**0.5, bits=4, block=32, symmetric=True
)
linear = GpuLinear.pack(gpu, [weight], activation_dtype=np.float32)
floats = weight.dequantize().astype(np.float64)


def clock_offset_ns(launch):
    # A kernel that is waited for lies between its call and the end of the wait, on either clock.
    lows, highs = [], []
    for _ in range(10):
        before = time.perf_counter_ns()
        event = launch()
        gpu.finish()
        lows.append(event.profile.end - time.perf_counter_ns())
        highs.append(event.profile.start - before)
    assert max(lows) <= min(highs)
    return (max(lows) + min(highs)) // 2


def measure(kind, eighths):
    # A row cut gives the NPU some of the rows; a sequence cut the first 64 tokens, the GPU 16 to 48 more.
    rows = SIZE * eighths // 8 if kind == "row" else SIZE
    tokens = TOKENS if kind == "row" else TOKENS + TOKENS * eighths // 8
    x = gpu.shared((tokens, SIZE), np.float32)
    x.array[:] = generator.standard_normal(x.array.shape)
    npu_y = gpu_y = gpu.shared((tokens, rows), np.float32)
    if kind == "row":
        gpu_y = gpu.shared((tokens, SIZE - rows), np.float32)
        launch = linear.launch(x, gpu_y, tokens=tokens, kept=((rows, SIZE),), label="gpu part")
    else:
        launch = linear.launch(x, npu_y, tokens=tokens - TOKENS, first_token=TOKENS, label="gpu part")
    part = LinearShard(take_rows(weight, [(0, rows)]), 0, "o", ((0, rows),), "concurrency")
    call = npu.prepare(part, TOKENS).bind(x.array[:TOKENS], npu_y.array[:TOKENS])
    call()
    offset = clock_offset_ns(launch)
    best = 0.0
    # On a machine that is busy otherwise a part may have to wait for a core; one attempt must show both.
    for _ in range(ATTEMPTS):
        npu_y.array.fill(0)
        gpu_y.array.fill(0)
        event = launch()
        gpu.flush()
        start = time.perf_counter_ns()
        call()
        stop = time.perf_counter_ns()
        gpu.finish()
        first, last = event.profile.start - offset, event.profile.end - offset
        together = min(last, stop) - max(first, start)
        best = max(best, together / min(last - first, stop - start))
        if best > 0.5:
            break
    actual = np.hstack([npu_y.array, gpu_y.array]) if kind == "row" else npu_y.array
    return best, linear_errors(actual, x.array.astype(np.float64) @ floats.T).within("fp32")


print(json.dumps([measure(*case) for case in json.loads(sys.argv[1])]))
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """For each case the largest fraction of the shorter part in which both ran, and whether it was right."""
    folder = tmp_path_factory.mktemp("concurrency")
    (folder / "measure.py").write_text(MEASURE)
    command = [sys.executable, "-P", "measure.py", json.dumps(CASES)]
    child = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert child.returncode == 0, child.stderr
    results = json.loads(child.stdout)
    if isinstance(results, str):
        pytest.skip(f"needs the host device: {results}")
    return {tuple(case): result for case, result in zip(CASES, results, strict=True)}


@pytest.mark.parametrize(("kind", "eighths"), CASES)
def test_both_parts_run_at_once(measured, kind, eighths):
    fraction, right = measured[kind, eighths]
    assert right
    assert fraction > 0.5
