"""Keys and values in pages of any order, of which a sliding window has left some."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from heterollm.kernels.gpu import (
    KV_CODES,
    PAGE_POSITIONS,
    STEP_LENGTH,
    STEP_POSITION,
    STEP_WORDS,
    HeadShape,
    KvLayer,
    Scores,
    pages_of,
)
from heterollm.kernels.operators.attention import AttentionCase, attend
from heterollm.kernels.operators.data import (
    cache_view,
    empty_cache,
    fill_slot,
    run_launches,
    scales_view,
)
from heterollm.kernels.operators.operator import check_case
from heterollm.kernels.operators.rope import RopeCase

STYLES = ["vector", "simt"]
SHAPES = [(14, 2, 64), (3, 1, 36)]
TYPES = [np.float32, np.float16, KV_CODES]


def places(generator, first, stop):
    """Pages in random order, none before the first."""
    before = first // PAGE_POSITIONS
    return (*(-1,) * before, *map(int, generator.permutation(pages_of(stop) - before) + 1))


def check(numbers, tolerance=1e-11):
    actual, exact = numbers
    assert np.square(actual - exact).sum() <= tolerance * np.square(exact).sum()


@pytest.mark.parametrize("kv", TYPES)
@pytest.mark.parametrize("style", STYLES)
def test_attention_reads_the_pages_of_its_window(cases, style, kv):
    made = cases(style, seed=31, kv=kv)
    passes = (1, 300, 64), (1, 64, 17), (5, 250, 200), (9, 190, 17), (70, 200, 64)
    for heads, (tokens, position, window) in itertools.product(SHAPES, passes):
        shape, scores = HeadShape(*heads, position + tokens), Scores(heads[2] ** -0.5, window)
        pages = places(made.generator, max(0, position - window + 1), position + tokens)
        check(*made(AttentionCase(tokens, position, shape, scores, pages=pages)))


@pytest.mark.parametrize("kv", [np.float32, np.float16])
def test_the_style_coalesced_reads_pages(cases, kv):
    made = cases("simt", seed=32, kv=kv)
    for tokens in (1, 9):
        pages = places(made.generator, 111, 150 + tokens)
        shape, scores = HeadShape(6, 2, 64, 150 + tokens), Scores(0.125, 40)
        check(*made(AttentionCase(tokens, 150, shape, scores, style="coalesced", pages=pages)))


@pytest.mark.parametrize("kv", TYPES)
@pytest.mark.parametrize("style", STYLES)
def test_bits_do_not_depend_on_places(cases, style, kv):
    layers = cases(style, kv=kv).layers
    for tokens, position in ((1, 200), (40, 130)):
        shape, found = HeadShape(8, 2, 64, position + tokens), []
        for pages in ((), (1, 2, 3, 4), (4, 2, 1, 3)):
            case = AttentionCase(tokens, position, shape, pages=pages)
            found.append(check_case(case, layers, np.random.default_rng(5))["attended"][0])
        assert np.array_equal(found[0], found[1])
        assert np.array_equal(found[0], found[2])


@pytest.mark.parametrize("kv", TYPES)
@pytest.mark.parametrize("style", STYLES)
def test_rope_writes_to_pages(cases, style, kv):
    made = cases(style, seed=33, kv=kv)
    for heads, (tokens, position) in itertools.product(SHAPES, [(1, 0), (1, 191), (7, 60), (130, 100)]):
        shape = HeadShape(*heads, position + tokens)
        pages = places(made.generator, position, position + tokens)
        queries, *stored = made(RopeCase(tokens, position, shape, (0, 0, 0), pages=pages))
        check(queries)
        for actual, exact in stored:
            check((actual, exact), {np.float32: 1e-11, np.float16: 1e-6, KV_CODES: 1e-3}[kv])


@pytest.mark.parametrize("kv", TYPES)
@pytest.mark.parametrize("style", STYLES)
def test_a_row_of_several_sequences_has_the_bits_of_its_own(make, runtime, style, kv):
    layers, generator = make(style, kv=kv), np.random.default_rng(7)
    shape, positions = HeadShape(12, 2, 64, 400), (0, 63, 64, 399, 200)
    pages = pages_of(shape.capacity)
    content = empty_cache(runtime, replace(shape, capacity=20 * PAGE_POSITIONS), kv).read()
    if kv is KV_CODES:
        cache_view(content, shape)[...] = generator.integers(-127, 128, cache_view(content, shape).shape)
        scales_view(content, shape)[...] = generator.uniform(0.01, 0.02, scales_view(content, shape).shape)
    else:
        content[...] = generator.standard_normal(content.shape)
    cache = KvLayer(fill_slot(runtime, content), STEP_WORDS)
    words = np.zeros((len(positions), STEP_WORDS + pages), np.int32)
    words[:, STEP_POSITION], words[0, STEP_LENGTH] = positions, len(positions)
    # Sequences may share pages.
    words[:, STEP_WORDS:] = [generator.permutation(20)[:pages] for _ in positions]
    queries = generator.standard_normal((len(positions), shape.query_columns)).astype(np.float32)

    def attended(rows, words, **options):
        out = runtime.shared(rows.shape, np.float32)
        inputs = fill_slot(runtime, rows), cache, out, fill_slot(runtime, words.ravel())
        scores = Scores(0.125, window)
        launches = attend(layers, *inputs, shape=shape, scores=scores, tokens=len(rows), **options)
        run_launches(runtime, launches)
        return out.read()

    for parts, window in ((1, 0), (3, 0), (3, 90)):
        found = attended(queries, words, parts=parts, row_words=words.shape[1])
        for row, own in enumerate(words):
            own = own.copy()
            own[STEP_LENGTH] = 1
            alone = attended(queries[row : row + 1], own, parts=parts)
            assert np.array_equal(found[row], alone[0]), (parts, window, row)
