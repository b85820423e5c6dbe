import os
import subprocess
import sys

import numpy as np
import pytest

from heterollm.base import KernelError
from heterollm.kernels.formats import QuantizedTensor, linear_errors, random_weight, reference
from heterollm.kernels.gpu import GpuLinear, RoundedInputs, Variant, code_bytes, target_for_this_machine
from heterollm.kernels.gpu.launch import ChainedLaunch
from heterollm.kernels.gpu.pocl.target import TARGET_VARIABLE
from heterollm.kernels.gpu.programs import POCL_NAME
from heterollm.kernels.gpu.rounding import rounding_launch
from heterollm.kernels.operators.data import fill_slot
from heterollm.kernels.operators.linear import run_linear
from heterollm.kernels.ops import WeightFormat

STYLES = ["vector", "simt"]


def compute(runtime, weight, x, style, **options):
    """Run one launch that rounds its inputs."""
    packed = GpuLinear.pack(runtime, [weight], activation_dtype=x.dtype, integer_inputs=True)
    return run_linear(runtime, packed, x, style=style, **options)


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
    for block in (16, 32, 64, 128):
        weight = ones_on_the_diagonal(256, bits, block)
        normal = rng.standard_normal((40, 256)) * 10.0 ** rng.uniform(-6, 6, (40, 1))
        halves = rng.integers(-252, 253, (40, 256)) / 2
        halves[:, ::block] = 127
        scaled = halves * rng.uniform(1e-3, 1e3, (40, 1))
        empty = np.zeros((40, 256))
        for values in (normal, halves, scaled, empty):
            x = values.astype(np.float32)
            expected = reference.round_inputs(x, block).astype(np.float32)
            np.testing.assert_array_equal(compute(runtime, weight, x, style), expected)


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
                    assert linear_errors(compute(runtime, weight, x, style), exact).within("fp32")


@pytest.mark.parametrize(
    "number_format", [WeightFormat(4, 32), WeightFormat(8, 32, symmetric=False)], ids=str
)
@pytest.mark.parametrize("style", STYLES)
def test_tokens_computed_together_give_the_bits_of_each_alone(runtime, style, number_format):
    rng = np.random.default_rng(4)
    weight = random_weight(rng, 130, 160, number_format)
    x = rng.standard_normal((16, 160)).astype(np.float32)
    alone = np.concatenate([compute(runtime, weight, x[t : t + 1], style) for t in range(16)])
    for tokens in (2, 3, 5, 8):
        np.testing.assert_array_equal(compute(runtime, weight, x[:tokens], style), alone[:tokens])
    errors = linear_errors(compute(runtime, weight, x, style), alone.astype(np.float64))
    assert errors.within("fp32")


def test_launches_of_other_sizes_do_not_disturb_each_other(runtime):
    """They share the memory of the rounded inputs, which grows while earlier launches are still held."""
    rng = np.random.default_rng(5)
    weights = [random_weight(rng, 70, k, WeightFormat(4, 32)) for k in (96, 320)]
    calls = []
    for tokens in (1, 64, 7, 300):
        for weight in weights:
            packed = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32, integer_inputs=True)
            x = runtime.shared((tokens, weight.columns), np.float32)
            y = runtime.shared((tokens, 70), np.float32)
            x.write(rng.standard_normal(x.array.shape))
            exact = reference.linear(reference.round_inputs(x.read(), 32), [weight])
            calls.append((packed.launch(x, y, tokens=tokens, label="test"), y, exact))
    for _ in range(2):
        for launch, y, _ in calls:
            y.write(np.nan)
            launch()
        runtime.finish()
        for _, y, exact in calls:
            assert linear_errors(y.read(), exact).within("fp32")


def test_a_launch_rounds_before_it_multiplies(runtime):
    weight = random_weight(np.random.default_rng(6), 70, 96, WeightFormat(4, 32))
    x, y = runtime.shared((1, 96), np.float32), runtime.shared((1, 70), np.float32)
    packed = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32, integer_inputs=True)
    launch = packed.launch(x, y, tokens=1, label="3.qkv")
    assert packed.integer_inputs
    assert isinstance(launch, ChainedLaunch)
    assert (launch.label, launch.before.label) == ("3.qkv", "rounding of inputs")
    x.write(np.random.default_rng(7).standard_normal(x.array.shape))
    launch()
    runtime.finish()
    expected = y.read()
    y.write(np.nan)
    assert [part.label for part in launch.parts] == ["rounding of inputs", "3.qkv"]
    for part in launch.parts:
        assert not isinstance(part, ChainedLaunch)
        part()
    runtime.finish()
    np.testing.assert_array_equal(y.read(), expected)
    plain = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32)
    alone = plain.launch(x, y, tokens=1, style="vector", label="3.qkv")
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
from heterollm.kernels.gpu import OpenClRuntime, list_opencl_devices
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
    x.write([[1.0] * 192, *rng.standard_normal((tokens - 1, 192))])
    packed = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32, integer_inputs=True)
    packed.launch(x, y, tokens=tokens, label="test", style="vector")()
    runtime.finish()
    errors = linear_errors(y.read(), reference.linear(reference.round_inputs(x.read(), 64), [weight]))
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
        weight = random_weight(rng, 70, 256, WeightFormat(bits, block, symmetric=False))
        x = rng.standard_normal((tokens, 256)).astype(np.float32)
        expected = compute(runtime, weight, x, style, first_token=first_token)
        packed = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32, integer_inputs=True)
        x_slot = fill_slot(runtime, np.concatenate([np.zeros((first_token, 256), np.float32), x]))
        y_slot = runtime.shared((first_token + tokens, 70), np.float32)
        slots = [runtime.shared((size,), np.uint8) for size in code_bytes(tokens, 256, block)]
        rounded = RoundedInputs(*slots, bits, block)
        options = {"tokens": tokens, "first_token": first_token}
        rounding_launch(
            runtime, x_slot, rounded, columns=256, **options, half=False, variant=Variant(style)
        )()
        runtime.finish()
        x_slot.write(np.nan)  # the linear reads the codes alone
        launch = packed.launch(x_slot, y_slot, **options, rounded=rounded, style=style, label="test")
        assert not isinstance(launch, ChainedLaunch)
        launch()
        runtime.finish()
        np.testing.assert_array_equal(y_slot.read()[first_token:], expected)


def test_codes_that_do_not_fit_are_refused(runtime):
    weight = random_weight(np.random.default_rng(8), 70, 128, WeightFormat(4, 32))
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
