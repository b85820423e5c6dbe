"""Keys and values in pages of any order, of which a sliding window has left some."""

import itertools

import numpy as np
import pytest

from heterollm.kernels.gpu import KV_CODES, PAGE_POSITIONS, HeadShape, Scores, pages_of
from heterollm.kernels.operators.attention import AttentionCase
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
