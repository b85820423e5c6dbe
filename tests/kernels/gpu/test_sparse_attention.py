"""Sparse attention: codes, estimates and positions are those of the oracles; attention to them is exact."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.base import KernelError
from heterollm.kernels.gpu import (
    STEP_LENGTH,
    STEP_POSITION,
    STEP_WORDS,
    GlueKernels,
    HeadShape,
    HeadTable,
    MergedLaunch,
    Scores,
    SparseShape,
    merge_launches,
)
from heterollm.kernels.operators.attention import attend
from heterollm.kernels.operators.attention_work import attention_work
from heterollm.kernels.operators.data import GuardedOutput, run_launches
from heterollm.kernels.operators.score_codes import estimate_scores, write_score_codes
from heterollm.kernels.operators.selection import kept_positions, select_positions, selection_work
from heterollm.kernels.operators.sparse_attention import (
    SparseCase,
    SparsePass,
    attend_selected,
    sparse_attention_work,
)

STYLES = ["vector", "simt"]
LAYERS: dict[tuple, GlueKernels] = {}

few = settings(max_examples=15)
"""Each example runs a whole pass and a float64 oracle."""
windows = st.just(0) | st.integers(1, 200)


@pytest.fixture
def make(runtime):
    """A pass of a style, types, heads and lengths, with data of a seed."""

    def get(style, heads, tokens, position, *, length=None, seed=0, dtype=np.float32, kv=np.float32, **more):
        key = (runtime, style, dtype, kv)
        if key not in LAYERS:
            LAYERS[key] = GlueKernels(runtime, dtype, kv, style=style)
        rng = np.random.default_rng(seed)
        keys = more.pop("keys", -(-(position + tokens) // 16) * 16)
        more.setdefault("scores", Scores(heads[2] ** -0.5))
        more.setdefault("order", tuple(rng.permutation(heads[1]).tolist()))
        more.setdefault("keep", tuple(rng.uniform(0.05, 0.6, heads[0]).tolist()))
        shape = SparseShape(HeadShape(*heads, position + tokens + 5), tokens, keys)
        own = SparsePass(shape, position, tokens if length is None else length, **more)
        return SparseCase(runtime, LAYERS[key], dtype, own, rng)

    return get


@pytest.mark.parametrize(
    ("style", "heads", "count"),
    [
        ("vector", (3, 1, 64), 1),
        ("vector", (6, 3, 20), 9),
        ("simt", (4, 2, 80), 9),
        ("simt", (6, 1, 20), 5),
    ],
)
def test_codes_are_those_of_the_oracle(make, style, heads, count):
    @few
    @given(
        seed=st.integers(0, 1 << 20),
        tokens=st.integers(1, 70),
        padding=st.integers(0, 40),
        position=st.integers(0, 150),
        extra=st.integers(0, 3),
        half=st.booleans(),
    )
    def holds(seed, tokens, padding, position, extra, half):
        keys = -(-(position + tokens + padding) // 16) * 16 + 16 * extra
        sizes = {"length": tokens, "keys": keys, "kv": np.float16 if half else np.float32}
        made = make(style, heads, tokens + padding, position, seed=seed, buckets=count, **sizes)
        (queries, key_codes, steps), exact = made.quantise()
        np.testing.assert_array_equal(queries, exact[0])
        np.testing.assert_array_equal(key_codes, exact[1])
        np.testing.assert_allclose(steps, exact[2], rtol=1e-6)
        assert (key_codes[:, position + tokens :] == 128).all()

    holds()


@pytest.mark.parametrize(("heads", "exponent"), [((9, 3, 64), 7), ((4, 2, 20), 0), ((12, 2, 128), 14)])
@pytest.mark.parametrize("style", STYLES)
def test_estimates_are_those_of_the_oracle(make, style, heads, exponent):
    @few
    @given(seed=st.integers(0, 1 << 20), tokens=st.integers(1, 70), blocks=st.integers(1, 12), data=st.data())
    def holds(seed, tokens, blocks, data):
        made = make(style, heads, tokens, 0, keys=16 * blocks, seed=seed, exponent=exponent)
        first = data.draw(st.integers(0, heads[1] - 1))
        stop = data.draw(st.integers(first + 1, heads[1]))
        actual, exact = made.estimate((first, stop))
        np.testing.assert_array_equal(actual, exact)

    holds()


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("count", [1, 9])
def test_pages_that_a_window_has_left_have_no_codes(make, check, style, count):
    """They lie in no page; those that queries see lie in any order."""
    sizes = {"scores": Scores(0.25, 40), "buckets": count, "pages": (-1, 3, 1, 2)}
    made = make(style, (4, 2, 16), 70, 110, **sizes)
    (queries, key_codes, steps), exact = made.quantise()
    np.testing.assert_array_equal(queries, exact[0])
    np.testing.assert_array_equal(key_codes, exact[1])
    np.testing.assert_allclose(steps, exact[2], rtol=1e-6)
    made.put_scores(made.generator.integers(60, 200, made.memory.scores.array.shape, np.uint8), steps)
    check(made.attend(made.select()))


def check_selection(made, selected, codes, steps):
    """Compare each block with the oracle; weights that differ by rounding alone may change places."""
    for head, blocks in enumerate(selected):
        for block, kept in enumerate(blocks):
            weights = made.block_weights(codes, steps, head, block)
            if weights is None:
                assert len(kept) == 0
                continue
            exact = kept_positions(weights, made.own.keep[head])
            assert len(kept) == len(exact)
            assert (np.diff(kept) > 0).all()
            assert (weights[kept] >= 0).all()
            seen = np.flatnonzero(weights >= 0)
            assert np.isin(seen[(seen < 4) | (seen > seen[-1] - 64)], kept).all()
            gained, lost = np.setdiff1d(kept, exact), np.setdiff1d(exact, kept)
            assert len(lost) <= 2
            if len(lost):
                assert weights[gained].min() >= weights[lost].max() * (1 - 1e-5)


@pytest.mark.parametrize(("heads", "cap"), [((3, 1, 16), 0.0), ((4, 2, 16), 3.0)])
@pytest.mark.parametrize("style", STYLES)
def test_selections_are_those_of_the_oracle(make, style, heads, cap):
    @few
    @given(
        seed=st.integers(0, 1 << 20),
        tokens=st.integers(1, 70),
        padding=st.integers(0, 40),
        position=st.integers(0, 300),
        window=windows,
        spread=st.integers(0, 255),
    )
    def holds(seed, tokens, padding, position, window, spread):
        scores = Scores(0.2, window, cap)
        made = make(style, heads, tokens + padding, position, length=tokens, seed=seed, scores=scores)
        codes = made.generator.integers(0, spread + 1, made.memory.scores.array.shape, np.uint8)
        steps = made.generator.uniform(0.02, 0.3, heads[0]).astype(np.float32)
        made.put_scores(codes, steps)
        check_selection(made, made.select(), codes, steps)

    holds()


@pytest.mark.parametrize("style", STYLES)
def test_equal_weights_keep_the_lowest_positions(make, style):
    @few
    @given(
        seed=st.integers(0, 1 << 20),
        tokens=st.integers(1, 40),
        position=st.integers(0, 400),
        kinds=st.integers(1, 4),
    )
    def holds(seed, tokens, position, kinds):
        made = make(style, (2, 1, 16), tokens, position, seed=seed)
        # All queries score a position alike, so that the oracle's order is that of the codes.
        columns = made.generator.integers(100, 100 + kinds, made.own.shape.keys)
        made.put_scores(columns, [0.1, 0.1])
        for head, blocks in enumerate(made.select()):
            for block, kept in enumerate(blocks):
                end = position + min((block + 1) * 32, tokens)
                weights = np.where(np.arange(len(columns)) < end, columns, -1.0)
                exact = kept_positions(weights, made.own.keep[head])
                np.testing.assert_array_equal(kept, exact)

    holds()


@pytest.mark.parametrize("style", STYLES)
def test_a_long_context_is_selected(make, style):
    made = make(style, (2, 1, 16), 64, 8128, keep=(0.1, 0.5))
    codes = made.generator.integers(60, 200, made.memory.scores.array.shape, np.uint8)
    steps = np.array([0.2, 0.4], np.float32)
    made.put_scores(codes, steps)
    check_selection(made, made.select(), codes, steps)


@pytest.mark.parametrize("style", STYLES)
def test_slots_select_alone_and_in_any_order(make, style):
    results = []
    for order in ((0, 1, 2), (2, 0, 1)):
        made = make(style, (6, 3, 16), 40, 130, seed=5, order=order, keep=(0.1, 0.6, 0.2, 0.7, 0.8, 0.3))
        codes = np.random.default_rng(7).integers(0, 256, (3, 80, made.own.shape.keys), np.uint8)
        made.put_scores(codes[list(order)], [0.1] * 6)
        results.append(made.select((2, 3), (0, 1), (1, 2)))
    for one, other in zip(*results, strict=True):
        for kept, same in zip(one, other, strict=True):
            np.testing.assert_array_equal(kept, same)


@pytest.mark.parametrize(
    ("heads", "cap", "dtype"),
    [
        ((3, 1, 64), 0.0, np.float32),
        ((6, 1, 128), 0.0, np.float16),
        ((2, 2, 96), 3.0, np.float32),
        ((6, 2, 20), 0.0, np.float16),
    ],
)
@pytest.mark.parametrize("style", STYLES)
def test_attention_is_that_of_the_oracle(make, check, style, heads, cap, dtype):
    @few
    @given(
        seed=st.integers(0, 1 << 20),
        tokens=st.integers(1, 70),
        padding=st.integers(0, 40),
        position=st.integers(0, 300),
        window=windows,
    )
    def holds(seed, tokens, padding, position, window):
        options = {"scores": Scores(heads[2] ** -0.5, window, cap), "dtype": dtype, "kv": dtype}
        made = make(style, heads, tokens + padding, position, length=tokens, seed=seed, **options)
        codes = made.generator.integers(0, 256, made.memory.scores.array.shape, np.uint8)
        made.put_scores(codes, [0.1] * heads[0])
        check(made.attend(made.select()))

    holds()


@pytest.mark.parametrize(("style", "window"), [("vector", 0), ("vector", 90), ("simt", 0)])
def test_all_positions_give_dense_attention(runtime, make, check, style, window):
    made = make(style, (6, 2, 64), 70, 201, scores=Scores(0.125, window), keep=(1.0,) * 6)
    made.quantise()
    options = {"shape": made.own.shape, "exponent": made.own.exponent}
    run_launches(
        runtime,
        [estimate_scores(made.sparse, made.memory, slots=(slot, slot + 1), **options) for slot in (0, 1)],
    )
    actual, _ = made.attend(made.select())
    dense = GuardedOutput(runtime, actual.shape, np.float32)
    sizes = {"shape": made.own.shape.heads, "scores": made.own.scores, "tokens": 70}
    layers = GlueKernels(runtime, np.float32, np.float32, style=style)
    run_launches(runtime, attend(layers, made.q, made.cache, dense.slot, made.step, **sizes))
    check((actual, dense.read().astype(np.float64)))


@pytest.mark.usefixtures("merges")
def test_merged_launches_give_the_same(runtime, make):
    made = make("vector", (4, 2, 64), 40, 200, buckets=9)
    sizes = {"shape": made.own.shape}
    part = sizes | {"slots": (0, 2)}
    out = runtime.shared((40, 256), np.float32)
    inputs = made.memory, made.table
    launches = [
        *write_score_codes(made.sparse, made.q, made.cache, *inputs, made.step, **sizes),
        estimate_scores(made.sparse, made.memory, exponent=made.own.exponent, **part),
        select_positions(made.sparse, *inputs, made.selection, made.step, scores=made.own.scores, **part),
        *attend_selected(
            made.sparse,
            made.q,
            made.cache,
            made.table,
            made.selection,
            out,
            made.step,
            scores=made.own.scores,
            **part,
        ),
    ]
    outputs = []
    for calls in (launches, merge_launches(runtime, launches)):
        out.write(np.nan)
        run_launches(runtime, calls)
        outputs.append(out.read())
    assert np.isfinite(outputs[0]).all()
    np.testing.assert_array_equal(*outputs)
    assert isinstance(calls[0], MergedLaunch)
    assert len(calls) == 1


def test_the_work_of_all_positions_is_that_of_dense_attention():
    heads, step = HeadShape(9, 3, 64, 4096), np.zeros(STEP_WORDS, np.int32)
    step[[STEP_POSITION, STEP_LENGTH]] = 1000, 250
    for window in (0, 300):
        common = {"tokens": 256, "window": window, "position_bytes": 128, "output_bytes": 4}
        dense = attention_work(heads, step, **common)
        whole, fifth = (
            sparse_attention_work(heads, step, 9, keep=keep, block=32, **common) for keep in (1.0, 0.2)
        )
        assert whole.flops == pytest.approx(dense.flops)
        assert fifth.flops == pytest.approx(dense.flops / 5)
        # Each block of queries reads keys of its own.
        assert whole.read_bytes > 5 * dense.read_bytes
        assert whole.written_bytes == dense.written_bytes
        part = selection_work(3, step, block=32, tokens=256, window=window)
        assert part.read_bytes * 4 * 64 == pytest.approx(dense.flops / 3)


def test_sizes_that_do_not_fit_are_refused(runtime, make):
    heads = HeadShape(4, 2, 16, 64)
    with pytest.raises(KernelError, match="whole 16 keys"):
        SparseShape(heads, 32, 40)
    with pytest.raises(KernelError, match="as many last positions"):
        SparseShape(heads, 32, 64, last=16)
    made = make("vector", (4, 2, 16), 8, 0)
    with pytest.raises(KernelError, match="Slots 1 to 3"):
        made.select((1, 3))
    with pytest.raises(KernelError, match="do not fit 2 key heads"):
        HeadTable.upload(runtime, heads, made.scales, order=(0, 0), keep=(0.2,) * 4)
    with pytest.raises(KernelError, match="shares"):
        HeadTable.upload(runtime, heads, made.scales, order=(0, 1), keep=(0.0,) * 4)
