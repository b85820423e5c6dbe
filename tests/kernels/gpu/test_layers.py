import itertools

import numpy as np
import pytest

from heterollm.base import KernelError
from heterollm.kernels.formats import LINEAR_NMSE, SINGLE_FACTOR
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
TOKENS = [1, 2, 3, 7, 31, 33, 65, 130]
GUARD = 0xA5
GUARD_BYTES = 4096
PADDING_ROWS = 3

LAYERS: dict[tuple, GpuLayers] = {}


@pytest.fixture
def make(runtime):
    """GpuLayers of a style and types, made once."""

    def get(style, activation=np.float32, kv=np.float32):
        key = (runtime, style, activation, kv)
        if key not in LAYERS:
            LAYERS[key] = GpuLayers(runtime, activation, kv, style=style)
        return LAYERS[key]

    return get


class Slot:
    """An output slot with a guard pattern behind it."""

    def __init__(self, runtime, shape, dtype):
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.used = int(np.prod(shape)) * self.dtype.itemsize
        self.shared = runtime.shared((self.used + GUARD_BYTES,), np.uint8)
        self.shared.array[:] = GUARD

    def read(self):
        assert np.all(self.shared.array[self.used :] == GUARD), "bytes behind the output were written"
        return self.shared.view(self.dtype, self.shape).copy()


def run(runtime, *launches):
    """Enqueue and wait; until then the launches keep the memory that they name."""
    for launch in launches:
        launch()
    runtime.finish()


def upload(runtime, values):
    slot = runtime.shared(values.shape, values.dtype)
    slot.array[...] = values
    return slot


def make_segments(runtime, value, rows, splits):
    """Both segments of a value; the first has NaN rows behind it, as padded NPU output may."""
    a, b = reference.split_members(value, rows, splits)
    a = np.concatenate([a, np.full((PADDING_ROWS, a.shape[1]), np.nan, a.dtype)])
    dummy = np.full((1, 1), np.nan, value.dtype)
    a_slot, b_slot = (upload(runtime, part if part.size else dummy) for part in (a, b))
    return Segments(a_slot, b_slot, tuple(rows), tuple(splits))


def make_step(runtime, position=0, length=0, head_row=0):
    step = runtime.shared((STEP_WORDS,), np.int32)
    step.array[[STEP_POSITION, STEP_LENGTH, STEP_HEAD_ROW]] = position, length, head_row
    return step


def random(rng, shape, dtype=np.float32, scale=1.0):
    return (rng.standard_normal(shape) * scale).astype(dtype)


def check(actual, expected, label=""):
    """NMSE of the whole and of every row; float32 is held 100 times tighter than the gate."""
    half = actual.dtype == np.float16
    gate = LINEAR_NMSE["fp16"] if half else LINEAR_NMSE["fp32"] / 100
    error = np.square(actual.astype(np.float64) - expected)
    power = np.square(expected) + 1e-30
    assert error.sum() <= gate * power.sum(), label
    width = expected.shape[-1]
    rows = error.reshape(-1, width).sum(1) / power.reshape(-1, width).sum(1)
    assert np.all(rows <= SINGLE_FACTOR * gate), (label, rows.max())


