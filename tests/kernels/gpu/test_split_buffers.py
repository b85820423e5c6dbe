"""Weights larger than the device's largest buffer: several buffers give the numbers of one, bit for bit."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.base import KernelError
from heterollm.kernels.formats import random_weight
from heterollm.kernels.gpu import GpuLinear, OpenClRuntime
from heterollm.kernels.operators.linear import LinearCase
from heterollm.kernels.ops import WeightFormat

FORMATS = {
    "int4": WeightFormat(4, 32),
    "int4 asymmetric": WeightFormat(4, 64, symmetric=False),
    "int8": WeightFormat(8, 32),
    "f16": WeightFormat(16),
}
COLUMNS = 1024
LIMITS = (210_000, 300_000, 420_000)
"""The least takes the slots of 40 tokens, and six tiles of 4 bits or one of floats."""


def tile_bytes(weight):
    return 64 * COLUMNS * weight.bits // 8


@pytest.fixture(scope="module")
def limited(runtime):
    """A function that sets the largest buffer of the device, opened again without a matrix unit, in bytes."""
    opened = OpenClRuntime(runtime._device)
    traits = dataclasses.replace(opened.traits, has_matrix=False)

    def limit(size_bytes):
        opened.traits = dataclasses.replace(traits, max_buffer_bytes=size_bytes)
        return opened

    return limit


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_case_has_the_same_numbers_in_several_buffers(runtime, limited, data):
    name = data.draw(st.sampled_from(list(FORMATS)))
    weight = FORMATS[name]
    rows = tuple(data.draw(st.lists(st.integers(1, 420), min_size=1, max_size=3)))
    kept = None
    if data.draw(st.booleans()):
        starts = [64 * data.draw(st.integers(0, (count - 1) // 64)) for count in rows]
        kept = tuple(
            (start, data.draw(st.integers(start + 1, count)))
            for start, count in zip(starts, rows, strict=True)
        )
    integer = weight.quantized and data.draw(st.booleans())
    tokens = data.draw(st.sampled_from([1, 2, 7, 40]))
    case = LinearCase(weight, rows, COLUMNS, tokens, kept=kept, integer_inputs=integer)
    style = "vector" if runtime.traits.is_cpu else "simt"
    whole, exact = case.on_gpu(runtime, np.float32, style=style)
    split, _ = case.on_gpu(limited(data.draw(st.sampled_from(LIMITS))), np.float32)
    assert np.array_equal(whole, split)
    assert exact.shape == whole.shape


@pytest.mark.parametrize("name", FORMATS)
def test_a_launch_has_one_kernel_for_each_buffer(limited, name):
    weight = FORMATS[name]
    gpu = limited(3 * tile_bytes(weight))
    linear = GpuLinear.pack(
        gpu, [random_weight(np.random.default_rng(0), 600, COLUMNS, weight)], activation_dtype=np.float32
    )
    x, y = gpu.shared((1, COLUMNS), np.float32), gpu.shared((1, 600), np.float32)
    assert len(linear.launch(x, y, tokens=1, label="head").parts) == 4  # ten tiles
    assert len(linear.launch(x, y, tokens=1, kept=[(192, 384)], label="head").parts) == 1
    assert len(linear.launch(x, y, tokens=1, kept=[(128, 600)], label="head").parts) == 4
    tokens = gpu.shared((1,), np.int32)
    assert len(linear.embed_launch(tokens, x, count=1).parts) == 4


@pytest.mark.parametrize("style", ["simt", "vector"])
@pytest.mark.parametrize("name", FORMATS)
def test_an_embedding_in_several_buffers(runtime, embed, limited, name, style):
    weight = FORMATS[name]
    table = random_weight(np.random.default_rng(1), 500, COLUMNS, weight)
    ids = [0, 499, 191, 192, 193, 383, 384, 64, 700, -3]  # the last two lie outside of the table
    whole = embed(runtime, table, ids, style=style)
    assert np.array_equal(embed(limited(3 * tile_bytes(weight)), table, ids, style=style), whole)
    assert whole.any(axis=1).all()


def test_a_device_that_takes_no_tile_refuses_with_a_fix(limited):
    weight = FORMATS["int4"]
    with pytest.raises(KernelError, match="exceeds the limit") as caught:
        GpuLinear.pack(
            limited(tile_bytes(weight) // 2),
            [random_weight(np.random.default_rng(0), 64, COLUMNS, weight)],
            activation_dtype=np.float32,
        )
    assert caught.value.fix
