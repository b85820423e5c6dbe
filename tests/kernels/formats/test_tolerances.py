import math

import numpy as np
import pytest

from heterollm.kernels.formats import LINEAR_NMSE, linear_errors
from heterollm.kernels.formats.tolerances import sqnr_db


@pytest.fixture
def exact():
    return np.random.default_rng(0).standard_normal((32, 2048))


def test_equal_outputs_have_no_error(exact):
    assert linear_errors(exact, exact) == (0.0, 0.0, 0.0)
    assert sqnr_db(exact, exact) == math.inf


def test_noise_is_measured_as_it_was_made(exact):
    noise = np.random.default_rng(1).standard_normal(exact.shape) * 1e-4
    errors = linear_errors(exact + noise, exact)
    assert errors.nmse == pytest.approx(1e-8, rel=0.05)
    assert sqnr_db(exact + noise, exact) == pytest.approx(80, abs=0.2)
    assert errors.within("fp16")
    assert not errors.within("fp32")


def test_one_wrong_row_among_many_fails_by_its_own_error(exact):
    actual = exact.copy()
    actual[:, 77] *= 1.01
    errors = linear_errors(actual, exact)
    assert errors.nmse < LINEAR_NMSE["fp16"]
    assert errors.worst_row == pytest.approx(1e-4)
    assert not errors.within("fp16")


def test_one_wrong_token_fails_by_its_own_error(exact):
    actual = exact.copy()
    actual[3] *= 1.004
    errors = linear_errors(actual, exact)
    assert errors.worst_token == pytest.approx(1.6e-5)
    assert not errors.within("fp16")


def test_a_missing_row_of_small_weights_fails(exact):
    exact[:, 5] *= 0.01
    actual = exact.copy()
    actual[:, 5] = 0
    assert not linear_errors(actual, exact).within("fp16")
    assert not linear_errors(actual[:1], exact[:1]).within("fp16")


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_never_pass(exact, bad):
    actual = exact.copy()
    actual[0, 0] = bad
    assert not linear_errors(actual, exact).within("fp16")


def test_a_single_product_near_zero_is_held_against_the_others(exact):
    one = exact[:1].copy()
    one[0, 0] = 1e-6
    actual = one.copy()
    actual[0, 0] = 1e-4
    assert linear_errors(actual, one).within("fp16")


def test_shapes_must_match(exact):
    with pytest.raises(ValueError, match="equal"):
        linear_errors(exact[:1], exact)
    with pytest.raises(ValueError, match="differ"):
        sqnr_db(exact[:1], exact)