def splits_of(rows):
    """Nothing, everything and cuts on and off the vector width, the same and unlike fractions."""
    third = tuple(row // 3 for row in rows)
    eighths = tuple(row // 2 // 8 * 8 for row in rows)
    ragged = tuple(min(row, (5 + 11 * place) % (row + 1)) for place, row in enumerate(rows))
    only_first = (rows[0], *(0 for _ in rows[1:]))
    return list(dict.fromkeys([tuple(0 for _ in rows), tuple(rows), third, eighths, ragged, only_first]))


# -- norms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("style", STYLES)
def test_rms_norm_adds_any_cut_and_stores_the_sum(runtime, make, style, dtype):
    rng = np.random.default_rng(1)
    cases = [(tokens, 96, split) for tokens in TOKENS for (split,) in splits_of((96,))]
    cases += [(3, hidden, hidden // 2) for hidden in (1, 7, 8, 36, 100, 2048)]
    for tokens, hidden, split in cases:
        residual, weight = random(rng, (tokens, hidden), scale=3), random(rng, hidden)
        delta = random(rng, (tokens, hidden), dtype)
        slot, out = Slot(runtime, (tokens, hidden), np.float32), Slot(runtime, (tokens, hidden), dtype)
        slot.shared.view(np.float32, residual.shape)[...] = residual
        run(
            runtime,
            make(style, dtype).rms_norm(
                slot.shared,
                runtime.upload(weight),
                out.shared,
                hidden=hidden,
                tokens=tokens,
                epsilon=1e-5,
                delta=make_segments(runtime, delta, (hidden,), (split,)),
            ),
        )
        total = residual + delta.astype(np.float32)
        np.testing.assert_array_equal(slot.read(), total)
        check(out.read(), reference.rms_norm(total, weight, 1e-5), (tokens, hidden, split))


@pytest.mark.parametrize("style", STYLES)
def test_rms_norm_without_delta_leaves_the_residual(runtime, make, style):
    rng = np.random.default_rng(2)
    for scale, epsilon in ((1.0, 1e-6), (1e-4, 1e-5), (1e4, 1e-5), (0.0, 1e-5)):
        residual, weight = random(rng, (5, 120), scale=scale), random(rng, 120)
        slot, out = upload(runtime, residual), Slot(runtime, (5, 120), np.float32)
        run(
            runtime,
            make(style).rms_norm(
                slot, runtime.upload(weight), out.shared, hidden=120, tokens=5, epsilon=epsilon
            ),
        )
        np.testing.assert_array_equal(slot.array, residual)
        check(out.read(), reference.rms_norm(residual, weight, epsilon), (scale, epsilon))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("style", STYLES)
def test_final_norm_starts_at_the_head_row_and_can_run_again(runtime, make, style, dtype):
    rng = np.random.default_rng(3)
    tokens, hidden = 33, 52
    residual, weight = random(rng, (tokens, hidden)), random(rng, hidden)
    delta = random(rng, (tokens, hidden), dtype)
    slot, step = upload(runtime, residual), make_step(runtime)
    expected = reference.rms_norm(residual + delta.astype(np.float32), weight, 1e-5)
    for (split,) in splits_of((hidden,)):
        out = Slot(runtime, (4, hidden), dtype)
        launch = make(style, dtype).final_norm(
            slot,
            runtime.upload(weight),
            out.shared,
            step,
            rows=4,
            epsilon=1e-5,
            delta=make_segments(runtime, delta, (hidden,), (split,)),
        )
        for head_row in (0, 17, tokens - 4):
            step.array[STEP_HEAD_ROW] = head_row
            run(runtime, launch)
            np.testing.assert_array_equal(slot.array, residual)
            check(out.read(), expected[head_row : head_row + 4], (split, head_row))


# -- gated activation and logits -----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("style", STYLES)
def test_gated_activation_matches_float64_for_any_cut(runtime, make, style, dtype):
    rng = np.random.default_rng(4)
    cases = [(tokens, 88, (24, 24)) for tokens in TOKENS]
    cases += [(3, width, splits) for width in (1, 5, 88, 2056) for splits in splits_of((width, width))]
    for tokens, width, splits in cases:
        value = random(rng, (tokens, 2 * width), dtype, 4)
        out = Slot(runtime, (tokens, width), dtype)
        gate_up = make_segments(runtime, value, (width, width), splits)
        run(
            runtime,
            make(style, dtype).gated_activation(gate_up, out.shared, tokens=tokens, intermediate=width),
        )
        check(out.read(), reference.gated_activation(*np.split(value, 2, axis=1)), (tokens, width, splits))


@pytest.mark.parametrize("style", STYLES)
def test_gated_activation_is_finite_and_accurate_everywhere(runtime, make, style):
    gate = np.concatenate([np.linspace(-30, 30, 4001), [-3e38, -1e4, -100, -88, 0, 88, 100, 1e4, 3e38]])
    value = np.stack([gate, np.ones_like(gate)]).astype(np.float32).reshape(1, -1)
    out = Slot(runtime, (1, gate.size), np.float32)
    gate_up = make_segments(runtime, value, (gate.size, gate.size), (0, 0))
    run(runtime, make(style).gated_activation(gate_up, out.shared, tokens=1, intermediate=gate.size))
    expected = reference.gated_activation(value[:, : gate.size], value[:, gate.size :])
    np.testing.assert_allclose(out.read(), expected, rtol=2e-6, atol=1e-30)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("style", STYLES)
def test_join_logits_copies_every_value(runtime, make, style, dtype):
    rng = np.random.default_rng(5)
    for rows, vocabulary in ((1, 1), (1, 515), (3, 515), (2, 4104)):
        for splits in splits_of((vocabulary,)):
            value = random(rng, (rows, vocabulary), dtype)
            out = Slot(runtime, (rows, vocabulary), np.float32)
            head = make_segments(runtime, value, (vocabulary,), splits)
            run(runtime, make(style, dtype).join_logits(head, out.shared, rows=rows))
            np.testing.assert_array_equal(out.read(), value.astype(np.float32))


# -- RoPE and the KV cache -----------------------------------------------------------------------------------


def make_cache(runtime, kv_heads, head_dim, capacity, dtype, layers=2):
    """A cache full of NaN."""
    size = layers * 2 * kv_heads * head_stride(capacity, head_dim, dtype)
    cache = runtime.shared((size,), dtype)
    cache.array[:] = np.nan
    return cache


def cache_view(cache, kv_heads, head_dim, capacity):
    """``[layer, k|v, kv_head, position, head_dim]`` of a cache, writable."""
    blocks = cache.array.reshape(-1, 2, kv_heads, head_stride(capacity, head_dim, cache.array.dtype))
    return blocks[..., : capacity * head_dim].reshape(*blocks.shape[:3], capacity, head_dim)


def run_rope(runtime, layers, cache, value, splits, *, shape, position, length=None, bias=None, rotary=None):
    heads, kv_heads, head_dim, capacity = shape
    tokens = len(value)
    turned = head_dim if rotary is None else rotary
    angles = np.arange(capacity + tokens)[:, None] * 0.7 ** np.arange(turned // 2)[None, :]
    tables = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    # A table without columns still needs memory.
    buffers = [runtime.upload(table if table.size else np.zeros(1, np.float32)) for table in tables]
    rows = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    q_out = Slot(runtime, (tokens, rows[0]), np.float32)
    run(
        runtime,
        layers.rope_and_store(
            make_segments(runtime, value, rows, splits),
            None if bias is None else runtime.upload(bias),
            q_out.shared,
            KvLayer(cache, 1),
            make_step(runtime, position, tokens if length is None else length),
            shape=HeadShape(heads, kv_heads, head_dim, capacity),
            rotation=Rotation(*buffers, rotary),
            tokens=tokens,
        ),
    )
    biased = value.astype(np.float64) + (0 if bias is None else bias)
    cos, sin = (table[position : position + tokens] for table in tables)
    q, k, v = (part.reshape(tokens, -1, head_dim) for part in np.split(biased, np.cumsum(rows)[:-1], axis=1))
    expected = reference.rotate(q, cos, sin), reference.rotate(k, cos, sin), v
    return q_out.read().reshape(q.shape), expected


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("style", STYLES)
def test_rope_writes_queries_and_only_its_positions(runtime, make, style, dtype):
    rng = np.random.default_rng(6)
    layers = make(style, dtype, dtype)
    cases = [(tokens, 8, 4, 32, None, False) for tokens in TOKENS]
    cases += [(3, 1, 1, 64, 32, True), (3, 14, 2, 64, None, True), (2, 6, 1, 80, 32, False)]
    cases += [(3, 2, 1, 96, 20, True), (2, 2, 2, 128, None, True), (2, 2, 1, 36, None, True)]
    cases += [(2, 2, 1, 10, 6, True), (2, 2, 1, 2, 2, True), (2, 2, 1, 16, 0, True)]
    for case, (tokens, heads, kv_heads, head_dim, rotary, has_bias) in enumerate(cases):
        rows = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        choices = splits_of(rows)
        for position, splits in ((0, choices[case % len(choices)]), (9, choices[(case + 3) % len(choices)])):
            capacity = position + tokens + 2
            cache = make_cache(runtime, kv_heads, head_dim, capacity, dtype)
            value = random(rng, (tokens, sum(rows)), dtype)
            bias = random(rng, sum(rows)) if has_bias else None
            shape = (heads, kv_heads, head_dim, capacity)
            q, expected = run_rope(
                *(runtime, layers, cache, value, splits),
                shape=shape,
                position=position,
                bias=bias,
                rotary=rotary,
            )
            label = (*shape, tokens, position, splits, rotary)
            check(q, expected[0], label)
            view = cache_view(cache, kv_heads, head_dim, capacity)
            span = slice(position, position + tokens)
            for place in (0, 1):
                check(view[1, place, :, span].copy(), expected[1 + place].transpose(1, 0, 2), label)
            view[1, :, :, span] = np.nan
            assert np.all(np.isnan(cache.array)), "other positions were written"


@pytest.mark.parametrize("style", STYLES)
def test_rope_drops_tokens_past_the_length_or_the_capacity(runtime, make, style):
    rng = np.random.default_rng(7)
    value = random(rng, (7, 3 * 32))
    for position, length, kept in ((0, 4, 4), (9, 7, 3)):
        cache = make_cache(runtime, 1, 32, 12, np.float32)
        run_rope(
            *(runtime, make(style), cache, value, (0, 0, 0)),
            shape=(1, 1, 32, 12),
            position=position,
            length=length,
        )
        written = np.isfinite(cache_view(cache, 1, 32, 12)[1]).all(axis=(0, 1, 3))
        assert written.tolist() == [position <= at < position + kept for at in range(12)]
        assert np.isfinite(cache.array).sum() == kept * 64


# -- attention -----------------------------------------------------------------------------------------------


def fill_cache(rng, cache, shape, positions, scale=1.0):
    """Write positions of layer 1; what lies behind them stays NaN."""
    _, kv_heads, head_dim, capacity = shape
    view = cache_view(cache, kv_heads, head_dim, capacity)
    view[1, :, :, :positions] = rng.standard_normal((2, kv_heads, positions, head_dim)) * scale
    return view[1]


def run_attention(
    runtime, layers, cache, q, dtype, *, shape, position, length=None, bucket=None, parts=None, **options
):
    heads, _, head_dim, capacity = shape
    tokens = len(q)
    partials = []

    def guarded_scratch(size_bytes):
        partials.append(Slot(runtime, (size_bytes,), np.uint8))
        return partials[-1].shared

    layers._partial = guarded_scratch
    out = Slot(runtime, (tokens, heads, head_dim), dtype)
    launches = layers.attention(
        upload(runtime, q),
        KvLayer(cache, 1),
        out.shared,
        make_step(runtime, position, tokens if length is None else length),
        shape=HeadShape(*shape),
        scores=Scores(**{"scale": head_dim**-0.5} | options),
        tokens=tokens,
        bucket=bucket or capacity,
        parts=parts,
    )
    run(runtime, *launches)
    for partial in partials:
        partial.read()
    return out.read()


def check_attention(runtime, layers, rng, dtype, *, shape, tokens, position, spare=3, **options):
    heads, kv_heads, head_dim = shape
    kv_dtype = dtype
    full = (*shape, position + tokens + spare)
    cache = make_cache(runtime, kv_heads, head_dim, full[3], kv_dtype)
    keys, values = fill_cache(rng, cache, full, position + tokens)
    q = random(rng, (tokens, heads, head_dim), scale=2)
    actual = run_attention(runtime, layers, cache, q, dtype, shape=full, position=position, **options)
    expected = reference.attention(
        q, keys, values, position=position, scale=head_dim**-0.5, window=options.get("window", 0)
    )
    check(actual, expected, (*shape, tokens, position, options))


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
def test_attention_matches_float64(runtime, make, style, shape):
    rng = np.random.default_rng(8)
    layers = make(style)
    for tokens, position in [(m, 0) for m in TOKENS] + [(1, 1), (1, 70), (3, 61), (33, 64), (7, 200)]:
        check_attention(runtime, layers, rng, np.float32, shape=shape, tokens=tokens, position=position)


@pytest.mark.parametrize("style", STYLES)
def test_attention_reads_and_writes_half(runtime, make, style):
    rng = np.random.default_rng(9)
    for shape in ((14, 2, 64), (3, 1, 36)):
        for tokens, position in ((1, 0), (1, 77), (33, 5)):
            layers = make(style, np.float16, np.float16)
            check_attention(runtime, layers, rng, np.float16, shape=shape, tokens=tokens, position=position)


@pytest.mark.parametrize("style", STYLES)
def test_attention_window_hides_what_lies_before_it(runtime, make, style):
    rng = np.random.default_rng(10)
    for window in (1, 2, 31, 64, 65, 100, 10_000):
        for tokens, position in ((1, 0), (1, 150), (33, 0), (40, 101)):
            for parts in (1, 2) if tokens == 1 else (1,):
                check_attention(
                    *(runtime, make(style), rng, np.float32),
                    shape=(8, 4, 32),
                    tokens=tokens,
                    position=position,
                    window=window,
                    parts=parts,
                )


@pytest.mark.parametrize("style", STYLES)
def test_decode_is_right_at_the_edges_of_its_bucket_and_parts(runtime, make, style):
    rng = np.random.default_rng(11)
    for position in (0, 1, 63, 64, 127, 128, 255, 256, 257, 300, 2047):
        bucket = max(256, 1 << position.bit_length())
        for parts in (None, 1, 2, 5):
            for heads, kv_heads in ((8, 4), (20, 2)):
                check_attention(
                    *(runtime, make(style), rng, np.float32),
                    shape=(heads, kv_heads, 32),
                    tokens=1,
                    position=position,
                    bucket=bucket,
                    parts=parts,
                )


@pytest.mark.parametrize("style", STYLES)
def test_parts_of_narrow_and_odd_heads_stay_in_their_memory(runtime, make, style):
    rng = np.random.default_rng(17)
    for shape in ((4, 4, 8), (3, 1, 36)):
        for position in (5, 150):
            check_attention(
                *(runtime, make(style), rng, np.float32),
                shape=shape,
                tokens=1,
                position=position,
                bucket=256,
                parts=2,
            )


@pytest.mark.parametrize("style", STYLES)
def test_attention_of_few_tokens_may_be_split_too(runtime, make, style):
    rng = np.random.default_rng(12)
    for tokens, position in ((2, 0), (3, 127), (8, 126), (8, 250)):
        for parts in (1, 2, 4):
            check_attention(
                *(runtime, make(style), rng, np.float32),
                shape=(8, 4, 32),
                tokens=tokens,
                position=position,
                bucket=256,
                parts=parts,
            )


@pytest.mark.parametrize("style", STYLES)
def test_attention_is_stable_for_huge_scores(runtime, make, style):
    rng = np.random.default_rng(13)
    shape = (8, 4, 32, 140)
    cache = make_cache(runtime, 4, 32, 140, np.float32)
    keys, values = fill_cache(rng, cache, shape, 130)
    # Whole numbers, so that scores of 1e4 are exact and only one key of each row carries weight.
    keys[...] = np.round(keys * 4)
    for tokens, parts in ((33, 1), (1, 1), (1, 3)):
        position = 130 - tokens
        q = np.round(random(rng, (tokens, 8, 32), scale=200))
        actual = run_attention(
            *(runtime, make(style), cache, q, np.float32),
            shape=shape,
            position=position,
            scale=1.0,
            parts=parts,
        )
        expected = reference.attention(q, keys, values, position=position, scale=1.0)
        assert np.abs(np.einsum("mhd,hkd->hmk", q, np.repeat(keys[:, :130], 2, axis=0))).max() > 1e4
        np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("style", STYLES)
def test_chunks_give_what_one_prefill_gives(runtime, make, style):
    rng = np.random.default_rng(14)
    heads, kv_heads, head_dim, tokens = 8, 4, 32, 65
    rows = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    value = random(rng, (tokens, sum(rows)))
    shape = (heads, kv_heads, head_dim, tokens)
    outputs = []
    for cuts in ((0, 65), (0, 32, 33, 65), (0, 1, 2, 40, 65)):
        cache = make_cache(runtime, kv_heads, head_dim, tokens, np.float32)
        parts = []
        for start, stop in itertools.pairwise(cuts):
            options = {"shape": shape, "position": start}
            q, _ = run_rope(runtime, make(style), cache, value[start:stop], (64, 32, 32), **options)
            parts.append(run_attention(runtime, make(style), cache, q, np.float32, **options))
        outputs.append(np.concatenate(parts))
    check(outputs[1], outputs[0].astype(np.float64))
    check(outputs[2], outputs[0].astype(np.float64))


@pytest.mark.parametrize("style", STYLES)
def test_attention_leaves_rows_past_the_length(runtime, make, style):
    rng = np.random.default_rng(15)
    shape = (8, 4, 32, 40)
    cache = make_cache(runtime, 4, 32, 40, np.float32)
    keys, values = fill_cache(rng, cache, shape, 20)
    q = random(rng, (33, 8, 32))
    actual = run_attention(runtime, make(style), cache, q, np.float32, shape=shape, position=0, length=20)
    check(actual[:20], reference.attention(q[:20], keys, values, position=0, scale=32**-0.5))
    assert np.all(actual[20:].view(np.uint8) == GUARD)


def test_another_session_takes_over_a_launch(runtime, make):
    rng = np.random.default_rng(16)
    shape = (2, 1, 32, 16)
    caches = [make_cache(runtime, 1, 32, 16, np.float32) for _ in range(2)]
    filled = [fill_cache(rng, cache, shape, 9) for cache in caches]
    q = random(rng, (1, 2, 32))
    out = Slot(runtime, (1, 2, 32), np.float32)
    (launch,) = make("vector").attention(
        upload(runtime, q),
        KvLayer(caches[0], 1),
        out.shared,
        make_step(runtime, 8, 1),
        shape=HeadShape(*shape),
        scores=Scores(0.2),
        tokens=1,
        bucket=256,
        parts=1,
    )
    for cache, (keys, values) in zip(caches, filled, strict=True):
        if cache is not caches[0]:
            launch.replace(caches[0], cache)
        run(runtime, launch)
        check(out.read(), reference.attention(q, keys, values, position=8, scale=0.2))


# -- refusals ------------------------------------------------------------------------------------------------


def test_what_cannot_be_computed_is_refused(runtime, make):
    layers = make("vector")
    memory, step = runtime.shared((64,), np.float32), make_step(runtime)
    with pytest.raises(KernelError, match="float32 or float16"):
        GpuLayers(runtime, np.float64, np.float32)
    with pytest.raises(KernelError, match="do not lie inside"):
        Segments(memory, memory, (8,), (9,))
    with pytest.raises(KernelError, match="do not lie inside"):
        Segments(memory, memory, (8, 8), (4,))
    delta = Segments(memory, memory, (16,), (0,))
    with pytest.raises(KernelError, match="cannot add"):
        layers.rms_norm(memory, memory, memory, hidden=8, tokens=1, epsilon=1e-5, delta=delta)
    with pytest.raises(KernelError, match="512 are needed"):
        layers.rms_norm(memory, memory, memory, hidden=64, tokens=2, epsilon=1e-5)
    with pytest.raises(KernelError, match="not two of 8"):
        layers.gated_activation(Segments(memory, memory, (8,), (0,)), memory, tokens=1, intermediate=8)
    qkv, cache = Segments(memory, memory, (6, 3, 3), (0, 0, 0)), KvLayer(memory, 0)
    turn = {"rotation": Rotation(memory, memory), "tokens": 1}
    with pytest.raises(KernelError, match="must be even"):
        layers.rope_and_store(qkv, None, memory, cache, step, shape=HeadShape(2, 1, 3, 4), **turn)
    with pytest.raises(KernelError, match="are not 4 and 1 heads"):
        layers.rope_and_store(qkv, None, memory, cache, step, shape=HeadShape(4, 1, 2, 4), **turn)
    with pytest.raises(KernelError, match="cannot share"):
        HeadShape(3, 2, 4, 4)
    with pytest.raises(KernelError, match="KV cache of layer 3"):
        layers.attention(
            *(memory, KvLayer(memory, 3), memory, step),
            shape=HeadShape(1, 1, 4, 4),
            scores=Scores(1.0),
            tokens=1,
            bucket=256,
        )
