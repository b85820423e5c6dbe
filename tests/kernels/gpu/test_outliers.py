"""Shadow outliers: the kernels find the right channels in order, and multiply what the range cuts off."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterollm.base import KernelError
from heterollm.kernels.formats import LINEAR_NMSE, linear_errors
from heterollm.kernels.operators.outliers import OutlierCase

STYLES = ["vector", "simt"]
PAIRS = [
    *(("vector", np.float32), ("vector", np.float16), ("simt", np.float16)),
    pytest.param("simt", np.float32, marks=pytest.mark.slow),
]
"""Styles and types of activations; no device has the last pair by default."""


@pytest.mark.parametrize(("style", "dtype"), PAIRS)
def test_products_match_float64(cases, style, dtype):
    made = cases(style, dtype)

    @given(
        seed=st.integers(0, 1 << 20),
        tokens=st.integers(1, 70),
        columns=st.integers(1, 300) | st.sampled_from([32, 64]),
        members=st.lists(st.tuples(st.integers(9, 90), st.integers(9, 90)), min_size=1, max_size=3),
        data=st.data(),
    )
    def holds(seed, tokens, columns, members, data):
        rows = tuple(whole for whole, _ in members)
        npu_rows = tuple(min(own, whole) for whole, own in members)
        # Every channel may be an outlier.
        channels = data.draw(st.integers(0, min(columns, 40)))
        hot = data.draw(st.integers(0, columns))
        covered = data.draw(st.just(tokens) | st.integers(1, tokens))
        case = OutlierCase(tokens, columns, rows, npu_rows, channels, hot, covered, seed=seed)
        [(actual, exact)] = made(case)
        # Sums that cancel may miss the tighter gate of a single row.
        assert linear_errors(actual, exact).nmse <= LINEAR_NMSE["fp16" if dtype == np.float16 else "fp32"]
        np.testing.assert_array_equal(actual[covered:], exact[covered:])

    holds()


@pytest.mark.parametrize("style", STYLES)
def test_without_outliers_the_products_are_zeros(cases, style):
    [(actual, exact)] = cases(style)(OutlierCase(5, 96, (40,), (40,), channels=0, hot=9))
    assert not exact.any()
    np.testing.assert_array_equal(actual, exact)


@pytest.mark.parametrize("style", STYLES)
def test_flags_are_clear_after_each_run(cases, check, style):
    check(*cases(style)(OutlierCase(9, 130, (50, 31), (32, 8), channels=11, hot=6, repeats=3)))


def test_memory_that_does_not_fit_is_refused(cases):
    with pytest.raises(KernelError, match="2 row counts for 1 members"):
        cases("simt")(OutlierCase(1, 32, (8,), (8, 8), channels=1, hot=1))
