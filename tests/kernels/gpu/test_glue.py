import itertools

import numpy as np
import pytest

from heterollm.base import KernelError
from heterollm.kernels.gpu import (
    STEP_WORDS,
    DeviceMemory,
    GlueKernels,
    HeadShape,
    KvLayer,
    Rotation,
    Scores,
    Segments,
)
from heterollm.kernels.operators.attention import attend, exact_attention
from heterollm.kernels.operators.data import (
    GUARD,
    GuardedOutput,
    by_position,
    cache_view,
    empty_cache,
    fill_slot,
    run_launches,
    split_segments,
    step_slot,
)
from heterollm.kernels.operators.gated_activation import GatedCase, activate, exact_gated_activation
from heterollm.kernels.operators.logits import JoinCase
from heterollm.kernels.operators.norm import NormCase, exact_rms_norm, final_norm, rms_norm
from heterollm.kernels.operators.rope import RopeCase, rope_and_store

STYLES = ["vector", "simt"]
PAIRS = [
    *(("vector", np.float32), ("vector", np.float16), ("simt", np.float16)),
    pytest.param("simt", np.float32, marks=pytest.mark.slow),
]
"""Styles and types of activations; no device has the last pair by default."""
TOKENS = [1, 2, 3, 7, 31, 33, 65, 130]


def random(rng, shape, dtype=np.float32, scale=1.0):
    return (rng.standard_normal(shape) * scale).astype(dtype)


