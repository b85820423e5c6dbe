"""Noise and change told apart, on samples that are made up."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterollm.benchmarks.significance import SMALLEST_CHANGE, compare_times, student_quantile


def samples(draw, middle, spread, count=5):
    return [middle * math.exp(draw.gauss(0, spread)) for _ in range(count)]


@pytest.mark.parametrize("paired", [False, True])
def test_a_real_change_is_found_with_its_sign_and_size(paired):
    draw = random.Random(1)
    right = 0
    for _ in range(100):
        change = compare_times(samples(draw, 100, 0.02), samples(draw, 80, 0.02), paired=paired)
        right += change.verdict == "faster" and change.low <= 1.25 <= change.high
        back = compare_times(samples(draw, 80, 0.02), samples(draw, 100, 0.02), paired=paired)
        assert back.verdict == "slower"
    assert right >= 85  # 95 of 100 intervals hold the truth, by their making


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("count", [3, 5, 20])
def test_noise_is_called_a_change_in_one_case_of_twenty(paired, count):
    draw = random.Random(2)
    wrong = 0
    for _ in range(1000):
        change = compare_times(samples(draw, 100, 0.1, count), samples(draw, 100, 0.1, count), paired=paired)
        wrong += change.verdict != "noise"
    assert wrong <= 75


def test_drift_that_meets_both_is_not_in_the_way_of_samples_in_turns():
    draw = random.Random(3)
    drift = [1.0, 1.4, 0.7, 1.9, 1.1]
    before = [100 * factor * math.exp(draw.gauss(0, 0.01)) for factor in drift]
    after = [95 * factor * math.exp(draw.gauss(0, 0.01)) for factor in drift]
    assert compare_times(before, after, paired=True).verdict == "faster"
    assert compare_times(before, after).verdict == "noise"


def test_a_sure_difference_that_is_too_small_is_noise():
    before = [100.0, 100.001, 99.999, 100.0]
    small = [time / (1 + SMALLEST_CHANGE / 2) for time in before]
    large = [time / (1 + SMALLEST_CHANGE * 2) for time in before]
    assert compare_times(before, small).verdict == "noise"
    assert compare_times(before, large).verdict == "faster"


def test_an_outlier_makes_a_difference_unsure_and_not_sure():
    steady = [100.0, 101.0, 99.0, 100.0, 100.5]
    assert compare_times(steady, [90.0, 91.0, 89.0, 90.0, 900.0]).verdict == "noise"


def test_few_samples_say_nothing():
    assert compare_times([1.0, 1.0], [2.0, 2.0]).verdict == "too few samples"
    assert compare_times([1.0, 1.0], [2.0, 2.0]).ratio == pytest.approx(0.5)
    assert compare_times([], [2.0]).verdict == "too few samples"


def test_equal_samples_are_no_change():
    change = compare_times([5.0, 5.0, 5.0], [5.0, 5.0, 5.0])
    assert (change.ratio, change.low, change.high, change.verdict) == (1.0, 1.0, 1.0, "noise")


@given(
    st.lists(st.floats(1e-3, 1e9), min_size=3, max_size=8),
    st.lists(st.floats(1e-3, 1e9), min_size=3, max_size=8),
)
def test_the_mirrored_question_has_the_mirrored_answer(before, after):
    there, back = compare_times(before, after), compare_times(after, before)
    assert there.ratio == pytest.approx(1 / back.ratio)
    assert there.low == pytest.approx(1 / back.high)
    mirror = {"faster": "slower", "slower": "faster"}
    assert back.verdict == mirror.get(there.verdict, there.verdict)


def test_quantiles_fall_to_those_of_the_normal_distribution():
    values = [student_quantile(freedom) for freedom in (1, 2, 2.9, 5, 30, 31, 60, 120, 1e6)]
    assert values == sorted(values, reverse=True)
    known = {60: 2.0003, 120: 1.9799, 31: 2.0395, 1e9: 1.95996}
    for freedom, value in known.items():
        assert student_quantile(freedom) == pytest.approx(value, abs=5e-4)


def test_an_interval_holds_the_ratio_of_medians_that_is_printed():
    """A pause in two of five samples moves the mean, and the interval of means, away from the median."""
    change = compare_times(
        [100.0, 100.0, 100.0, 100.1, 100.2], [100.0, 100.0, 100.0, 180.0, 181.0], paired=True
    )
    assert change.ratio == 1.0
    assert change.low < change.ratio <= change.high
    assert change.verdict == "noise"
