import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.base import KernelError
from heterollm.kernels.formats import QuantizedTensor, linear_errors, reference
from heterollm.kernels.gpu import (
    GpuLinear,
    RoundedInputs,
    Variant,
    code_bytes,
    target_for_this_machine,
)
from heterollm.kernels.gpu.launch import ChainedLaunch
from heterollm.kernels.gpu.linear import ROW_ALIGNMENT
from heterollm.kernels.gpu.packing import BLOCKS
from heterollm.kernels.gpu.pocl.target import TARGET_VARIABLE
from heterollm.kernels.gpu.rounding import rounding_launch
from heterollm.kernels.gpu.runtime import POCL_NAME

FORMATS = ["int4", "int4z", "int8", "int8z"]
STYLES = ["vector", "simt"]
GUARD = 0xA5


def make_weight(rng, rows, columns, kind, block):
    bits, groups = int(kind[3]), columns // block
    return QuantizedTensor(
        rng.integers(0, 256, (rows, groups, block * bits // 8), np.uint8),
        rng.uniform(0.001, 0.02, (rows, groups)).astype(np.float16),
        rng.integers(0, 256, (rows, -(-groups * bits // 8)), np.uint8) if kind.endswith("z") else None,
        bits,
        block,
    )


def compute(runtime, members, x, *, first_token=0, kept=None, style=None, output_dtype=None):
    """Run one launch on slots whose other bytes are NaN (input) and a guard pattern (output)."""
    tokens, columns = x.shape
    packed = GpuLinear.pack(runtime, members, activation_dtype=x.dtype, integer_inputs=True)
    rows = sum(stop - start for start, stop in kept or [(0, rows) for rows in packed.member_rows])
    x_slot = runtime.shared((first_token + tokens + 2, columns), x.dtype)
    x_slot.array[:] = np.nan
    x_slot.array[first_token : first_token + tokens] = x
    out = np.dtype(output_dtype or x.dtype)
    y_slot = runtime.shared(((first_token + tokens) * rows * out.itemsize + 4096,), np.uint8)
    y_slot.array[:] = GUARD
    options = {"first_token": first_token, "kept": kept, "output_dtype": output_dtype, "style": style}
    packed.launch(x_slot, y_slot, tokens=tokens, label="test", **options)()
    runtime.finish()
    start, stop = first_token * rows * out.itemsize, (first_token + tokens) * rows * out.itemsize
    assert np.all(y_slot.array[:start] == GUARD), "bytes before the output were written"
    assert np.all(y_slot.array[stop:] == GUARD), "bytes after the output were written"
    return y_slot.array[start:stop].view(out).reshape(tokens, rows).copy()


def check(runtime, members, tokens, rng, dtype=np.float32, *, kept=None, **options):
    x = rng.standard_normal((tokens, members[0].columns)).astype(dtype)
    actual = compute(runtime, members, x, kept=kept, **options)
    rounded = reference.round_inputs(x, members[0].block)
    errors = linear_errors(actual, reference.linear(rounded, members, kept))
    shape = (tokens, [member.format for member in members], kept, options)
    assert errors.within("fp16" if actual.dtype == np.float16 else "fp32"), (shape, errors)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("style", STYLES)
def test_edge_shapes_match_float64_of_the_rounded_inputs(runtime, style, kind):
    rng = np.random.default_rng(1)
    shapes = [(m, 77, 96, 32) for m in (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 33, 64, 129, 257)]
    shapes += [(m, n, 48, 16) for m in (1, 5, 12) for n in (1, 17, 64, 65)]
    shapes += [(m, 33, k, b) for m in (1, 9) for k, b in ((16, 16), (128, 128), (192, 64), (896, 128))]
    for m, n, k, block in shapes:
        check(runtime, [make_weight(rng, n, k, kind, block)], m, rng, style=style)


@pytest.mark.parametrize("style", STYLES)
def test_cuts_members_offsets_and_half_activations(runtime, style):
    rng = np.random.default_rng(2)
    members = [make_weight(rng, n, 96, "int4z", 32) for n in (200, 64, 77)]
    for kept in (((128, 200), (0, 64), (64, 77)), ((64, 129), (0, 0), (0, 1)), None):
        for tokens, first_token in ((1, 3), (6, 1), (40, 0)):
            check(runtime, members, tokens, rng, kept=kept, first_token=first_token, style=style)
    for tokens in (1, 6, 40):
        check(runtime, members, tokens, rng, np.float16, style=style)
    check(runtime, members, 6, rng, np.float16, output_dtype=np.float32, style=style)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_shape_and_cut(runtime, data):
    block = data.draw(st.sampled_from(BLOCKS), label="block")
    columns = block * data.draw(st.integers(1, 512 // block), label="blocks")
    kind = data.draw(st.sampled_from(FORMATS), label="format")
    rows = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=3), label="rows")
    kept = []
    for n in rows:
        start = ROW_ALIGNMENT * data.draw(st.integers(0, (n - 1) // ROW_ALIGNMENT), label="start")
        kept.append((start, data.draw(st.integers(start, n), label="stop")))
    if not any(stop > start for start, stop in kept):
        kept[0] = (0, rows[0])
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    check(
        runtime,
        [make_weight(rng, n, columns, kind, block) for n in rows],
        data.draw(st.integers(1, 140), label="tokens"),
        rng,
        kept=tuple(kept),
        first_token=data.draw(st.integers(0, 3), label="first token"),
        style=data.draw(st.sampled_from(STYLES), label="style"),
    )


def ones_on_the_diagonal(columns, bits, block):
    """A weight that hands the rounded inputs through."""
    middle = 1 << (bits - 1)
    codes = np.full((columns, columns), middle, np.uint8)
    np.fill_diagonal(codes, middle + 1)
    packed = codes[:, 0::2] | codes[:, 1::2] << 4 if bits == 4 else codes
    shape = (columns, columns // block)
    return QuantizedTensor(packed.reshape(*shape, -1), np.ones(shape, np.float16), None, bits, block)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("style", STYLES)
def test_the_rounding_is_the_rule_bit_for_bit(runtime, style, bits):
    rng = np.random.default_rng(3)
    for block in BLOCKS:
        weight = ones_on_the_diagonal(256, bits, block)
        normal = rng.standard_normal((40, 256)) * 10.0 ** rng.uniform(-6, 6, (40, 1))
        halves = rng.integers(-252, 253, (40, 256)) / 2
        halves[:, ::block] = 127
        scaled = halves * rng.uniform(1e-3, 1e3, (40, 1))
        empty = np.zeros((40, 256))
        for values in (normal, halves, scaled, empty):
            x = values.astype(np.float32)
            expected = reference.round_inputs(x, block).astype(np.float32)
            np.testing.assert_array_equal(compute(runtime, [weight], x, style=style), expected)


@pytest.mark.parametrize("style", STYLES)
def test_extreme_codes_do_not_overflow(runtime, style):
    for bits in (4, 8):
        codes = np.full((65, 2, 128 * bits // 8), 255, np.uint8)
        codes[::2] = 0
        for zeros in (None, np.zeros((65, -(-2 * bits // 8)), np.uint8)):
            weight = QuantizedTensor(codes, np.ones((65, 2), np.float16), zeros, bits, 128)
            for tokens in (1, 9):
                for sign in (1.0, -1.0):
                    x = np.full((tokens, 256), sign, np.float32)
                    x[:, 1] = 0.5  # a code of 64 and a sum that is not symmetric
                    exact = reference.linear(reference.round_inputs(x, 128), [weight])
                    assert linear_errors(compute(runtime, [weight], x, style=style), exact).within("fp32")


@pytest.mark.parametrize("kind", ["int4", "int8z"])
@pytest.mark.parametrize("style", STYLES)
def test_tokens_computed_together_give_the_bits_of_each_alone(runtime, style, kind):
    rng = np.random.default_rng(4)
    weight = make_weight(rng, 130, 160, kind, 32)
    x = rng.standard_normal((16, 160)).astype(np.float32)
    alone = np.concatenate([compute(runtime, [weight], x[t : t + 1], style=style) for t in range(16)])
    for tokens in (2, 3, 5, 8):
        np.testing.assert_array_equal(compute(runtime, [weight], x[:tokens], style=style), alone[:tokens])
    errors = linear_errors(compute(runtime, [weight], x, style=style), alone.astype(np.float64))
    assert errors.within("fp32")


def test_launches_of_other_sizes_do_not_disturb_each_other(runtime):
    """They share the memory of the rounded inputs, which grows while earlier launches are still held."""
    rng = np.random.default_rng(5)
    weights = [make_weight(rng, 70, k, "int4", 32) for k in (96, 320)]
    calls = []
    for tokens in (1, 64, 7, 300):
        for weight in weights:
            packed = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32, integer_inputs=True)
            x = runtime.shared((tokens, weight.columns), np.float32)
            y = runtime.shared((tokens, 70), np.float32)
            x.array[:] = rng.standard_normal(x.array.shape)
            exact = reference.linear(reference.round_inputs(x.array, 32), [weight])
            calls.append((packed.launch(x, y, tokens=tokens, label="test"), y, exact))
    for _ in range(2):
        for launch, y, _ in calls:
            y.array[:] = np.nan
            launch()
        runtime.finish()
        for _, y, exact in calls:
            assert linear_errors(y.array, exact).within("fp32")


def test_a_launch_rounds_before_it_multiplies(runtime):
    weight = make_weight(np.random.default_rng(6), 70, 96, "int4", 32)
    x, y = runtime.shared((1, 96), np.float32), runtime.shared((1, 70), np.float32)
    packed = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32, integer_inputs=True)
    launch = packed.launch(x, y, tokens=1, label="3.qkv")
    assert packed.integer_inputs
    assert isinstance(launch, ChainedLaunch)
    assert (launch.label, launch.before.label) == ("3.qkv", "rounding of inputs")
    x.array[:] = np.random.default_rng(7).standard_normal(x.array.shape)
    launch()
    runtime.finish()
    expected = y.array.copy()
    y.array[:] = np.nan
    assert [part.label for part in launch.parts] == ["rounding of inputs", "3.qkv"]
    for part in launch.parts:
        assert not isinstance(part, ChainedLaunch)
        part()
    runtime.finish()
    np.testing.assert_array_equal(y.array, expected)
    plain = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32)
    alone = plain.launch(x, y, tokens=1, label="3.qkv")
    assert not isinstance(alone, ChainedLaunch)
    assert alone.parts == (alone,)


def test_float_weights_take_no_rounded_inputs(runtime):
    weight = np.ones((64, 32), np.float32)
    with pytest.raises(KernelError, match="int8 for f32 weights"):
        GpuLinear.pack(runtime, [weight], activation_dtype=np.float32, integer_inputs=True)


OTHER_PROCESSOR = """
import sys
import numpy as np
from heterollm.kernels.formats import reference
from heterollm.kernels.gpu.linear import GpuLinear
from heterollm.kernels.gpu.runtime import OpenClRuntime, list_opencl_devices
from heterollm.kernels.formats.quantized_tensor import QuantizedTensor
from heterollm.kernels.formats.tolerances import linear_errors
runtime = OpenClRuntime(list_opencl_devices()[0][1])
assert runtime.target == sys.argv[1], runtime.target
rng = np.random.default_rng(0)
for bits, tokens in ((4, 1), (4, 21), (8, 1), (8, 21)):
    codes = rng.integers(0, 256, (100, 3, 64 * bits // 8), np.uint8)
    codes[:10] = 255
    weight = QuantizedTensor(codes, np.ones((100, 3), np.float16), None, bits, 64)
    x, y = runtime.shared((tokens, 192), np.float32), runtime.shared((tokens, 100), np.float32)
    x.array[:] = rng.standard_normal(x.array.shape)
    x.array[0] = 1
    packed = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32, integer_inputs=True)
    packed.launch(x, y, tokens=tokens, label="test", style="vector")()
    runtime.finish()
    errors = linear_errors(y.array, reference.linear(reference.round_inputs(x.array, 64), [weight]))
    assert errors.within("fp32"), (bits, tokens, errors)
"""


NEWER = {"haswell": ("skylake-avx512", "cascadelake"), "skylake-avx512": ("cascadelake",)}


@pytest.mark.parametrize("processor", NEWER)
def test_the_paths_for_older_processors_give_the_same(runtime, processor, tmp_path):
    """They have no instruction for four products, and sum pairs in 16 bits."""
    if not runtime.traits.driver.startswith("3.") or runtime.traits.platform != POCL_NAME:
        pytest.skip("needs PoCL 3")
    if target_for_this_machine() not in NEWER[processor]:
        pytest.skip("needs a processor that has more")
    environment = os.environ | {"POCL_CACHE_DIR": str(tmp_path), TARGET_VARIABLE: processor}
    command = [sys.executable, "-P", "-c", OTHER_PROCESSOR, processor]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("style", STYLES)
def test_codes_that_lie_ready_give_the_bits_of_a_launch_that_rounds(runtime, style):
    rng = np.random.default_rng(7)
    for tokens, first_token, block, bits in ((1, 0, 32, 4), (7, 2, 64, 8), (33, 1, 128, 4)):
        weight = make_weight(rng, 70, 256, f"int{bits}z", block)
        x = rng.standard_normal((tokens, 256)).astype(np.float32)
        expected = compute(runtime, [weight], x, first_token=first_token, style=style)
        packed = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32, integer_inputs=True)
        x_slot = runtime.shared((first_token + tokens, 256), np.float32)
        y_slot = runtime.shared((first_token + tokens, 70), np.float32)
        slots = [runtime.shared((size,), np.uint8) for size in code_bytes(tokens, 256, block)]
        rounded = RoundedInputs(*slots, bits, block)
        x_slot.array[first_token:] = x
        options = {"tokens": tokens, "first_token": first_token}
        rounding_launch(
            runtime, x_slot, rounded, columns=256, **options, half=False, variant=Variant(style)
        )()
        runtime.finish()
        x_slot.array[:] = np.nan  # the linear reads the codes alone
        launch = packed.launch(x_slot, y_slot, **options, rounded=rounded, style=style, label="test")
        assert not isinstance(launch, ChainedLaunch)
        launch()
        runtime.finish()
        np.testing.assert_array_equal(y_slot.array[first_token:], expected)


def test_codes_that_do_not_fit_are_refused(runtime):
    weight = make_weight(np.random.default_rng(8), 70, 128, "int4", 32)
    x, y = runtime.shared((1, 128), np.float32), runtime.shared((1, 70), np.float32)
    slots = [runtime.shared((size,), np.uint8) for size in code_bytes(1, 128, 32)]
    packed = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32, integer_inputs=True)
    floats = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32)
    for linear, rounded, tokens, message in (
        (packed, RoundedInputs(*slots, 8, 32), 1, "8 bits in blocks of 32"),
        (packed, RoundedInputs(*slots, 4, 64), 1, "4 bits in blocks of 64"),
        (packed, RoundedInputs(*slots, 4, 32), 2, "code slot has 1024 bytes, 1152"),
        (floats, RoundedInputs(*slots, 4, 32), 1, "not rounded"),
    ):
        slot = runtime.shared((tokens, 128), np.float32), runtime.shared((tokens, 70), np.float32)
        with pytest.raises(KernelError, match=message):
            linear.launch(*slot, tokens=tokens, rounded=rounded, label="3.qkv")
    packed.launch(x, y, tokens=1, rounded=RoundedInputs(*slots, 4, 32), label="3.qkv")
