"""Codes for integer NPU graphs: kernels give the bits of the NumPy oracle, and count ends of ranges."""

import dataclasses

import numpy as np
import pytest

from heterollm.base import KernelError
from heterollm.kernels.formats import LARGEST_CODE, CodeGrid, largest_code
from heterollm.kernels.gpu import COUNT_WORDS, DeviceMemory, GlueKernels, NpuCodes
from heterollm.kernels.operators.data import fill_slot
from heterollm.kernels.operators.norm import rms_norm
from heterollm.kernels.operators.npu_codes import read_codes, write_codes

PER_TOKEN = CodeGrid(1 / LARGEST_CODE, 3 / LARGEST_CODE, per_token=True)
STATIC = CodeGrid(6 / LARGEST_CODE, 0.7 / LARGEST_CODE, per_token=False)
STATIC_8_BITS = CodeGrid(6 / 127, 0.7 / 127, per_token=False, bits=8)
MEMBERS = dataclasses.replace(STATIC_8_BITS, member_steps=(0.7 / 127, 0.1 / 127, 0.3 / 127, 0.5 / 127))
GRIDS = pytest.mark.parametrize(
    "grid", [PER_TOKEN, STATIC, STATIC_8_BITS, MEMBERS], ids=["per token", "static", "8 bits", "members"]
)
PLACE = COUNT_WORDS


def codes_for(runtime, grid, tokens, columns, rows):
    scratch = [DeviceMemory(runtime.scratch(size), size) for size in (4 * tokens, 2 * 4 * COUNT_WORDS)]
    inputs, outputs = (runtime.shared((tokens, width), grid.dtype) for width in (columns, rows))
    return NpuCodes(inputs, outputs, *scratch, PLACE, grid)


def factors_and_counts(runtime, codes):
    factors = np.empty(codes.factors.size_bytes // 4, np.float32)
    counts = np.empty(2 * COUNT_WORDS, np.uint32)
    runtime.copy(factors, codes.factors.buffer)
    runtime.copy(counts, codes.counts.buffer)
    return factors, counts


def activations(tokens, columns, dtype):
    """Rows of very unlike sizes with outlier channels, a row of zeros and one too small for its factor."""
    rng = np.random.default_rng(tokens * columns)
    x = rng.standard_normal((tokens, columns)) * np.exp2(rng.integers(-6, 2, (tokens, 1)))
    x[:, ::97] *= 50
    x[tokens // 2] = 0
    x[tokens // 3] = 1e-38
    return x.astype(dtype)


@pytest.mark.parametrize("style", ["vector", "simt"])
@GRIDS
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_the_kernels_give_the_bits_of_the_oracle(runtime, style, grid, dtype):
    layers = GlueKernels(runtime, dtype, dtype, style=style)
    for tokens, columns, rows in ((1, 256, 96), (5, 1352, 2051), (33, 64, 8)):
        x = activations(tokens, columns, dtype)
        codes = codes_for(runtime, grid, tokens, columns, rows)
        write_codes(layers, fill_slot(runtime, x), codes, tokens=tokens, columns=columns)()
        runtime.finish()
        expected, factors = grid.codes(x)
        np.testing.assert_array_equal(codes.inputs.read(), expected)
        got_factors, counts = factors_and_counts(runtime, codes)
        np.testing.assert_array_equal(got_factors, factors)
        steps = np.abs(x.astype(np.float32) * np.float32(1 / grid.input_step))
        outside = 0 if grid.per_token else int((steps > largest_code(grid.bits)).sum())
        assert grid.per_token or outside or tokens == 1
        assert counts.tolist() == [0, 0, outside, 0]

        last = (1 << grid.bits) - 1
        outputs = np.random.default_rng(1).integers(0, last, (tokens, rows), endpoint=True).astype(grid.dtype)
        outputs[0, [0, -1]] = 0, last
        codes.outputs.write(outputs)
        y = runtime.shared((tokens, rows), dtype)
        # The second member begins within eight columns.
        members = (
            (rows // 3, rows // 4, 1, rows - rows // 3 - rows // 4 - 1) if grid.member_steps else (rows,)
        )
        read_codes(layers, codes, y, tokens=tokens, member_rows=members)()
        runtime.finish()
        np.testing.assert_array_equal(y.read(), grid.values(outputs, factors, members).astype(dtype))
        ends = int(((outputs == 0) | (outputs == last)).sum())
        assert factors_and_counts(runtime, codes)[1].tolist() == [0, 0, outside + ends, tokens]


@pytest.mark.parametrize("style", ["vector", "simt"])
@GRIDS
def test_a_norm_writes_the_codes_of_its_output(runtime, style, grid):
    layers = GlueKernels(runtime, np.float16, np.float16, style=style)
    hidden, tokens = 392, 3
    residual = activations(tokens, hidden, np.float32)
    weight = runtime.upload(np.random.default_rng(2).uniform(0.5, 2, hidden).astype(np.float32))
    plain, fused = (codes_for(runtime, grid, tokens, hidden, 8) for _ in range(2))
    out = runtime.shared((tokens, hidden), np.float16)
    options = {"hidden": hidden, "tokens": tokens, "epsilon": 1e-5}
    rms_norm(layers, fill_slot(runtime, residual), weight, out, **options, rounded=fused)()
    write_codes(layers, out, plain, tokens=tokens, columns=hidden)()
    runtime.finish()
    np.testing.assert_array_equal(fused.inputs.read(), plain.inputs.read())
    np.testing.assert_array_equal(plain.inputs.read(), grid.codes(out.read())[0])
    for one, other in zip(*(factors_and_counts(runtime, codes) for codes in (fused, plain)), strict=True):
        np.testing.assert_array_equal(one, other)


def test_slots_that_do_not_fit_are_refused(runtime):
    layers = GlueKernels(runtime, np.float32, np.float32)
    codes = codes_for(runtime, STATIC, 2, 64, 8)
    x = runtime.shared((8, 64), np.float32)
    with pytest.raises(KernelError, match="code slot has 256 bytes"):
        write_codes(layers, x, codes, tokens=3, columns=64)
    with pytest.raises(KernelError, match="factor slot has 8 bytes"):
        write_codes(layers, x, codes, tokens=4, columns=32)
    with pytest.raises(KernelError, match="not whole eights"):
        write_codes(layers, x, codes, tokens=1, columns=12)
    with pytest.raises(KernelError, match="input slot has 32 bytes"):
        read_codes(layers, codes, x, tokens=2, member_rows=(16,))
