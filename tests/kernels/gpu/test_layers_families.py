"""What only some families do between their linear layers."""

import numpy as np
import pytest

from heterollm.base import KernelError
from heterollm.kernels.formats import LINEAR_NMSE, linear_errors
from heterollm.kernels.formats import reference_layers as reference
from heterollm.kernels.gpu import (
    STEP_HEAD_ROW,
    STEP_LENGTH,
    STEP_POSITION,
    STEP_WORDS,
    GpuLayers,
    HeadShape,
    KvLayer,
    Rotation,
    Scores,
    Segments,
    head_stride,
)

STYLES = ["vector", "simt"]
TYPES = [np.float32, np.float16]


def check(actual, expected, label=""):
    """The gates of one operator; float32 is held 100 times tighter."""
    compute = "fp16" if actual.dtype == np.float16 else "fp32"
    errors = linear_errors(actual.reshape(-1, actual.shape[-1]), expected.reshape(-1, actual.shape[-1]))
    assert errors.within(compute), (label, errors)
    if compute == "fp32":
        assert np.square(actual - expected).sum() <= LINEAR_NMSE["fp32"] / 100 * np.square(expected).sum()


def upload(runtime, values):
    slot = runtime.shared(values.shape, values.dtype)
    slot.array[...] = values
    return slot


def segments(runtime, value, rows, splits):
    parts = reference.split_members(value, rows, splits)
    filled = (part if part.size else np.full((1, 1), np.nan, value.dtype) for part in parts)
    return Segments(*(upload(runtime, part) for part in filled), tuple(rows), tuple(splits))


def make_step(runtime, position=0, length=0, head_row=0):
    step = runtime.shared((STEP_WORDS,), np.int32)
    step.array[[STEP_POSITION, STEP_LENGTH, STEP_HEAD_ROW]] = position, length, head_row
    return step


def random(rng, shape, dtype=np.float32, scale=1.0):
    return (rng.standard_normal(shape) * scale).astype(dtype)


# -- norms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("style", STYLES)
def test_a_delta_is_biased_and_normed_before_it_is_added(runtime, style, dtype):
    rng = np.random.default_rng(1)
    layers = GpuLayers(runtime, dtype, dtype, style=style)
    for tokens, hidden, split, has_bias, has_post in (
        *((3, 100, 41, *flags) for flags in ((True, False), (False, True), (True, True))),
        (1, 7, 0, True, True),
        (33, 512, 512, False, True),
        (2, 2052, 1000, True, True),
    ):
        label = (tokens, hidden, split, has_bias, has_post)
        # A delta far larger than the residual: without its norm the sum would be another one.
        residual, delta = random(rng, (tokens, hidden)), random(rng, (tokens, hidden), dtype, 40)
        weight, bias, post = (random(rng, hidden) + 1 for _ in range(3))
        added = delta.astype(np.float64) + bias if has_bias else delta.astype(np.float64)
        if has_post:
            added = reference.rms_norm(added, post, 1e-5)
        options = {
            "epsilon": 1e-5,
            "delta": segments(runtime, delta, (hidden,), (split,)),
            "bias": runtime.upload(bias) if has_bias else None,
            "post": runtime.upload(post) if has_post else None,
        }
        slot, scale = upload(runtime, residual), runtime.upload(weight)
        out = runtime.shared((tokens, hidden), dtype)
        expected = reference.rms_norm(residual + added, weight, 1e-5)
        head_row = tokens // 2
        step = make_step(runtime, head_row=head_row)
        layers.final_norm(slot, scale, out, step, rows=tokens - head_row, **options)()
        runtime.finish()
        check(out.array[: tokens - head_row], expected[head_row:], label)
        np.testing.assert_array_equal(slot.array, residual)
        layers.rms_norm(slot, scale, out, hidden=hidden, tokens=tokens, **options)()
        runtime.finish()
        check(out.array, expected, label)
        check(slot.array, residual + added, label)


