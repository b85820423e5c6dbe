"""Row tiles that are divided among work-groups where they leave a GPU's compute units without work."""

from dataclasses import replace

import numpy as np
import pytest

from heterollm.kernels.formats import linear_errors
from heterollm.kernels.gpu import GpuLinear, ShapeClass, default_parameters
from heterollm.kernels.gpu.parameters import Division
from heterollm.kernels.operators.linear import LinearCase
from heterollm.kernels.ops import WeightFormat

INT4 = WeightFormat(4, 32)
UNITS = 132


def groups(rows, inputs, units, tokens=1, *, together=1, fewest_rows=8, integer=False, block=32):
    shape = ShapeClass.of(WeightFormat(4, block), integer_inputs=integer, half=False, tokens=tokens)
    tiles = -(-rows // 64)
    division = Division(units, inputs, block, tiles, together, fewest_rows)
    grid = default_parameters("simt", shape).grid(tokens, tiles, division)
    assert grid.local_size[0] * grid.local_size[1] == 256
    return grid.global_size[0] // grid.local_size[0]


@pytest.mark.parametrize(
    ("rows", "inputs", "before", "found"),
    [(2560, 2048, 40, 320), (2048, 5632, 32, 256), (11264, 2048, 176, 352), (32000, 2048, 500, 500)],
)
def test_a_large_gpu_has_two_work_groups_for_each_unit(rows, inputs, before, found):
    assert groups(rows, inputs, 1) == before
    assert groups(rows, inputs, UNITS) == found


def test_a_phone_has_whole_tiles():
    for rows, inputs in ((2560, 2048), (2048, 5632), (4096, 4096), (960, 576)):
        for tokens in (1, 2, 4, 8):
            assert groups(rows, inputs, 6, tokens) == -(-rows // 64)


def test_more_tokens_divide_as_far_as_their_staged_inputs_allow():
    """A slice has a block of the inputs that lie in local memory."""
    assert [groups(2048, 5632, UNITS, tokens) for tokens in (2, 4, 8)] == [256, 256, 128]
    assert [groups(2048, 5632, UNITS, tokens, integer=True) for tokens in (1, 2, 8)] == [256, 256, 64]


def test_inputs_of_less_blocks_than_slices_divide_less():
    assert groups(2048, 256, UNITS) == 64
    assert groups(2048, 4096, UNITS, block=128) == 64


def test_an_ending_keeps_the_rows_that_it_needs():
    assert groups(11264, 2048, UNITS, together=2, fewest_rows=32) == 176
    assert groups(2560, 2048, UNITS, together=2, fewest_rows=64) == 20


@pytest.mark.parametrize("integer", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3, 8])
@pytest.mark.parametrize("number_format", [INT4, WeightFormat(8, 16, symmetric=False), WeightFormat(16)])
def test_the_sums_are_right(runtime, monkeypatch, number_format, tokens, integer):
    if integer and not number_format.quantized:
        pytest.skip("codes are for quantised weights")
    monkeypatch.setattr(runtime, "traits", replace(runtime.traits, compute_units=UNITS))
    case = LinearCase(number_format, (130, 40), 1024, tokens, integer_inputs=integer)
    members, _ = case.data(np.float32)
    packed = GpuLinear.pack(runtime, members, activation_dtype=np.float32, integer_inputs=integer)
    slots = (runtime.shared((tokens, columns), np.float32) for columns in (1024, 170))
    *_, launch = packed.launch(*slots, tokens=tokens, style="simt", label="divided").parts
    assert launch.local_size[0] < 64
    y, exact = case.on_gpu(runtime, np.float32, style="simt")
    assert linear_errors(y, exact).within("fp32")
