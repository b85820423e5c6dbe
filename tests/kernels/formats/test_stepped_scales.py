import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.base import CheckpointError, OptionError
from heterollm.kernels.formats import (
    LARGEST_MULTIPLE,
    quantize,
    random_weight,
    row_steps,
    take_columns,
    take_rows,
    weight_format,
)
from heterollm.kernels.ops import WeightFormat


def signal_to_error_db(weight, tensor):
    error = weight.astype(np.float64) - tensor.dequantize()
    return 10 * np.log10((weight.astype(np.float64) ** 2).sum() / (error**2).sum())


def block_error(values, scale):
    codes = np.clip(np.rint(values / scale), -8, 7)
    return ((codes * scale - values) ** 2).sum(axis=-1)


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 70),
    blocks=st.integers(1, 9),
    block=st.sampled_from([16, 32, 64, 128]),
    spread=st.sampled_from([0.0, 1e-9, 1e-6, 1e-4, 0.02, 1.0, 3e4]),
    tails=st.sampled_from([1, 3, 5]),
)
def test_every_scale_is_a_whole_multiple_of_its_row_and_the_largest_is_16(
    seed, rows, blocks, block, spread, tails
):
    generator = np.random.default_rng(seed)
    weight = np.clip(generator.standard_normal((rows, blocks * block)) ** tails, -14, 14) * spread
    tensor = quantize(weight.astype(np.float32), bits=4, block=block, scale_kind="stepped")
    assert tensor.format == WeightFormat(4, block, scales="stepped")
    scales = tensor.scales.astype(np.float64)
    multiples = scales / (scales.max(axis=1, keepdims=True) / LARGEST_MULTIPLE)
    assert (multiples == np.rint(multiples)).all()  # exact in FP16: no rounding is left
    assert multiples.min() >= 1
    found = row_steps(tensor.scales)
    assert found.stepped.all()
    assert found.reaches_largest.all()
    assert np.array_equal(found.multiples * found.step[:, None], scales)


@pytest.mark.parametrize(("tails", "allowed_db"), [("gauss", 0.25), ("student", 0.45)])
@pytest.mark.parametrize("block", [32, 64])
def test_the_constraint_costs_a_fraction_of_a_decibel(tails, allowed_db, block):
    generator = np.random.default_rng(5)
    shape = (128, 1024)
    values = generator.standard_normal(shape) if tails == "gauss" else generator.standard_t(3, shape)
    weight = values.astype(np.float32)
    blocks = weight.reshape(-1, block).astype(np.float64)
    extreme = np.abs(blocks).max(axis=1, keepdims=True)
    positive = np.min([block_error(blocks, extreme / reach) for reach in np.linspace(6, 10, 60)], axis=0)
    limit = 10 * np.log10((blocks**2).sum() / positive.sum())
    stepped = signal_to_error_db(weight, quantize(weight, bits=4, block=block, scale_kind="stepped"))
    assert limit - allowed_db < stepped
    # Free scales may be negative, which is worth as much again.
    free = signal_to_error_db(weight, quantize(weight, bits=4, block=block))
    assert stepped < free < stepped + allowed_db + 0.55


def test_the_error_is_near_that_of_an_exhaustive_search():
    weight = np.random.default_rng(7).standard_t(5, (24, 8 * 32)).astype(np.float32)
    tensor = quantize(weight, bits=4, block=32, scale_kind="stepped")
    got = ((tensor.dequantize() - weight) ** 2).sum(axis=1)
    blocks = weight.reshape(24, 8, 32).astype(np.float64)
    best = np.full(24, np.inf)
    for fraction in np.linspace(0.5, 1.3, 300):
        step = np.abs(blocks).max(axis=(1, 2)) / 7 / LARGEST_MULTIPLE * fraction
        errors = np.stack([block_error(blocks, (m * step)[:, None, None]) for m in range(1, 17)], axis=-1)
        free = errors.min(axis=-1)
        # One block must take 16: the one that loses least.
        penalty = (errors[:, :, -1] - free).min(axis=-1)
        best = np.minimum(best, free.sum(axis=-1) + penalty)
    assert got.sum() <= 1.02 * best.sum()
    assert (got <= 1.1 * best).all()


def test_parts_of_a_stepped_weight_stay_stepped():
    weight = random_weight(np.random.default_rng(1), 40, 512, WeightFormat(4, 32, scales="stepped"))
    assert weight_format(weight).scales == "stepped"
    assert row_steps(weight.scales).reaches_largest.all()
    assert weight_format(take_rows(weight, [(0, 8), (16, 24)])).scales == "stepped"
    half = take_columns(weight, 0, 256)
    assert weight_format(half).scales == "stepped"
    assert row_steps(half.scales).stepped.all()
    assert not row_steps(half.scales).reaches_largest.all()  # the range of some rows lacks the largest


def test_free_scales_are_not_stepped():
    weight = np.random.default_rng(2).standard_normal((16, 256)).astype(np.float32)
    assert not row_steps(np.abs(quantize(weight, bits=4, block=32).scales)).stepped.any()


@pytest.mark.parametrize("options", [{"bits": 8}, {"bits": 4, "symmetric": False}])
def test_other_formats_have_no_stepped_scales(options):
    with pytest.raises(OptionError, match="symmetric weights of 4 bits"):
        quantize(np.zeros((2, 64), np.float32), block=32, scale_kind="stepped", **options)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e7])
def test_unusable_values_are_refused(value):
    weight = np.ones((2, 64), np.float32)
    weight[1, 3] = value
    with pytest.raises(CheckpointError):
        quantize(weight, bits=4, block=32, scale_kind="stepped")
