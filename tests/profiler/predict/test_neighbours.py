"""Predictions of thin profiles: straight lines between measured widths, and bounds beside them."""

import itertools
import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.profiler.predict import CANDIDATES, held_out_predictions
from heterollm.profiler.predict.curves import isotonic_median
from heterollm.profiler.predict.interpolation import Interpolation
from heterollm.profiler.predict.neighbours import LINE, NOISE, Neighbours
from heterollm.profiler.predict.roofline import Roofline
from heterollm.profiler.predict.stage_linear import StageLinear
from heterollm.profiler.predict.time_model import Prediction, TimeModel
from heterollm.profiler.predict.tree import Tree
from heterollm.profiler.records import LinearPoint

quickly = settings(max_examples=30, deadline=None, derandomize=True, database=None)
COLUMNS = (1024, 2048, 5632)
LENGTHS = (1, 32, 64, 128, 256, 512)


class Constant:
    """Says the same of every slice: what is left is what its neighbours allow."""

    spread = (0.5, 2.0)

    def __init__(self, us: float) -> None:
        self.us = us

    def predict(self, point: LinearPoint) -> Prediction:
        return Prediction(self.us, self.us / 2, self.us * 2, True, "constant")


def linear(rows: int, columns: int, tokens: int, form: str = "matmul_nbits") -> LinearPoint:
    return LinearPoint("o", (rows,), columns, tokens, 4, 32, form=form)


def block(width: int, tokens: int, columns: int = 1024, form: str = "ffn") -> LinearPoint:
    return LinearPoint("ffn", (width, width), columns, tokens, 4, 32, form=form)


