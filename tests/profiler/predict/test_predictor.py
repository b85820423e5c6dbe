"""Predicted times, on devices whose times are known."""

import random
import sys
from dataclasses import dataclass
from typing import ClassVar

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scipy.optimize import nnls

from heterollm.base import ProfileError
from heterollm.profiler.predict import Predictor, Score, held_out_predictions, nonnegative_fit, percentile
from heterollm.profiler.predict.curves import nonnegative_least_squares, rising, step_end, within_stages
from heterollm.profiler.predict.predictor import Fits
from heterollm.profiler.predict.roofline import Roofline
from heterollm.profiler.predict.stage_linear import StageLinear
from heterollm.profiler.predict.time_model import TimeModel
from heterollm.profiler.predict.tree import FEATURES, RISING, Tree, features
from heterollm.profiler.predict.validation import choices
from heterollm.profiler.records import (
    BandwidthKey,
    LayerKey,
    LinearKey,
    LinearPoint,
    Processor,
    Profile,
    Record,
)

SHAPES = [
    ("qkv", (1024, 256, 256), 1024),
    ("o", (1024,), 1024),
    ("gate_up", (2816, 2816), 1024),
    ("down", (1024,), 2816),
    ("qkv", (1536, 256, 256), 1536),
    ("o", (1536,), 1536),
    ("gate_up", (4096, 4096), 1536),
    ("down", (1536,), 4096),
]
NPU_TOKENS = (1, 32, 64, 128, 256)
GPU_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def staged_us(point: LinearPoint) -> float:
    """An NPU with the emulator's steps of tokens in both orders (facts: kilocycles at 256 x 256)."""
    tiles = -(-point.rows // 32) * -(-point.columns // 32)
    stage = -(-point.tokens // 32)
    if point.form == "activation_first" and point.tokens <= 32:
        per_tile = 0.4 if point.tokens <= 4 else 2.6 * -(-point.tokens // 4)
    else:
        per_tile = 2.7 * stage
    return 30.0 + tiles * per_tile


def gpu_us(point: LinearPoint) -> float:
    """A GPU bound by bandwidth at few tokens, whose efficiency rises with them."""
    weights = point.rows * point.columns
    return 20.0 + max(point.weight_bytes / 8e3, weights * (point.tokens + 24) * 2 / 1e6)


def linear_point(group, rows, columns, tokens, form="") -> LinearPoint:
    bits, block = (16, 0) if form.endswith("_first") else (4, 32)
    return LinearPoint(group, tuple(rows), columns, tokens, bits, block, form=form)


def linear_record(
    part: Processor, point: LinearPoint, time_us: float, noise: float, rng: random.Random
) -> Record:
    samples = tuple(round(time_us * (1 + noise * rng.uniform(-1, 1)), 3) for _ in range(5))
    return Record(LinearKey(part, point, "code"), samples, taken_s=1.0)


def profile(*, noise: float = 0.02, seed: int = 0) -> Profile:
    """Both parts of a device at quarters of every group's rows, and some of its other operators."""
    rng = random.Random(seed)
    made = Profile({"device": "host", "time": "real", "npu_copies_by_length": False, "cache_bytes": 0})
    for group, member_rows, columns in SHAPES:
        for fraction in (0.25, 0.75, 1.0):
            rows = [int(count * fraction) for count in member_rows]
            for tokens in NPU_TOKENS:
                point = linear_point(group, rows, columns, tokens, "matmul_nbits")
                made.add(linear_record("npu", point, staged_us(point), noise, rng))
            for tokens in GPU_TOKENS:
                point = linear_point(group, rows, columns, tokens)
                made.add(linear_record("gpu", point, gpu_us(point), noise, rng))
    for tokens in (1, 32, 256):
        made.add(Record(layer_key("rms_norm", tokens, hidden=1024), (5.0 + tokens * 0.3,), taken_s=1.0))
        for context in (256, 2048):
            time_us = attention_us(tokens, context)
            made.add(Record(layer_key("attention", tokens, context=context), (time_us,), taken_s=1.0))
    return made


def attention_us(tokens: int, context: int) -> float:
    """Return a time that grows with what each token sees: the tokens before it."""
    seen = sum(range(context - tokens + 1, context + 1))
    return round(8.0 + seen * 0.01 + context * 0.02, 3)


def layer_key(operator: str, tokens: int, *, context: int = 0, hidden: int = 0) -> LayerKey:
    heads, kv_heads, head_dim = (0, 0, 0) if hidden else (16, 4, 64)
    return LayerKey(operator, tokens, context, hidden, heads, kv_heads, head_dim, "code")


def staged_samples(sizes=(256, 512, 768, 1024), tokens=(1, 8, 16, 31, 32, 33, 64, 65, 96, 128)):
    """Exact times of both orders over a grid of shapes."""
    points = [
        linear_point("o", (rows,), columns, count, form)
        for form in ("activation_first", "weight_first")
        for columns in sizes
        for rows in sizes
        for count in tokens
    ]
    return points, [staged_us(point) for point in points]


def more_work(point: LinearPoint, rng: random.Random) -> LinearPoint:
    """A slice of the same stage that is no smaller in any dimension."""
    last = -(-point.tokens // 32) * 32
    rows = tuple(count + rng.choice((0, 1, 32, 700)) for count in point.member_rows)
    columns = point.columns + rng.choice((0, 32, 640))
    return replace(point, member_rows=rows, columns=columns, tokens=rng.randint(point.tokens, last))


@pytest.fixture(scope="module")
def predictor() -> Predictor:
    return Predictor.fit(profile())


@pytest.fixture(scope="module")
def fitted() -> dict[str, TimeModel]:
    """Every model on noisy times of both orders, and on a GPU's."""
    rng = random.Random(3)
    points, times = staged_samples(sizes=(256, 768, 1024))
    points += [linear_point("o", (rows,), 1024, count) for rows in (512, 2048) for count in GPU_TOKENS]
    times += [gpu_us(point) for point in points[len(times) :]]
    noisy = [time_us * rng.uniform(0.8, 1.25) for time_us in times]
    measured = dict(zip(points, noisy, strict=True))
    return {name: TimeModel.fit(model, measured) for name, model in ALL_MODELS.items()}


ALL_MODELS = {model.name: model for model in (Tree, StageLinear, Roofline)}
FORMS = ("activation_first", "weight_first", "")


@dataclass
class Rate:
    """Multiply-adds at the median rate."""

    name: ClassVar[str] = "rate"
    flops_per_us: float

    @classmethod
    def fit(cls, points, times_us):
        return cls(float(np.median([point.flops / us for point, us in zip(points, times_us, strict=True)])))

    def estimate_us(self, point):
        return point.flops / self.flops_per_us


class TestFeatures:
    def test_names_and_numbers_belong_together(self):
        point = linear_point("o", (100,), 256, 33, "weight_first")
        found = dict(zip(FEATURES, features(point), strict=True))
        assert found == {
            "step": 32,
            "rounded_tokens": 64,
            "rounded_rows": 128,
            "rounded_columns": 256,
            "work": 4 * 8 * 2,
        }

    def test_steps_of_tokens_are_those_of_the_emulator(self):
        steps = {1: 4, 4: 4, 5: 8, 31: 32, 32: 32, 33: 32, 64: 32}
        found = {tokens: features(linear_point("o", (32,), 32, tokens))[0] for tokens in steps}
        assert found == steps
        assert [step_end(tokens) for tokens in steps] == [4, 4, 8, 32, 32, 64, 64]

    @given(seed=st.integers(0, 2**32))
    def test_monotone_features_never_fall(self, seed):
        rng = random.Random(seed)
        less, more = ordered_points(rng)
        pairs = zip(features(less), features(more), RISING, strict=True)
        # A feature without a constraint does not move within a stage.
        assert all(before <= after if constraint else before == after for before, after, constraint in pairs)


class TestFits:
    @given(st.lists(st.floats(1.0, 1e6), min_size=1, max_size=40), st.integers(0, 39))
    def test_rising_keeps_order_and_values_that_rise(self, values, place):
        risen = rising(values)
        assert risen == sorted(risen)
        assert min(values) <= risen[0]
        assert risen[-1] <= max(values)
        assert rising(risen) == risen
        larger = [value + 1.0 if at >= place else value for at, value in enumerate(values)]
        assert all(before <= after for before, after in zip(risen, rising(larger), strict=True))

    def test_a_fall_between_stages_is_left(self):
        assert within_stages([8, 32, 33, 64], [3.0, 9.0, 4.0, 2.0]) == [3.0, 9.0, 3.0, 3.0]

    @given(st.integers(0, 2**32))
    def test_nonnegative_least_squares_are_those_of_scipy(self, seed):
        rng = np.random.default_rng(seed)
        samples, columns = rng.integers(3, 60), rng.integers(1, 14)
        terms = np.abs(rng.standard_normal((samples, columns))) * 10.0 ** rng.integers(-3, 3, columns)
        terms = np.vstack([terms / terms.max(axis=0), np.diag(3e-3 * np.arange(1.0, columns + 1))])
        terms[:samples, -1] = terms[:samples, 0]
        values = np.append(rng.standard_normal(samples) + seed % 3, np.zeros(columns))
        expected, _ = nnls(terms, values)
        assert nonnegative_least_squares(terms, values) == pytest.approx(expected, rel=1e-8, abs=1e-12)

    @given(st.integers(0, 2**32))
    def test_nonnegative_fit_finds_what_made_the_times(self, seed):
        generator = np.random.default_rng(seed)
        terms = generator.uniform(0.1, 10.0, (30, 3))
        costs = generator.uniform(0.5, 2.0, 3) * generator.integers(0, 2, 3)
        costs[0] = 1.0
        assert nonnegative_fit(terms, terms @ costs) == pytest.approx(costs, abs=1e-4)


class TestModels:
    @pytest.mark.parametrize("name", ALL_MODELS)
    @settings(max_examples=300, deadline=None)
    @given(seed=st.integers(0, 2**32))
    def test_times_rise_with_work_within_an_order_and_stage(self, fitted, name, seed):
        less, more = ordered_points(random.Random(seed))
        before, after = (fitted[name].predict(point).us for point in (less, more))
        assert 0.0 < before <= after * (1 + 1e-12), (less, more)

    @pytest.mark.parametrize("name", ["tree", "stage_linear"])
    def test_the_fall_from_32_to_33_tokens_is_kept_in_one_order_only(self, name):
        points, times = staged_samples()
        kept_out = (768, 512)
        measured = zip(points, times, strict=True)
        seen = {point: us for point, us in measured if (point.columns, point.rows) != kept_out}
        model = TimeModel.fit(ALL_MODELS[name], seen)

        def us(tokens, form):
            return model.predict(linear_point("o", (512,), 768, tokens, form)).us

        assert us(32, "activation_first") > 3 * us(33, "activation_first")
        assert us(33, "weight_first") == pytest.approx(2 * us(32, "weight_first"), rel=0.1)
        assert us(1, "weight_first") == pytest.approx(us(32, "weight_first"), rel=0.05)
        assert us(17, "weight_first") == pytest.approx(us(32, "weight_first"), rel=0.05)

    def test_stages_are_fitted_exactly_where_they_are_exact(self):
        points, times = staged_samples()
        predicted = held_out_predictions(StageLinear, dict(zip(points, times, strict=True)))
        errors = [
            abs(predicted[point].us / time_us - 1) for point, time_us in zip(points, times, strict=True)
        ]
        # Times at 31 and 32 tokens, or 65 and 96, share a step.
        assert percentile(errors, 0.9) < 1e-4

    @pytest.mark.parametrize("name", ALL_MODELS)
    def test_what_was_not_measured_is_not_known(self, fitted, name):
        known = linear_point("o", (512,), 512, 32, "weight_first")
        unknown = [
            replace(known, form="matmul_nbits"),
            replace(known, bits=4, block=32),
            replace(known, integer_inputs=True),
            replace(known, columns=2049),
            replace(known, member_rows=(127,)),
            replace(known, tokens=257),
        ]
        model = fitted[name]
        assert model.predict(known).known
        for point in unknown:
            found = model.predict(point)
            assert not found.known
            assert found.us > 0
            near = model.predict(known)
            assert found.high_us / found.us > near.high_us / near.us
            assert found.low_us / found.us < near.low_us / near.us

    @pytest.mark.parametrize("name", ALL_MODELS)
    def test_order_of_the_samples_does_not_matter(self, name):
        points, times = staged_samples(sizes=(256, 512))
        pairs = list(zip(points, times, strict=True))
        random.Random(1).shuffle(pairs)
        shuffled = TimeModel.fit(ALL_MODELS[name], dict(pairs))
        assert shuffled == TimeModel.fit(ALL_MODELS[name], dict(zip(points, times, strict=True)))

    @pytest.mark.parametrize("name", ALL_MODELS)
    def test_one_sample_is_enough_for_a_guess(self, name):
        point = linear_point("o", (512,), 512, 32)
        model = TimeModel.fit(ALL_MODELS[name], {point: 100.0})
        assert model.predict(point).us == pytest.approx(100.0)
        assert model.predict(replace(point, columns=2048)).us > 0.0


class TestPredictor:
    def test_measured_times_win(self, predictor):
        made = profile()
        for key, record in made.of_kind(LinearKey):
            found = predictor.predict_us(key.point, key.processor)
            assert (found.us, found.source, found.known) == (record.median_us, "measured", True)
            assert min(record.samples_us) <= found.low_us <= found.us <= found.high_us
            assert found.high_us <= max(record.samples_us)

    def test_shapes_between_and_beside_are_near_the_truth(self, predictor):
        for columns, rows, tokens in (
            (1024, 1280, 128),
            (1280, 1024, 64),
            (2048, 3000, 256),
            (2816, 512, 32),
        ):
            for part, form, truth in (("npu", "matmul_nbits", staged_us), ("gpu", "", gpu_us)):
                point = linear_point("o", (rows,), columns, tokens, form)
                found = predictor.predict_us(point, part)
                assert found.source in ("line", predictor.processors[part].fit.model.name)
                assert found.us == pytest.approx(truth(point), rel=0.1)
                assert found.low_us <= found.us <= found.high_us

    def test_every_model_is_scored_and_the_best_candidate_is_used(self, predictor):
        for part, names in (("npu", {"tree", "stage_linear"}), ("gpu", {"roofline", "interpolation"})):
            held = predictor.processors[part].fit
            scores = {entry.model: entry for entry in held.scores}
            assert set(scores) == names
            used = scores[held.model.name]
            assert used.median_error < 0.03
            assert used.regret is not None
            assert used.regret < 0.03
            assert used.choices == len(SHAPES) * len(NPU_TOKENS)
            assert used == min(held.scores, key=lambda entry: entry.rank)

    def test_without_scikit_learn_the_tree_is_no_candidate(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "sklearn", None)
        held = Predictor.fit(profile()).processors["npu"].fit
        assert [entry.model for entry in held.scores] == ["stage_linear"]
        assert held.model.name == "stage_linear"

    def test_kept_models_bring_back_the_same_predictor(self, predictor):
        kept = msgspec.json.decode(msgspec.json.encode(predictor.fits), type=Fits)
        assert kept == predictor.fits
        again = Predictor.fit(profile(), kept)
        rng = random.Random(1)
        for _ in range(300):
            point = random_point(rng)
            for part in ("gpu", "npu"):
                assert again.predict_us(point, part) == predictor.predict_us(point, part)
        for tokens in (1, 5, 300):
            key = layer_key("attention", tokens, context=700)
            assert again.predict_layer_us(key) == predictor.predict_layer_us(key)

    def test_fits_are_deterministic(self, predictor):
        made = profile()
        backwards = Profile(made.description, dict(reversed(made.records.items())))
        assert Predictor.fit(backwards).fits == predictor.fits
        through_file = Profile.from_json(made.to_json())
        assert Predictor.fit(through_file).fits == predictor.fits

    def test_a_prediction_takes_few_calls(self, predictor, calls_of):
        """Of functions: ten thousand predictions take a second on the machine of CI."""
        rng = random.Random(2)
        points = [
            linear_point(
                "o", (rng.randrange(64, 9000),), rng.choice((1024, 1536, 4096)), rng.choice(NPU_TOKENS)
            )
            for _ in range(200)
        ]
        for part, form in (("gpu", None), ("npu", "matmul_nbits")):
            asked = [replace(point, form=form) if form else point for point in points]
            calls = calls_of(lambda: [predictor.predict_us(point, part) for point in asked])  # noqa: B023
            assert calls < 50 * len(points)

    def test_a_profile_without_enough_is_refused(self):
        made = profile()
        empty = Profile(made.description)
        with pytest.raises(ProfileError, match="no measured linear layer"):
            Predictor.fit(empty)
        record = next(record for _, record in made.of_kind(LinearKey))
        empty.add(Record(BandwidthKey("gpu", 1 << 20, False), (10.0,)))
        empty.add(Record(replace(record.key, code="failed"), error="it failed"))
        with pytest.raises(ProfileError, match="no measured linear layer"):
            Predictor.fit(empty)
        empty.add(record)
        with pytest.raises(ProfileError, match="1 measured linear layer of the gpu, too few"):
            Predictor.fit(empty)

    def test_a_part_or_operator_without_measurements_is_refused(self):
        made = profile()
        gpu_only = Profile(made.description)
        for key, record in made.of_kind(LinearKey):
            if key.processor == "gpu":
                gpu_only.add(record)
        found = Predictor.fit(gpu_only)
        with pytest.raises(ProfileError, match="on the npu"):
            found.predict_us(linear_point("o", (512,), 512, 32, "matmul_nbits"), "npu")
        with pytest.raises(ProfileError, match="attention"):
            found.predict_layer_us(layer_key("attention", 1, context=5))

    def test_code_that_was_measured_last_counts(self):
        made = profile()
        for key, record in list(made.of_kind(LinearKey)):
            slower = tuple(sample * 3 for sample in record.samples_us)
            made.add(Record(replace(key, code="newer"), slower, taken_s=2.0))
        point = linear_point("o", (1024,), 1024, 32)
        old = next(record for key, record in profile().of_kind(LinearKey) if key.point == point)
        assert Predictor.fit(made).predict_us(point, "gpu").us == pytest.approx(3 * old.median_us)


class TestLayers:
    def test_operators_follow_their_costs(self, predictor):
        for tokens, context in ((1, 1000), (100, 500), (256, 1024)):
            found = predictor.predict_layer_us(layer_key("attention", tokens, context=context))
            assert found.us == pytest.approx(attention_us(tokens, context), rel=0.02)
            assert found.known
        norm = predictor.predict_layer_us(layer_key("rms_norm", 128, hidden=1024))
        assert norm.us == pytest.approx(5.0 + 128 * 0.3, rel=0.02)
        measured = predictor.predict_layer_us(layer_key("rms_norm", 32, hidden=1024))
        assert (measured.us, measured.source) == (5.0 + 32 * 0.3, "measured")

    def test_far_away_is_not_known(self, predictor):
        far = predictor.predict_layer_us(layer_key("attention", 1, context=100_000))
        assert not far.known
        assert far.low_us < far.us < far.high_us


class TestValidation:
    def test_no_slice_of_a_held_out_weight_shape_is_seen(self):
        points, times = staged_samples(sizes=(256, 512))
        seen = []

        class Spy(Rate):
            @classmethod
            def fit(cls, points, times_us):
                seen.append({(point.columns, point.rows) for point in points})
                return Rate.fit(points, times_us)

        predicted = held_out_predictions(Spy, dict(zip(points, times, strict=True)))
        assert set(predicted) == set(points)
        assert all(len(shapes) == 3 for shapes in seen)
        assert held_out_predictions(Rate, {points[0]: times[0]}) == {}

    def test_regret_is_the_time_lost_by_the_wrong_choice(self):
        whole = linear_point("o", (1024,), 1024, 64)
        half = replace(whole, member_rows=(512,))
        npu_whole, npu_half = (replace(point, form="matmul_nbits") for point in (whole, half))
        gpu, npu = {whole: 100.0, half: 50.0}, {npu_whole: 80.0, npu_half: 60.0}
        found = list(choices("npu", npu, gpu))
        assert sorted(found[0], key=str) == sorted(
            [(None, 100.0), (npu_half, 50.0), (npu_whole, 0.0)], key=str
        )
        # One shape is predicted from the other: 30 for a half, 120 for a whole, so the half is chosen.
        result = Score.of("rate", "npu", npu, gpu, held_out_predictions(Rate, npu))
        assert (result.regret, result.choices) == (0.0, 1)
        # The other way round a half seems to take 400 on the GPU and a whole 20: all is left on the GPU.
        gpu = {whole: 800.0, half: 10.0}
        wrong = Score.of("rate", "gpu", gpu, npu, held_out_predictions(Rate, gpu))
        assert wrong.regret == pytest.approx(800.0 / 60.0 - 1)

    def test_forms_are_choices_too(self):
        points, times = staged_samples(sizes=(256, 512))
        found = list(choices("npu", dict(zip(points, times, strict=True)), {}))
        assert len(found) == len(points) // 2
        assert all({point.form for point, _ in each} == set(FORMS[:2]) for each in found)


def random_point(rng: random.Random) -> LinearPoint:
    form = rng.choice((*FORMS, "matmul_nbits"))
    rows = tuple(rng.randrange(1, 5000) for _ in range(rng.randint(1, 3)))
    return linear_point("qkv", rows, rng.choice((256, 512, 1000, 9000)), rng.randrange(1, 600), form)


def ordered_points(rng: random.Random) -> tuple[LinearPoint, LinearPoint]:
    """Two slices of one order and stage, the second no smaller."""
    form = rng.choice(FORMS)
    columns = rng.choice((32, 250, 256, 700, 1024, 3000))
    less = linear_point("o", (rng.choice((8, 256, 500, 1024, 2000)),), columns, rng.randrange(1, 140), form)
    return less, more_work(less, rng)
