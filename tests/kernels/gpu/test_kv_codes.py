"""The KV cache in 8 bits: codes with a scale for each position of a head."""

import numpy as np
import pytest

from heterollm.kernels.gpu import (
    KV_CODES,
    STEP_WORDS,
    GlueKernels,
    HeadShape,
    KvLayer,
    Rotation,
    page_elements,
    position_bytes,
)
from heterollm.kernels.operators.data import (
    cache_view,
    empty_cache,
    fill_slot,
    run_launches,
    scales_view,
    split_segments,
    step_slot,
)
from heterollm.kernels.operators.rope import RopeCase, rope_and_store

STYLES = ["vector", "simt"]
SHAPES = [(14, 2, 64), (6, 1, 80), (8, 4, 128), (3, 1, 36)]


def assert_nearest(numbers, head_dim, label):
    """Each value is the nearest of 255 multiples of the head's largest magnitude / 127."""
    actual, exact = (part.reshape(len(part), -1, head_dim) for part in numbers)
    step = np.abs(exact).max(-1, keepdims=True) / 127
    assert np.all(np.abs(actual - exact) <= 0.501 * step + 1e-30), label
    np.testing.assert_allclose(np.abs(actual).max(-1, keepdims=True), 127 * step, rtol=1e-5)


@pytest.mark.parametrize("style", STYLES)
def test_rope_stores_the_nearest_codes(cases, check, style):
    made = cases(style, seed=21, kv=KV_CODES)
    shapes = [(tokens, (8, 4, 32), {}) for tokens in (1, 2, 7, 33, 65)]
    shapes += [(3, (14, 2, 64), {"biased": True, "normed": True}), (3, (2, 1, 96), {"rotary": 20})]
    shapes += [
        (2, (2, 1, 10), {"rotary": 6, "biased": True}),
        (2, (2, 1, 2), {}),
        (2, (2, 1, 16), {"rotary": 0}),
    ]
    shapes += [(2, (4, 2, 32), {"normed": True, "joint": True}), (3, (4, 2, 32), {"limit": 0.7})]
    for place, (tokens, heads, options) in enumerate(shapes):
        for position in (0, 9):
            shape = HeadShape(*heads, position + tokens + 2)
            splits = tuple(min(rows, (0, 8 * place, 5 + 3 * place, rows)[place % 4]) for rows in shape.rows)
            queries, *stored = made(RopeCase(tokens, position, shape, splits, **options))
            label = (shape, tokens, position, splits, options)
            check(queries, label)
            for numbers in stored:
                assert_nearest(numbers, shape.head_dim, label)


@pytest.mark.parametrize("style", STYLES)
def test_zeros_are_stored_as_zeros_and_nan_as_nan(runtime, style):
    shape = HeadShape(1, 1, 32, 8)
    for value in (0.0, np.nan, np.inf):
        cache = empty_cache(runtime, shape, KV_CODES)
        rows = np.zeros((3, 96), np.float32)
        rows[1, 70] = value
        table = runtime.upload(np.ones((8, 16), np.float32))
        launch = rope_and_store(
            GlueKernels(runtime, np.float32, KV_CODES, style=style),
            split_segments(runtime, rows, shape.rows, (0, 0, 0)),
            None,
            fill_slot(runtime, np.zeros((3, 32), np.float32)),
            KvLayer(cache, STEP_WORDS),
            step_slot(runtime, 2, 3),
            shape=shape,
            rotation=Rotation(table, table),
            tokens=3,
        )
        run_launches(runtime, [launch])
        memory = cache.read()
        with np.errstate(invalid="ignore"):
            values = cache_view(memory, shape)[0, 1, 0, 2:5] * scales_view(memory, shape)[0, 1, 0, 2:5, None]
        assert np.array_equal(np.isfinite(values).all(1), [True, np.isfinite(value), True])
        assert not values[[0, 2]].any()


@pytest.mark.parametrize("style", STYLES)
def test_attention_over_codes_matches_float64(cases, check_attention, style):
    made = cases(style, seed=22, kv=KV_CODES)
    for shape in SHAPES:
        for tokens, position in [(m, 0) for m in (1, 3, 33, 65)] + [(1, 70), (3, 61), (33, 64), (1, 300)]:
            check_attention(made, shape=shape, tokens=tokens, position=position)
    for parts in (1, 2, 5):
        check_attention(made, shape=(14, 2, 64), tokens=1, position=300, parts=parts, window=100)
    half = cases(style, np.float16, 23, KV_CODES)
    check_attention(half, shape=(14, 2, 64), tokens=7, position=200)


def test_layout_of_a_position():
    assert position_bytes(64, KV_CODES) == 68
    assert position_bytes(64, np.float16) == 128
    assert page_elements(3, 64, KV_CODES) == 2 * 3 * 64 * 68
    assert page_elements(3, 64, np.float16) == 2 * 3 * 64 * 64
