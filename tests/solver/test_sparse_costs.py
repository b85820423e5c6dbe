"""Times of sparse attention from the records of a profile, at sizes that were measured and at others."""

import pytest

from heterollm.model.known import ModelSize
from heterollm.profiler.measure import layer_key
from heterollm.profiler.measure.sparse_cases import sparse_cases
from heterollm.profiler.predict import Predictor
from heterollm.profiler.records import LinearKey, LinearPoint, Profile, Record, SparseKey
from heterollm.solver import ProfileCosts

SHAPE = ModelSize(576, 1536, 2, 9, 3, 2048, True, 64, 8192).shape("small")
DESCRIPTION = {
    "device": "made",
    "time": "real",
    "npu": None,
    "cache_bytes": 0,
    "npu_copies_by_length": False,
}

COSTS_US = {
    "score_codes": lambda key: 5 + 1e-5 * key.heads * (key.group * key.tokens + key.keys) * key.head_dim,
    "scores": lambda key: 300 + 40 * key.heads + 2e-8 * pairs(key) * key.head_dim,
    "score_estimate": lambda key: 8 + 1e-6 * pairs(key) * key.head_dim,
    "selection": lambda key: 9 + 3e-6 * seen(key),
    "sparse_attention": lambda key: (
        7
        + 1e-5 * key.heads * key.group * key.tokens * key.head_dim
        + 1e-7 * key.keep * seen(key) * key.head_dim
    ),
}


def pairs(key):
    return key.heads * key.group * key.tokens * key.keys


def seen(key):
    return pairs(key) - key.heads * key.group * key.tokens * (key.tokens - 1) / 2


def profile(*, quick=False, left_out=()):
    made = Profile(DESCRIPTION)
    for tokens in (1, 32):
        made.add(Record(LinearKey("gpu", LinearPoint.of(SHAPE.layer[0], tokens), "code"), (10.0 * tokens,)))
    for case in sparse_cases(SHAPE, quick=quick):
        if case.operator not in left_out:
            made.add(Record(case.key, (COSTS_US[case.operator](case.key),), taken_s=1.0))
    return made


def key(operator, tokens, keys, heads=1, keep=0.0):
    return SparseKey(operator, tokens, keys, heads, 3, 64, keep, "")


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize(("tokens", "keys"), [(256, 4096), (512, 3072), (1024, 6144), (128, 1024)])
def test_times_follow_the_sizes(quick, tokens, keys):
    costs = ProfileCosts(profile(quick=quick), SHAPE)
    found = costs.sparse_attention(tokens, keys)
    near = {"rel": 0.02}
    assert found.quantise_us == pytest.approx(COSTS_US["score_codes"](key("", tokens, keys, 3)), **near)
    assert found.scores_us.keys() == {1, 2}  # four heads are more than the model has
    for heads, time_us in found.scores_us.items():
        assert time_us == pytest.approx(COSTS_US["scores"](key("", tokens, keys, heads)), **near)
    assert found.estimate_us == pytest.approx(COSTS_US["score_estimate"](key("", tokens, keys)), **near)
    assert found.select_us == pytest.approx(COSTS_US["selection"](key("", tokens, keys)), **near)
    for keep in (0.1, 0.35, 1.0):
        expected_us = COSTS_US["sparse_attention"](key("", tokens, keys, keep=keep))
        assert found.attention_us(keep) == pytest.approx(expected_us, **near)


def test_without_an_npu_the_gpu_estimates():
    found = ProfileCosts(profile(left_out=["scores"]), SHAPE).sparse_attention(256, 1024)
    assert found.scores_us == {}
    assert found.estimate_us > 0


def test_a_profile_without_sparse_attention_knows_none():
    for left_out in (COSTS_US, ["selection"]):
        assert ProfileCosts(profile(left_out=left_out), SHAPE).sparse_attention(256, 1024) is None


def test_dense_attention_is_that_of_the_last_tokens():
    made = profile()
    for tokens, position, time_us in ((256, 768, 500.0), (256, 0, 100.0)):
        made.add(Record(layer_key(SHAPE, "attention", tokens, position), (time_us,), taken_s=1.0))
    costs = ProfileCosts(made, SHAPE)
    assert costs.dense_attention_us(256, 1024) == 500.0
    assert costs.dense_attention_us(256, 256) == 100.0


def test_kept_models_answer_as_fitted_ones():
    predictor = Predictor.fit(profile())
    again = Predictor.fit(profile(), predictor.fits)
    asked = key("sparse_attention", 384, 1536, keep=0.3)
    assert again.sparse.predict(asked) == predictor.sparse.predict(asked)


def test_a_profile_file_keeps_the_records(tmp_path):
    made, path = profile(), tmp_path / "profile.json"
    made.save(path)
    assert Profile.load(path).records.keys() == made.records.keys()