def splits_of(rows):
    """Nothing, everything and cuts on and off the vector width, the same and unlike fractions."""
    third = tuple(row // 3 for row in rows)
    eighths = tuple(row // 2 // 8 * 8 for row in rows)
    ragged = tuple(min(row, (5 + 11 * place) % (row + 1)) for place, row in enumerate(rows))
    only_first = (rows[0], *(0 for _ in rows[1:]))
    return list(dict.fromkeys([tuple(0 for _ in rows), tuple(rows), third, eighths, ragged, only_first]))


# -- norms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("style", "dtype"), PAIRS)
def test_rms_norm_adds_any_cut_and_stores_the_sum(cases, check, style, dtype):
    made = cases(style, dtype, 1)
    shapes = [(tokens, 96, split) for tokens in TOKENS for (split,) in splits_of((96,))]
    shapes += [(3, hidden, hidden // 2) for hidden in (1, 7, 8, 36, 100, 2048)]
    for shape in shapes:
        normed, (stored, total) = made(NormCase(*shape))
        np.testing.assert_array_equal(stored, total.astype(np.float32))
        check(normed, shape)


@pytest.mark.parametrize("style", STYLES)
def test_rms_norm_without_delta_leaves_the_residual(runtime, make, check, style):
    rng = np.random.default_rng(2)
    for scale, epsilon in ((1.0, 1e-6), (1e-4, 1e-5), (1e4, 1e-5), (0.0, 1e-5)):
        residual, weight = random(rng, (5, 120), scale=scale), random(rng, 120)
        slot, out = fill_slot(runtime, residual), GuardedOutput(runtime, (5, 120), np.float32)
        launch = rms_norm(
            make(style), slot, runtime.upload(weight), out.slot, hidden=120, tokens=5, epsilon=epsilon
        )
        run_launches(runtime, [launch])
        np.testing.assert_array_equal(slot.read(), residual)
        check((out.read(), exact_rms_norm(residual, weight, epsilon)), (scale, epsilon))


@pytest.mark.parametrize(("style", "dtype"), PAIRS)
def test_final_norm_starts_at_the_head_row_and_can_run_again(runtime, make, check, style, dtype):
    rng = np.random.default_rng(3)
    tokens, hidden = 33, 52
    residual, weight = random(rng, (tokens, hidden)), random(rng, hidden)
    delta = random(rng, (tokens, hidden), dtype)
    slot, step = fill_slot(runtime, residual), step_slot(runtime)
    expected = exact_rms_norm(residual + delta.astype(np.float32), weight, 1e-5)
    for (split,) in splits_of((hidden,)):
        out = GuardedOutput(runtime, (4, hidden), dtype)
        launch = final_norm(
            make(style, dtype),
            slot,
            runtime.upload(weight),
            out.slot,
            step,
            rows=4,
            epsilon=1e-5,
            delta=split_segments(runtime, delta, (hidden,), (split,)),
        )
        for head_row in (0, 17, tokens - 4):
            step.write(step_slot(runtime, head_row=head_row).read())
            run_launches(runtime, [launch])
            np.testing.assert_array_equal(slot.read(), residual)
            check((out.read(), expected[head_row : head_row + 4]), (split, head_row))


# -- gated activation and logits -----------------------------------------------------------------------------


@pytest.mark.parametrize(("style", "dtype"), PAIRS)
def test_gated_activation_matches_float64_for_any_cut(cases, check, style, dtype):
    made = cases(style, dtype, 4)
    shapes = [(tokens, 88, (24, 24)) for tokens in TOKENS]
    shapes += [(3, width, splits) for width in (1, 5, 88, 2056) for splits in splits_of((width, width))]
    for shape in shapes:
        check(*made(GatedCase(*shape, scale=4)), shape)


@pytest.mark.parametrize("style", STYLES)
def test_gated_activation_is_finite_and_accurate_everywhere(runtime, make, style):
    gate = np.concatenate([np.linspace(-30, 30, 4001), [-3e38, -1e4, -100, -88, 0, 88, 100, 1e4, 3e38]])
    value = np.stack([gate, np.ones_like(gate)]).astype(np.float32).reshape(1, -1)
    out = GuardedOutput(runtime, (1, gate.size), np.float32)
    gate_up = split_segments(runtime, value, (gate.size, gate.size), (0, 0))
    launch = activate(make(style), gate_up, out.slot, tokens=1, intermediate=gate.size)
    run_launches(runtime, [launch])
    expected = exact_gated_activation(value[:, : gate.size], value[:, gate.size :])
    np.testing.assert_allclose(out.read(), expected, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize(("style", "dtype"), PAIRS)
def test_join_logits_copies_every_value(cases, style, dtype):
    made = cases(style, dtype, 5)
    for rows, vocabulary in ((1, 1), (1, 515), (3, 515), (2, 4104)):
        for (split,) in splits_of((vocabulary,)):
            np.testing.assert_array_equal(*made(JoinCase(rows, vocabulary, split))[0])


# -- RoPE and the KV cache -----------------------------------------------------------------------------------


def run_rope(runtime, layers, cache, value, splits, *, shape, position, length=None):
    """Turn and store rows; return the queries."""
    tokens = len(value)
    angles = np.arange(shape.capacity + tokens)[:, None] * 0.7 ** np.arange(shape.head_dim // 2)[None, :]
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    out = GuardedOutput(runtime, (tokens, shape.heads, shape.head_dim), np.float32)
    launch = rope_and_store(
        layers,
        split_segments(runtime, value, shape.rows, splits),
        None,
        out.slot,
        KvLayer(cache, STEP_WORDS),
        step_slot(runtime, position, tokens if length is None else length),
        shape=shape,
        rotation=Rotation(*(runtime.upload(table) for table in tables)),
        tokens=tokens,
    )
    run_launches(runtime, [launch])
    return out.read()


@pytest.mark.parametrize(("style", "dtype"), PAIRS)
def test_rope_writes_queries_and_only_its_positions(cases, check, style, dtype):
    made = cases(style, dtype, 6)
    shapes = [(tokens, 8, 4, 32, None, False) for tokens in TOKENS]
    shapes += [(3, 1, 1, 64, 32, True), (3, 14, 2, 64, None, True), (2, 6, 1, 80, 32, False)]
    shapes += [(3, 2, 1, 96, 20, True), (2, 2, 2, 128, None, True), (2, 2, 1, 36, None, True)]
    shapes += [(2, 2, 1, 10, 6, True), (2, 2, 1, 2, 2, True), (2, 2, 1, 16, 0, True)]
    for case, (tokens, heads, kv_heads, head_dim, rotary, biased) in enumerate(shapes):
        for position, place in ((0, case), (9, case + 3)):
            shape = HeadShape(heads, kv_heads, head_dim, position + tokens + 2)
            choices = splits_of(shape.rows)
            splits = choices[place % len(choices)]
            for numbers in made(RopeCase(tokens, position, shape, splits, rotary=rotary, biased=biased)):
                check(numbers, (shape, tokens, position, splits, rotary))


@pytest.mark.parametrize("style", STYLES)
def test_rope_drops_tokens_past_the_length_or_the_capacity(runtime, make, style):
    rng = np.random.default_rng(7)
    value, shape = random(rng, (7, 3 * 32)), HeadShape(1, 1, 32, 12)
    for position, length, kept in ((0, 4, 4), (9, 7, 3)):
        cache = empty_cache(runtime, shape, np.float32)
        run_rope(
            *(runtime, make(style), cache, value, (0, 0, 0)), shape=shape, position=position, length=length
        )
        written = np.isfinite(by_position(cache_view(cache.read(), shape))).all(axis=(0, 1, 3))
        assert written.tolist() == [position <= at < position + kept for at in range(64)]
        assert np.isfinite(cache.read()).sum() == kept * 64


# -- attention -----------------------------------------------------------------------------------------------


def fill_cache(rng, cache, shape, positions, whole=False):
    """Write random keys and values, whole numbers if asked; those behind some positions stay NaN."""
    content = cache.read()
    view = cache_view(content, shape)
    for place in range(positions):
        values = rng.standard_normal((2, shape.kv_heads, shape.head_dim))
        view[place // 64, :, :, place % 64] = np.round(values * 4) if whole else values
    cache.write(content)
    return by_position(view)


def run_attention(runtime, layers, cache, q, *, shape, position, length=None, scale=None, parts=None):
    """Attend with the queries to a cache; return the output."""
    out = GuardedOutput(runtime, q.shape, np.float32)
    launches = attend(
        layers,
        fill_slot(runtime, q),
        KvLayer(cache, STEP_WORDS),
        out.slot,
        step_slot(runtime, position, len(q) if length is None else length),
        shape=shape,
        scores=Scores(scale or shape.head_dim**-0.5),
        tokens=len(q),
        parts=parts,
    )
    run_launches(runtime, launches)
    return out.read()


SHAPES = [(8, 4, 32), (14, 2, 64), (6, 1, 80), (1, 1, 96), (8, 4, 128), (3, 1, 36)]


# SIMT kernels are the slowest to compile for a CPU; heads of 32 have other tests below.
SLOW_SHAPES = ((8, 4, 32), (6, 1, 80), (1, 1, 96))


@pytest.mark.parametrize(
    ("style", "shape"),
    [
        pytest.param(
            style, shape, marks=[pytest.mark.slow] if (style == "simt" and shape in SLOW_SHAPES) else []
        )
        for style in STYLES
        for shape in SHAPES
    ],
    ids=str,
)
def test_attention_matches_float64(cases, check_attention, style, shape):
    made = cases(style, seed=8)
    for tokens, position in [(m, 0) for m in TOKENS] + [(1, 1), (1, 70), (3, 61), (33, 64), (7, 200)]:
        check_attention(made, shape=shape, tokens=tokens, position=position)


@pytest.mark.parametrize("style", STYLES)
def test_attention_reads_and_writes_half(cases, check_attention, style):
    made = cases(style, np.float16, 9)
    for shape in ((14, 2, 64), (3, 1, 36)):
        for tokens, position in ((1, 0), (1, 77), (33, 5)):
            check_attention(made, shape=shape, tokens=tokens, position=position)


@pytest.mark.parametrize("style", STYLES)
def test_attention_window_hides_what_lies_before_it(cases, check_attention, style):
    made = cases(style, seed=10)
    for window in (1, 2, 31, 64, 65, 100, 10_000):
        for tokens, position in ((1, 0), (1, 150), (33, 0), (40, 101)):
            for parts in (1, 2) if tokens == 1 else (1,):
                check_attention(
                    made,
                    shape=(8, 4, 32),
                    tokens=tokens,
                    position=position,
                    window=window,
                    parts=parts,
                )


@pytest.mark.parametrize("style", STYLES)
def test_decode_is_right_at_the_edges_of_pages_and_parts(cases, check_attention, style):
    made = cases(style, seed=11)
    for position in (0, 1, 63, 64, 127, 128, 255, 256, 257, 300, 2047):
        for parts in (None, 1, 2, 5):
            for heads, kv_heads in ((8, 4), (20, 2)):
                check_attention(
                    made,
                    shape=(heads, kv_heads, 32),
                    tokens=1,
                    position=position,
                    parts=parts,
                )


@pytest.mark.parametrize("style", STYLES)
def test_parts_of_narrow_and_odd_heads_stay_in_their_memory(cases, check_attention, style):
    made = cases(style, seed=17)
    for shape in ((4, 4, 8), (3, 1, 36)):
        for position in (5, 150):
            check_attention(
                made,
                shape=shape,
                tokens=1,
                position=position,
                parts=2,
            )


@pytest.mark.parametrize("style", STYLES)
def test_attention_of_few_tokens_may_be_split_too(cases, check_attention, style):
    made = cases(style, seed=12)
    for tokens, position in ((2, 0), (3, 127), (8, 126), (8, 250)):
        for parts in (1, 2, 4):
            check_attention(
                made,
                shape=(8, 4, 32),
                tokens=tokens,
                position=position,
                parts=parts,
            )


@pytest.mark.parametrize("style", STYLES)
def test_attention_is_stable_for_huge_scores(runtime, make, style):
    rng = np.random.default_rng(13)
    shape = HeadShape(8, 4, 32, 140)
    cache = empty_cache(runtime, shape, np.float32)
    # Whole numbers, so that scores of 1e4 are exact and only one key of each row carries weight.
    keys, values = fill_cache(rng, cache, shape, 130, whole=True)
    for tokens, parts in ((33, 1), (1, 1), (1, 3)):
        position = 130 - tokens
        q = np.round(random(rng, (tokens, 8, 32), scale=200))
        actual = run_attention(
            *(runtime, make(style), cache, q),
            shape=shape,
            position=position,
            scale=1.0,
            parts=parts,
        )
        expected = exact_attention(q, keys, values, position=position, scale=1.0)
        assert np.abs(np.einsum("mhd,hkd->hmk", q, np.repeat(keys[:, :130], 2, axis=0))).max() > 1e4
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("style", STYLES)
def test_chunks_give_what_one_prefill_gives(runtime, make, check, style):
    rng = np.random.default_rng(14)
    shape = HeadShape(8, 4, 32, 65)
    value = random(rng, (65, sum(shape.rows)))
    outputs = []
    for cuts in ((0, 65), (0, 32, 33, 65), (0, 1, 2, 40, 65)):
        cache = empty_cache(runtime, shape, np.float32)
        parts = []
        for start, stop in itertools.pairwise(cuts):
            options = {"shape": shape, "position": start}
            q = run_rope(runtime, make(style), cache, value[start:stop], (64, 32, 32), **options)
            parts.append(run_attention(runtime, make(style), cache, q, **options))
        outputs.append(np.concatenate(parts))
    check((outputs[1], outputs[0].astype(np.float64)))
    check((outputs[2], outputs[0].astype(np.float64)))


@pytest.mark.parametrize("style", STYLES)
def test_attention_leaves_rows_past_the_length(runtime, make, check, style):
    rng = np.random.default_rng(15)
    shape = HeadShape(8, 4, 32, 40)
    cache = empty_cache(runtime, shape, np.float32)
    keys, values = fill_cache(rng, cache, shape, 20)
    q = random(rng, (33, 8, 32))
    actual = run_attention(runtime, make(style), cache, q, shape=shape, position=0, length=20)
    check((actual[:20], exact_attention(q[:20], keys, values, position=0, scale=32**-0.5)))
    assert np.all(actual[20:].view(np.uint8) == GUARD)


def test_a_launch_follows_memory_that_moves(runtime, make, check):
    rng = np.random.default_rng(16)
    shape = HeadShape(2, 1, 32, 16)
    caches = [empty_cache(runtime, shape, np.float32) for _ in range(2)]
    filled = [fill_cache(rng, cache, shape, 9) for cache in caches]
    memory = DeviceMemory(None, caches[0].size_bytes)
    q = random(rng, (1, 2, 32))
    out = GuardedOutput(runtime, (1, 2, 32), np.float32)
    (launch,) = attend(
        make("vector"),
        fill_slot(runtime, q),
        KvLayer(memory, STEP_WORDS),
        out.slot,
        step_slot(runtime, 8, 1),
        shape=shape,
        scores=Scores(0.2),
        tokens=1,
        parts=1,
    )
    for cache, (keys, values) in zip(caches, filled, strict=True):
        memory.buffer = cache.buffer
        launch.rebind()
        run_launches(runtime, [launch])
        check((out.read(), exact_attention(q, keys, values, position=8, scale=0.2)))


# -- refusals ------------------------------------------------------------------------------------------------


def test_what_cannot_be_computed_is_refused(runtime, make):
    layers = make("vector")
    memory, step = runtime.shared((64,), np.float32), step_slot(runtime)
    with pytest.raises(KernelError, match="float32 or float16"):
        GlueKernels(runtime, np.float64, np.float32)
    with pytest.raises(KernelError, match="do not lie inside"):
        Segments(memory, memory, (8,), (9,))
    with pytest.raises(KernelError, match="do not lie inside"):
        Segments(memory, memory, (8, 8), (4,))
    delta = Segments(memory, memory, (16,), (0,))
    with pytest.raises(KernelError, match="cannot add"):
        rms_norm(layers, memory, memory, memory, hidden=8, tokens=1, epsilon=1e-5, delta=delta)
    with pytest.raises(KernelError, match="512 are needed"):
        rms_norm(layers, memory, memory, memory, hidden=64, tokens=2, epsilon=1e-5)
    with pytest.raises(KernelError, match="not one or two of 8"):
        activate(layers, Segments(memory, memory, (8, 8, 8), (0, 0, 0)), memory, tokens=1, intermediate=8)
    qkv, cache = Segments(memory, memory, (6, 3, 3), (0, 0, 0)), KvLayer(memory, STEP_WORDS)
    turn = {"rotation": Rotation(memory, memory), "tokens": 1}
    with pytest.raises(KernelError, match="must be even"):
        rope_and_store(layers, qkv, None, memory, cache, step, shape=HeadShape(2, 1, 3, 4), **turn)
    with pytest.raises(KernelError, match="are not 4 and 1 heads"):
        rope_and_store(layers, qkv, None, memory, cache, step, shape=HeadShape(4, 1, 2, 4), **turn)
    with pytest.raises(KernelError, match="cannot share"):
        HeadShape(3, 2, 4, 4)
    with pytest.raises(KernelError, match="KV cache"):
        attend(
            layers,
            *(memory, KvLayer(memory, STEP_WORDS), memory, step),
            shape=HeadShape(1, 1, 4, 4),
            scores=Scores(1.0),
            tokens=1,
        )