# -- positions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("style", STYLES)
def test_heads_are_normed_before_they_turn(runtime, style, dtype):
    rng = np.random.default_rng(2)
    layers = GpuLayers(runtime, dtype, dtype, style=style)
    for heads, kv_heads, head_dim, rotary, tokens, has_bias in (
        (4, 2, 32, 32, 3, False),
        (3, 1, 36, 20, 5, True),
        (2, 2, 10, 6, 2, True),
        (2, 1, 128, 0, 33, False),
    ):
        rows = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        capacity, position = tokens + 5, 4
        value = random(rng, (tokens, sum(rows)), dtype, 3)
        bias, norms = random(rng, sum(rows)), random(rng, 2 * head_dim) + 1
        angles = np.arange(capacity)[:, None] * 0.7 ** np.arange(rotary // 2)[None, :]
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        tables = [runtime.upload(table if table.size else np.zeros(1, np.float32)) for table in (cos, sin)]
        cache = runtime.shared((2 * kv_heads * head_stride(capacity, head_dim, dtype),), dtype)
        q_out = runtime.shared((tokens, rows[0]), np.float32)
        layers.rope_and_store(
            segments(runtime, value, rows, (rows[0] // 3, 5, rows[2])),
            runtime.upload(bias) if has_bias else None,
            q_out,
            KvLayer(cache, 0),
            make_step(runtime, position, tokens),
            shape=HeadShape(heads, kv_heads, head_dim, capacity),
            rotation=Rotation(*tables, rotary, runtime.upload(norms), 1e-4),
            tokens=tokens,
        )()
        runtime.finish()
        exact = value.astype(np.float64) + (bias if has_bias else 0)
        q, k, v = (part.reshape(-1, head_dim) for part in np.split(exact, np.cumsum(rows)[:-1], axis=1))
        span = slice(position, position + tokens)
        q, k = (
            reference.rotate(
                reference.rms_norm(part, weight, 1e-4).reshape(tokens, -1, head_dim), cos[span], sin[span]
            )
            for part, weight in ((q, norms[:head_dim]), (k, norms[head_dim:]))
        )
        check(q_out.array.reshape(q.shape), q, (heads, head_dim))
        blocks = cache.array.reshape(2, kv_heads, -1)[..., : capacity * head_dim]
        stored = blocks.reshape(2, kv_heads, capacity, head_dim)[:, :, span].transpose(0, 2, 1, 3)
        check(stored[0].copy(), k, (heads, head_dim))
        check(stored[1].copy(), v.reshape(k.shape), (heads, head_dim))


# -- attention -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", STYLES)
def test_scores_are_capped(runtime, style):
    rng = np.random.default_rng(3)
    heads, kv_heads, head_dim = 6, 2, 36
    layers = GpuLayers(runtime, np.float32, np.float32, style=style)
    for tokens, position, parts, window in ((1, 150, 1, 0), (1, 150, 3, 40), (33, 0, 1, 0), (40, 77, 1, 50)):
        capacity = position + tokens + 2
        stride = head_stride(capacity, head_dim, np.float32)
        cache = runtime.shared((2 * kv_heads * stride,), np.float32)
        cache.array[:] = np.nan
        blocks = cache.array.reshape(2, kv_heads, stride)[..., : capacity * head_dim]
        content = blocks.reshape(2, kv_heads, capacity, head_dim)
        content[:, :, : position + tokens] = random(rng, (2, kv_heads, position + tokens, head_dim))
        # Scores from far below the cap to ten times it.
        q = random(rng, (tokens, heads, head_dim)) * np.logspace(-3, 1.5, heads)[:, None].astype(np.float32)
        out = runtime.shared((tokens, heads, head_dim), np.float32)
        for launch in layers.attention(
            *(upload(runtime, q), KvLayer(cache, 0), out, make_step(runtime, position, tokens)),
            shape=HeadShape(heads, kv_heads, head_dim, capacity),
            scores=Scores(0.3, window, soft_cap=4.0),
            tokens=tokens,
            bucket=256,
            parts=parts,
        ):
            launch()
        runtime.finish()
        options = {"position": position, "scale": 0.3, "window": window}
        expected = reference.attention(q, *content, soft_cap=4.0, **options)
        check(out.array, expected, (tokens, parts, window))
        plain = reference.attention(q, *content, **options)
        assert not linear_errors(*(x.reshape(-1, head_dim) for x in (out.array, plain))).within("fp16")


# -- point by point ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activations_with_and_without_bias(runtime, style, dtype, activation):
    rng = np.random.default_rng(4)
    layers = GpuLayers(runtime, dtype, dtype, style=style)
    for tokens, width, splits in ((1, 8, (0, 8)), (3, 100, (41, 7)), (33, 2056, (2056, 0))):
        gate, up = random(rng, (tokens, width), dtype, 4), random(rng, (tokens, width), dtype)
        gate[0, :4] = 0, -60, 60, -1e3
        bias = random(rng, 2 * width)
        source = segments(runtime, np.concatenate([gate, up], axis=1), (width, width), splits)
        for shift in (None, bias):
            out = runtime.shared((tokens, width), dtype)
            layers.gated_activation(
                source,
                out,
                tokens=tokens,
                intermediate=width,
                activation=activation,
                bias=None if shift is None else runtime.upload(shift),
            )()
            runtime.finish()
            gates, ups = (
                part.astype(np.float64) + (0 if shift is None else offset)
                for part, offset in ((gate, bias[:width]), (up, bias[width:]))
            )
            check(out.array, reference.gated_activation(gates, ups, activation), (tokens, width))


@pytest.mark.parametrize("style", STYLES)
def test_logits_are_capped_in_place(runtime, style):
    rng = np.random.default_rng(5)
    layers = GpuLayers(runtime, np.float32, np.float32, style=style)
    for rows, width in ((1, 5), (3, 2060)):
        logits = random(rng, (rows, width)) * np.logspace(-5, 3, width).astype(np.float32)
        slot = runtime.shared((rows + 1, width), np.float32)
        slot.array[:rows], slot.array[rows:] = logits, np.nan
        layers.soft_cap(slot, 30.0, rows=rows, vocabulary=width)()
        runtime.finish()
        expected = 30 * np.tanh(logits.astype(np.float64) / 30)
        check(slot.array[:rows], expected)
        # Small logits keep their precision, which a difference of exponentials would not.
        np.testing.assert_allclose(slot.array[:rows], expected, rtol=2e-6)
        assert np.isnan(slot.array[rows:]).all()
    with pytest.raises(KernelError, match="soft cap logits"):
        layers.soft_cap(slot, 30.0, rows=5, vocabulary=2060)
