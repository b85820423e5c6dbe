"""Launches over a range of a linear's inputs: partial sums. Their numbers at every shape: test_linear.py."""

from dataclasses import replace

import numpy as np
import pytest

from heterollm.base import KernelError
from heterollm.kernels.formats import linear_errors, random_weight, reference, take_columns
from heterollm.kernels.gpu import GpuLinear, MergedLaunch, RoundedInputs, Variant, code_bytes, merge_launches
from heterollm.kernels.gpu.rounding import rounding_launch
from heterollm.kernels.operators.data import GuardedOutput, fill_slot, run_launches
from heterollm.kernels.operators.linear import LinearCase, run_linear
from heterollm.kernels.ops import WeightFormat

STYLES = ["vector", "simt"]
INT4 = WeightFormat(4, 32)


@pytest.mark.parametrize("style", STYLES)
def test_the_whole_range_gives_the_same_bits_as_none(runtime, style):
    number_format = WeightFormat(4, 32, symmetric=False)
    for integer, tokens in ((False, 1), (False, 33), (True, 1), (True, 33)):
        case = LinearCase(number_format, (130,), 256, tokens, integer_inputs=integer)
        whole, _ = case.on_gpu(runtime, np.float32, style=style)
        same, _ = replace(case, inputs=(0, 256)).on_gpu(runtime, np.float32, style=style)
        np.testing.assert_array_equal(whole, same)


@pytest.mark.parametrize("style", STYLES)
def test_two_ranges_add_up_to_the_whole(runtime, style):
    for integer in (False, True):
        case = LinearCase(INT4, (130,), 256, 5, integer_inputs=integer)
        members, x = case.data(np.float32)
        packed = GpuLinear.pack(runtime, members, activation_dtype=np.float32, integer_inputs=integer)
        parts = [
            run_linear(
                runtime, packed, np.ascontiguousarray(x[:, slice(*inputs)]), inputs=inputs, style=style
            )
            for inputs in ((0, 96), (96, 256))
        ]
        # A block never straddles the cut, so that the parts round as the whole does.
        assert linear_errors(np.add(*parts, dtype=np.float64), case.exact(members, x)).within("fp32")


@pytest.mark.parametrize("style", STYLES)
def test_codes_that_another_kernel_left_are_compact(runtime, style):
    case = LinearCase(WeightFormat(4, 64), (77,), 512, 5, inputs=(192, 448), integer_inputs=True)
    members, x = case.data(np.float32)
    packed = GpuLinear.pack(runtime, members, activation_dtype=np.float32, integer_inputs=True)
    slots = [runtime.shared((size,), np.uint8) for size in code_bytes(5, 256, 64)]
    rounded = RoundedInputs(*slots, 4, 64)
    options = {"columns": 256, "tokens": 5, "half": False, "variant": Variant(style)}
    rounding_launch(runtime, fill_slot(runtime, x), rounded, **options)()
    # The linear reads the codes alone.
    options = {"inputs": case.inputs, "style": style}
    y = run_linear(runtime, packed, np.full_like(x, np.nan), rounded=rounded, **options)
    assert linear_errors(y, case.exact(members, x)).within("fp32")
    too_small = RoundedInputs(runtime.shared((64,), np.uint8), slots[1], 4, 64)
    with pytest.raises(KernelError, match="code slot"):
        run_linear(runtime, packed, x, rounded=too_small, **options)


@pytest.mark.usefixtures("merges")
def test_merged_launches_keep_their_ranges(runtime):
    launches, outputs, exact = [], [], []
    for integer in (False, True):
        for inputs in ((0, 96), (96, 256), (32, 64)):
            case = LinearCase(INT4, (64,), 256, 1, inputs=inputs, integer_inputs=integer)
            members, x = case.data(np.float32)
            packed = GpuLinear.pack(runtime, members, activation_dtype=np.float32, integer_inputs=integer)
            outputs.append(GuardedOutput(runtime, (1, 64), np.float32))
            slots = fill_slot(runtime, x), outputs[-1].slot
            launches.append(packed.launch(*slots, tokens=1, columns=inputs, label=f"{inputs}"))
            exact.append(case.exact(members, x))
    merged = merge_launches(runtime, launches)
    assert [type(call) for call in merged] == [MergedLaunch]
    run_launches(runtime, merged)
    for output, expected in zip(outputs, exact, strict=True):
        assert linear_errors(output.read(), expected).within("fp32")


@pytest.mark.parametrize(
    ("number_format", "columns"),
    [
        *((INT4, columns) for columns in ((0, 0), (64, 32), (-32, 32), (0, 288), (16, 64), (0, 48))),
        *((WeightFormat(32), columns) for columns in ((8, 64), (0, 250))),
    ],
    ids=str,
)
def test_a_range_that_does_not_fit_is_refused(runtime, number_format, columns):
    weight = random_weight(np.random.default_rng(0), 64, 256, number_format)
    packed = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32)
    x, y = runtime.shared((1, 512), np.float32), runtime.shared((1, 64), np.float32)
    unit = 32 if number_format is INT4 else 16
    with pytest.raises(KernelError, match=f"starts and stops at multiples of {unit}"):
        packed.launch(x, y, tokens=1, columns=columns, label="down")


def test_the_input_slot_needs_the_range_alone(runtime):
    packed = GpuLinear.pack(runtime, [np.ones((64, 256), np.float32)], activation_dtype=np.float32)
    x, y = runtime.shared((2, 96), np.float32), runtime.shared((2, 64), np.float32)
    packed.launch(x, y, tokens=2, columns=(32, 128), label="down")
    with pytest.raises(KernelError, match="input slot"):
        packed.launch(x, y, tokens=2, columns=(32, 144), label="down")


@pytest.mark.parametrize("bits", [4, 8, 16, 32])
@pytest.mark.parametrize("symmetric", [True, False])
def test_taken_columns_are_those_of_the_values(bits, symmetric):
    number_format = WeightFormat(bits, 32, symmetric) if bits <= 8 else WeightFormat(bits)
    weight = random_weight(np.random.default_rng(7), 9, 7 * 32, number_format)
    for start, stop in ((0, 224), (0, 96), (64, 192), (128, 224)):
        np.testing.assert_array_equal(
            reference.weight_values(take_columns(weight, start, stop)),
            reference.weight_values(weight)[:, start:stop],
        )


def test_columns_that_share_a_byte_or_a_block_are_not_taken():
    weight = random_weight(np.random.default_rng(8), 9, 224, WeightFormat(4, 32, symmetric=False))
    for start, stop in ((32, 96), (0, 80), (16, 64), (64, 64), (0, 256), (-64, 64)):
        with pytest.raises(ValueError, match="whole"):
            take_columns(weight, start, stop)
    with pytest.raises(ValueError, match="lie in"):
        take_columns(np.ones((9, 64), np.float32), 0, 65)
