"""One scale for a tensor: its error against other scales, and its codes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterollm.base import CheckpointError, OptionError
from heterollm.kernels.formats import quantize, random_weight, weight_format
from heterollm.kernels.ops import WeightFormat


@given(rows=st.integers(16, 80), magnitude=st.floats(-12, 6), seed=st.integers(0, 99))
def test_the_scale_reaches_to_the_largest_weight(rows, magnitude, seed):
    """A few huge weights make the huge activations of published models; clipping them ruins these."""
    values = np.random.default_rng(seed).standard_normal((rows, 96)).astype(np.float32)
    values[rows // 2, 5] = -60
    values *= np.float32(2.0**magnitude)
    made = quantize(values, bits=8, block=32, scale_kind="tensor").dequantize()
    step = np.abs(values).max() / 127
    assert np.abs(made - values).max() <= 0.6 * step


def test_codes_are_symmetric_and_scales_alike():
    values = np.random.default_rng(2).standard_normal((16, 64), np.float32)
    made = quantize(values, bits=8, block=32, scale_kind="tensor")
    assert made.format == WeightFormat(8, 32, scales="tensor")
    assert len(np.unique(made.scales)) == 1
    assert made.scales[0, 0] > 0
    assert made.codes.min() >= 1  # -128 would have no counterpart
    zeros = quantize(np.zeros((2, 32), np.float32), bits=8, block=32, scale_kind="tensor")
    assert not zeros.dequantize().any()


def test_random_weights_have_the_format():
    weight = random_weight(np.random.default_rng(3), 40, 512, WeightFormat(8, 32, scales="tensor"))
    assert weight_format(weight).scales == "tensor"
    assert len(np.unique(weight.scales)) == 1
    y = np.random.default_rng(4).standard_normal(512) @ weight.dequantize().T
    assert 0.2 < np.std(y) < 5


@pytest.mark.parametrize("options", [{"bits": 4}, {"bits": 8, "symmetric": False}])
def test_other_formats_are_refused(options):
    with pytest.raises(OptionError, match="symmetric weights of 8 bits"):
        quantize(np.zeros((2, 64), np.float32), block=32, scale_kind="tensor", **options)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e8])
def test_values_without_a_scale_are_refused(value):
    weight = np.zeros((4, 32), np.float32)
    weight[3, 5] = value
    with pytest.raises(CheckpointError, match="cannot be quantised"):
        quantize(weight, bits=8, block=32, scale_kind="tensor")