class Law:
    """A part of a fixed cost, a cost of reading weights and one of computing stages, drawn by a seed."""

    def __init__(self, seed: int, part: str) -> None:
        draw = random.Random(f"{seed} {part}")
        self.is_npu = part == "npu"
        self.floor_us = draw.uniform(5, 120)
        self.read, self.compute = draw.uniform(2e3, 3e4), draw.uniform(5e4, 5e6)

    def us(self, point: LinearPoint) -> float:
        weights = point.rows * point.columns
        tokens = 32 * -(-point.tokens // 32) if self.is_npu else point.tokens
        return self.floor_us + max(weights / self.read, weights * tokens / self.compute)


def thin(law: Law, seed: int, part: str) -> dict[LinearPoint, float]:
    """Few widths and lengths, as a quick profile has them, with the noise of a busy machine."""
    draw = random.Random(f"{seed} points")
    form = "matmul_nbits" if part == "npu" else ""
    found = {}
    for columns in COLUMNS:
        for rows in draw.sample((512, 1024, 2048, 2560, 5632, 11264), draw.randint(1, 3)):
            for tokens in {1, 256, *draw.sample(LENGTHS, draw.randint(0, 1))}:
                point = linear(rows, columns, tokens, form)
                found[point] = law.us(point) * draw.uniform(0.97, 1.03)
    return found


@settings(quickly, max_examples=8)
@given(st.integers(0, 10**6), st.sampled_from(["gpu", "npu"]), st.sampled_from(COLUMNS))
def test_thin_profiles_predict_times_that_rise_and_are_near_the_truth(seed, part, columns):
    """Every model that may be used, with few rows and lengths of which half are not measured."""
    law = Law(seed, part)
    times = thin(law, seed, part)
    neighbours = Neighbours(times)
    form = "matmul_nbits" if part == "npu" else ""
    for model in CANDIDATES[part]:
        fitted = TimeModel.fit(model, times)
        for tokens in (1, 128, 256):
            points = [linear(rows, columns, tokens, form) for rows in range(256, 11520, 1024)]
            found = [neighbours.predict(point, fitted).us for point in points]
            assert all(before <= after * (1 + 1e-9) for before, after in itertools.pairwise(found))
            widths = [point.rows for point in times if (point.columns, point.tokens) == (columns, tokens)]
            for point, us in zip(points, found, strict=True):
                truth = law.us(point)
                if widths and min(widths) <= point.rows <= max(widths):
                    # The law is a straight line there; what is left is noise.
                    assert us == pytest.approx(truth, rel=0.08)
                elif tokens in (1, 256) and min(widths) / 2 <= point.rows <= 2 * max(widths):
                    assert truth / 2.4 <= us <= truth * 2.1


@quickly
@given(st.integers(0, 10**6), st.sampled_from(["gpu", "npu"]), st.floats(1e-3, 1e9))
def test_no_model_can_leave_the_bounds(seed, part, us):
    """Whatever it says: a wider slice takes no less, a narrower no more, no row or token is cheaper."""
    law = Law(seed, part)
    times = {point: law.us(point) for point in thin(law, seed, part)}
    neighbours, model = Neighbours(times), Constant(us)
    draw = random.Random(seed)
    form = "matmul_nbits" if part == "npu" else ""
    for _ in range(20):
        point = linear(draw.randrange(32, 16384, 32), draw.choice(COLUMNS), draw.choice((1, 64, 256)), form)
        found = neighbours.predict(point, model).us
        same = [own for own in times if own.columns == point.columns]
        for own in same:
            if own.tokens == point.tokens and own.rows <= point.rows:
                assert found >= times[own] * (1 - 1e-9)
            if own.tokens == point.tokens and own.rows >= point.rows:
                assert (
                    NOISE * times[own] * point.rows / own.rows * (1 - 1e-9)
                    <= found
                    <= times[own] * (1 + 1e-9)
                )
            if own.tokens >= point.tokens and own.rows >= point.rows:
                share = point.rows / own.rows * point.tokens / own.tokens
                assert found >= NOISE * share * times[own] * (1 - 1e-9)


def test_a_few_tokens_are_no_cheaper_than_their_share_of_many():
    """The failure of a thin profile: 1 and 256 tokens were measured, 16 seem to cost little more than 1 does.

    A tree of two lengths takes the pace of the nearer one.
    """
    read = 2048 * 2048
    times = {
        linear(rows, columns, tokens): rows * columns / read * us
        for rows, columns in ((1024, 2048), (2048, 2048), (5632, 2048), (11264, 2048), (2048, 5632))
        for tokens, us in ((1, 390.0), (256, 16_000.0))
    }
    fitted, neighbours = TimeModel.fit(Tree, times), Neighbours(times)
    for rows, columns in ((2048, 2048), (3000, 2048), (2048, 5632)):
        truth = rows * columns / read * 16_000.0
        point = linear(rows, columns, 16)
        assert fitted.predict(point).us < 0.5 * truth * 16 / 256
        assert neighbours.predict(point, fitted).us >= 0.999 * truth * 16 / 256
    # Nor in a weight of other inputs.
    other = linear(2048, 4096, 16)
    assert fitted.predict(other).us < 0.5 * 2 * 16_000.0 * 16 / 256
    assert neighbours.predict(other, fitted).us >= 0.999 * 2 * 16_000.0 * 16 / 256


@pytest.mark.parametrize("model", [Interpolation, StageLinear, Tree, Roofline])
def test_one_width_gives_a_share_of_it_at_least_and_all_of_it_at_most(model):
    times = {
        linear(rows, columns, 256): 100.0 + rows * columns / 1e3
        for rows, columns in ((2048, 1024), (4096, 1536), (2048, 5632))
    }
    fitted, neighbours = TimeModel.fit(model, times), Neighbours(times)
    whole = times[linear(2048, 5632, 256)]
    found = [neighbours.predict(linear(rows, 5632, 256), fitted) for rows in range(256, 4097, 256)]
    for rows, prediction in zip(range(256, 4097, 256), found, strict=True):
        if rows <= 2048:
            assert NOISE * whole * rows / 2048 * (1 - 1e-9) <= prediction.us <= whole
        else:
            assert whole <= prediction.us <= whole * rows / 2048 * (1 + 1e-9)
        assert prediction.low_us <= prediction.us <= prediction.high_us
        # Far beside what was measured the interval is wide.
        assert prediction.source in (LINE, model.name)
        assert (prediction.source == LINE) == (rows == 2048)
    assert [prediction.us for prediction in found] == sorted(prediction.us for prediction in found)


def test_a_width_between_measured_ones_takes_a_time_between_theirs():
    times = {block(width, 32): us for width, us in ((256, 50.0), (512, 90.0), (1024, 200.0))}
    neighbours, model = Neighbours(times), Constant(1.0)
    assert neighbours.predict(block(768, 32), model).us == pytest.approx(145.0)
    assert neighbours.predict(block(768, 32), model).source == LINE
    assert neighbours.predict(block(512, 32), model).us == 90.0
    assert neighbours.predict(block(128, 32), model).us == pytest.approx(NOISE * 25.0)
    assert neighbours.predict(block(2048, 32), Constant(1e6)).us == pytest.approx(400.0)
    found = [neighbours.predict(block(width, 32), model).us for width in range(64, 2112, 64)]
    assert found == sorted(found)
    # Another form or format has no neighbours here, and a linear layer is none of a block's.
    for other in (block(768, 32, form="ffn_int8"), linear(1536, 1024, 32, form="ffn")):
        assert neighbours.predict(other, model).us == 1.0


def test_a_reversal_from_one_stage_to_the_next_is_no_noise():
    """Activation first on the emulator: 32 tokens cost more than 33."""
    per_tile = {1: 0.4, 8: 5.2, 32: 20.8, 33: 5.4, 64: 5.4, 96: 8.1}
    times = {
        linear(rows, 512, tokens, "activation_first"): 30.0 + rows * 16 / 32 * us
        for rows in (256, 512, 1024)
        for tokens, us in per_tile.items()
    }
    neighbours = Neighbours(times)
    for point, us in times.items():
        assert neighbours.predict(point, Constant(1e9)).us == us
        # One width is left out: the model is right, and the bounds let it be.
        others = Neighbours({own: time_us for own, time_us in times.items() if own.rows != point.rows})
        assert others.predict(point, Constant(us)).us == pytest.approx(us)


def test_one_disturbed_run_does_not_move_the_others():
    assert isotonic_median([121.0, 242.0, 2499.0, 689.0, 801.0, 1668.0]) == [
        121.0,
        242.0,
        801.0,
        801.0,
        801.0,
        1668.0,
    ]
    assert isotonic_median([3.0, 2.0, 1.0]) == [2.0, 2.0, 2.0]
    assert isotonic_median([1.0, 2.0, 2.0]) == [1.0, 2.0, 2.0]


def test_what_is_judged_is_what_is_used():
    """Without a weight shape, its times are read off the lines of the others; a model alone does worse."""
    law = Law(3, "npu")
    points = [
        linear(rows, columns, tokens)
        for rows in (512, 1024, 2048)
        for columns in COLUMNS
        for tokens in (1, 256)
    ]
    # Long rows are slow, as they are on Hexagon: no sum of terms in rows and columns is that.
    times = {point: law.us(point) * (3.5 if point.columns > 4096 else 1.0) for point in points}
    errors = {}
    for bounded in (True, False):
        found = held_out_predictions(StageLinear, times, bounded=bounded)
        errors[bounded] = statistics.median(abs(found[point].us / us - 1) for point, us in times.items())
    assert errors[True] < 0.5 * errors[False], errors
