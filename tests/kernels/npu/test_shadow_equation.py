"""Equation 1 of llm.npu: clamped 8-bit inputs on the NPU plus what is beyond them in floats on the GPU."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from heterollm.kernels.formats import concatenate_rows, quantize
from heterollm.kernels.gpu import COUNT_WORDS, DeviceMemory, GlueKernels, NpuCodes, Segments
from heterollm.kernels.npu import LinearRanges, LinearShard, ShadowRanges
from heterollm.kernels.operators.data import fill_slot, run_launches
from heterollm.kernels.operators.logits import join_logits
from heterollm.kernels.operators.npu_codes import read_codes, write_codes
from heterollm.kernels.operators.outliers import (
    HotWeights,
    OutlierList,
    find_outliers,
    found_bytes,
    multiply_outliers,
    outlier_flag_bytes,
)

TOKENS, COLUMNS, MEMBERS = 64, 192, (72, 40)
ROWS = sum(MEMBERS)


def device(runtime, size_bytes):
    return DeviceMemory(runtime.scratch(size_bytes), size_bytes)


def data(seed, channels, factor):
    """An input of which some channels are large, float weights, and their 8-bit codes."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (TOKENS, COLUMNS)).astype(np.float32)
    large = rng.choice(COLUMNS, channels, replace=False)
    x[:, large] *= factor
    floats = (rng.standard_normal((ROWS, COLUMNS)) / np.sqrt(COLUMNS)).astype(np.float32)
    parts = np.split(floats, np.cumsum(MEMBERS)[:-1])
    codes = [quantize(part, bits=8, block=32, scale_kind="tensor") for part in parts]
    return x, floats, concatenate_rows(codes)


def ranges_of(x, floats, limit):
    """Ranges by the maximum, and those of inputs that are clamped at a limit."""

    def outputs(values):
        y = np.abs(values @ floats.T)
        return tuple(float(part.max()) for part in np.split(y, np.cumsum(MEMBERS)[:-1], axis=1))

    whole, clamped = outputs(x), outputs(np.clip(x, -limit, limit))
    shadow = ShadowRanges(limit, max(clamped), clamped)
    return LinearRanges(max(whole), float(np.abs(x).max()), 8, whole, shadow)


def computed(runtime, host, x, floats, weight, ranges, *, shadow):
    """Return the output as the engine's kernels and a graph compute it."""
    own = ranges.of_placement(shadow=shadow)
    glue, outliers = (
        GlueKernels(runtime, np.float32, np.float32),
        GlueKernels(runtime, np.float32, np.float32),
    )
    inputs, outputs = (runtime.shared((TOKENS, width), np.uint8) for width in (COLUMNS, ROWS))
    memory = device(runtime, 4 * TOKENS), device(runtime, 4 * COUNT_WORDS)
    codes = NpuCodes(inputs, outputs, *memory, 0, own.grid, clamps=shadow)
    source, a, b = fill_slot(runtime, x), *(runtime.shared((TOKENS, ROWS), np.float32) for _ in range(2))
    run_launches(runtime, [write_codes(glue, source, codes, tokens=TOKENS, columns=COLUMNS)])
    if shadow:
        place = np.arange(COLUMNS, dtype=np.int32)
        hot = HotWeights(
            *(runtime.upload(np.ascontiguousarray(floats.T)), runtime.upload(place), MEMBERS, COLUMNS),
            *own.grid.limits,
        )
        found = OutlierList(
            device(runtime, outlier_flag_bytes(COLUMNS)),
            runtime.shared((found_bytes(COLUMNS) // 4,), np.int32),
            runtime.shared((2,), np.int32),
        )
        finding = find_outliers(outliers, source, found, hot, tokens=TOKENS)
        product = multiply_outliers(
            outliers, source, found, hot, b, tokens=TOKENS, covered=TOKENS, npu_rows=MEMBERS
        )
        run_launches(runtime, [*finding, product])
    shard = LinearShard(weight, 0, "qkv", tuple((0, rows) for rows in MEMBERS), "equation 1", ranges=own)
    for slot in (inputs, outputs):
        slot.acquire()
    host.prepare(shard, TOKENS, "static_int8").bind({"x": inputs.array}, {"y": outputs.array})()
    for slot in (inputs, outputs):
        slot.release()
    host.release(shard)
    logits = runtime.shared((TOKENS, ROWS), np.float32)
    joined = Segments(a, b, (ROWS,), (ROWS,), join="sum" if shadow else "concatenate")
    run_launches(
        runtime,
        [
            read_codes(glue, codes, a, tokens=TOKENS, member_rows=MEMBERS),
            join_logits(glue, joined, logits, rows=TOKENS),
        ],
    )
    assert not shadow or counted(runtime, codes) == 0
    return logits.read().astype(np.float64)


def counted(runtime, codes):
    """Return the output codes at the end of their range; inputs beyond it do not count."""
    counts = np.empty(COUNT_WORDS, np.uint32)
    runtime.copy(counts, codes.counts.buffer)
    return max(0, int(counts[0]) - int(np.isin(codes.outputs.read(), (0, 255)).sum()))


def bound(x, floats, weight, grid):
    """Return the most by which each output may differ from that in floats.

    With c = clamp(x), the value q of its code and the NPU's weights V, the sum is q V + (x - c) W and the
    rounding of the output. It differs from x W by (q - c) V + c (V - W). The first part is at most half an
    input step for each weight, the second what the rounding of weights makes of the clamped input. The output
    adds half a step; it is within its range but for these parts, so that clipping it adds nothing.
    """
    stored = weight.dequantize().astype(np.float64)
    clamped = np.abs(np.clip(x, *grid.limits)).astype(np.float64)
    inputs = grid.input_step / 2 * np.abs(stored).sum(axis=1)
    weights = clamped @ np.abs(stored - floats).T
    outputs = np.repeat(grid.member_steps, MEMBERS) / 2
    return inputs + weights + outputs


@given(seed=st.integers(0, 1 << 20), channels=st.integers(0, 12), factor=st.sampled_from([2.0, 30.0, 1000.0]))
def test_the_sum_is_the_float_result_to_the_rounding_of_8_bits(runtime, host, seed, channels, factor):
    x, floats, weight = data(seed, channels, factor)
    ranges = ranges_of(x, floats, 1.0)
    exact = x.astype(np.float64) @ floats.T.astype(np.float64)
    y = computed(runtime, host, x, floats, weight, ranges, shadow=True)
    grid = ranges.of_placement(shadow=True).grid
    # Half a step of the output is that of exact sums, and the products of outliers are those of float32.
    slack = 0.01 * np.repeat(grid.member_steps, MEMBERS) + 1e-5 * np.abs(x).max()
    assert np.all(np.abs(y - exact) <= bound(x, floats, weight, grid) + slack)


def test_without_the_shadow_outliers_cost_what_the_bound_excludes(runtime, host):
    x, floats, weight = data(1, 6, 100.0)
    ranges = ranges_of(x, floats, 1.0)
    exact = x.astype(np.float64) @ floats.T.astype(np.float64)

    def error(shadow):
        y = computed(runtime, host, x, floats, weight, ranges, shadow=shadow)
        return np.square(y - exact).sum()

    # The step of the input is 100 times as large.
    assert error(shadow=False) > 100 * error(shadow=True)
