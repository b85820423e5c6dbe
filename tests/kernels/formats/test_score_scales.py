"""Steps and buckets of 8-bit attention scores: no calibrated maximum saturates, large scores stay large."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterollm.base import CalibrationError
from heterollm.kernels.formats import LARGEST_EXPONENT, buckets, score_scales
from heterollm.kernels.npu import HostNpu, ScoresShard

TOKENS, KEYS, HEAD_DIM, GROUP = 64, 512, 64, 3
KEEP = 0.2

LARGEST = st.floats(1e-3, 1e4)
MEMBERS = st.integers(1, 8).flatmap(
    lambda count: st.tuples(*[st.lists(LARGEST, min_size=count, max_size=count)] * 2)
)


@pytest.fixture(scope="module")
def host():
    npu = HostNpu()
    yield npu
    npu.close()


@given(MEMBERS, LARGEST)
def test_no_calibrated_maximum_saturates_and_the_constant_is_a_power_of_two(members, key_largest):
    queries, scores = members
    scale = score_scales(queries, key_largest, scores)
    assert 0 <= scale.exponent <= LARGEST_EXPONENT
    largest = 127 * (1 + 1e-12)
    assert key_largest / scale.key_step <= largest
    for step, query, score_step, score in zip(
        scale.query_steps, queries, scale.score_steps, scores, strict=True
    ):
        assert query / step <= largest
        assert score / score_step <= largest
        assert step * scale.key_step * 2.0**scale.exponent == score_step


@given(LARGEST, LARGEST, st.integers(0, LARGEST_EXPONENT), st.floats(-0.49, 0.49))
def test_a_lone_query_head_loses_less_than_half_a_bit(query, key, exponent, off):
    score = 2 ** (exponent + off) * query * key / 127
    scale = score_scales([query], key, [score])
    assert scale.exponent == exponent
    growths = (127 * scale.query_steps[0] / query, 127 * scale.score_steps[0] / score)
    assert min(growths) == pytest.approx(1)
    assert max(growths) < 2**0.5


def test_a_dead_head_has_steps():
    for queries, key, scores in (([0.0], 1.0, [0.0]), ([1.0, 0.0], 2.0, [3.0, 0.0]), ([0.0], 0.0, [0.0])):
        scale = score_scales(queries, key, scores)
        assert min(*scale.query_steps, scale.key_step, *scale.score_steps) > 0


def test_maxima_that_no_heads_have_are_refused():
    for maxima in (
        ([], 1.0, []),
        ([1.0], 1.0, [1.0, 2.0]),
        ([-1.0], 1.0, [1.0]),
        ([1.0], float("nan"), [1.0]),
        ([1.0], 1.0, [float("inf")]),
    ):
        with pytest.raises(CalibrationError, match="calibrate"):
            score_scales(*maxima)


def test_buckets_begin_with_the_calibrated_scale():
    assert buckets(1) == ((1.0, 1.0),)
    assert set(buckets(5)) == {(1.0, 1.0), (0.5, 1.0), (2.0, 1.0), (1.0, 0.5), (1.0, 2.0)}
    nine = buckets(9)
    assert nine[0] == buckets(5)[0] == (1.0, 1.0)
    assert len(set(nine)) == 9
    assert set(buckets(5)) < set(nine)


def heads(kind, seed, spread=1.0):
    """Return queries [GROUP, TOKENS, HEAD_DIM] and keys [KEYS, HEAD_DIM] of one key head."""
    generator = np.random.default_rng(seed)
    queries = generator.standard_normal((GROUP, TOKENS, HEAD_DIM))
    keys = generator.standard_normal((KEYS, HEAD_DIM))
    if kind == "skewed":
        # As in trained models: a few channels with large values and a common offset, and a sink.
        channels = np.exp(0.7 * generator.standard_normal(HEAD_DIM))
        keys = keys * channels + 2 * channels * (channels > 2)
        queries *= np.exp(0.5 * generator.standard_normal((GROUP, 1, HEAD_DIM)))
        keys[0] *= 0.2
    return queries * spread, keys * spread**-0.5


def recall(host, scale, count, queries, keys):
    """Return the share of the exact top fifth that codes find, and how many codes saturate."""
    relative = (
        max(np.abs(own).max() / (127 * step) for own, step in zip(queries, scale.query_steps, strict=True)),
        np.abs(keys).max() / (127 * scale.key_step),
    )
    query_factor, key_factor = min(
        buckets(count), key=lambda pair: sum((a - b) ** 2 for a, b in zip(relative, pair, strict=True))
    )
    steps = query_factor * np.array(scale.query_steps)[:, None, None]
    codes = {
        "queries": on_codes(queries / steps).reshape(1, -1, HEAD_DIM),
        "keys": on_codes(keys / (key_factor * scale.key_step))[None],
    }
    found = np.zeros((1, GROUP * TOKENS, KEYS), np.uint8)
    shard = ScoresShard(1, KEYS, HEAD_DIM, scale.exponent)
    host.prepare(shard, GROUP * TOKENS).bind(codes, {"scores": found})()
    exact = (queries @ keys.T).reshape(-1, KEYS)
    visible = KEYS - TOKENS + 1 + np.tile(np.arange(TOKENS), GROUP)
    shares = []
    for row, codes_row, seen in zip(exact, found[0], visible, strict=True):
        most = round(KEEP * seen)
        wanted = np.argsort(-row[:seen], kind="stable")[:most]
        chosen = np.argsort(-codes_row[:seen].astype(int), kind="stable")[:most]
        shares.append(len(np.intersect1d(wanted, chosen)) / most)
    return np.mean(shares), np.isin(found, (0, 255)).mean()


def on_codes(values):
    return (np.clip(np.rint(values), -128, 127) + 128).astype(np.uint8)


@pytest.mark.parametrize(
    ("kind", "count", "least"),
    [
        ("random", 1, 0.97),
        ("random", 5, 0.98),
        ("random", 9, 0.98),
        ("skewed", 1, 0.94),
        ("skewed", 5, 0.955),
        ("skewed", 9, 0.965),
    ],
)
def test_codes_find_the_largest_fifth(host, kind, count, least):
    windows = [heads(kind, 0, spread) for spread in (0.5, 0.7, 1.0, 1.4, 2.0)]
    maxima = [
        (
            np.abs(queries).max(axis=(1, 2)),
            np.abs(keys).max(),
            np.abs(queries @ keys.T).max(axis=(1, 2)),
        )
        for queries, keys in windows
    ]
    # The static scale holds the largest values of all windows; buckets lie around the mean ones.
    over = np.max if count == 1 else np.mean
    scale = score_scales(*(over([own[part] for own in maxima], axis=0) for part in range(3)))
    found = [recall(host, scale, count, *window) for window in windows]
    assert min(share for share, _ in found) > least
    assert max(saturated for _, saturated in found) < (1e-4 if count == 1 else 5e-3)
