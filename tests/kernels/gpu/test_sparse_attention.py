"""Sparse attention: codes, estimates and positions are those of the oracles; attention to them is exact."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterollm.base import KernelError
from heterollm.kernels.cases import (
    GuardedOutput,
    cache_view,
    empty_cache,
    fill_slot,
    run_launches,
    slot_values,
    step_slot,
)
from heterollm.kernels.formats import ScoreScale, buckets, reference_sparse
from heterollm.kernels.gpu import (
    GpuGlue,
    GpuSparseAttention,
    HeadShape,
    HeadTable,
    KvLayer,
    ScoreMemory,
    Scores,
    Selection,
    SparseShape,
)

STYLES = ["vector", "simt"]
GARBAGE = 0xA5


@dataclass
class Pass:
    """A pass of sparse attention on random data; memory that no query sees is NaN or garbage."""

    runtime: Any
    sparse: GpuSparseAttention
    shape: SparseShape
    position: int
    length: int
    generator: np.random.Generator
    scores: Scores
    order: tuple[int, ...]
    keep: tuple[float, ...]
    exponent: int = 5
    buckets: int = 1
    spread: float = 1.0

    def __post_init__(self):
        heads, rng = self.shape.heads, self.generator
        self.queries = rng.standard_normal((self.length, heads.heads, heads.head_dim)).astype(np.float32)
        sizes = np.exp2(rng.uniform(-1.5, 1.5, heads.heads) * self.spread)[:, None]
        self.queries *= sizes.astype(np.float32)
        kv = self.sparse._kv_dtype
        content = np.full_like(slot_values(empty_cache(self.runtime, heads, kv)), np.nan)
        held = cache_view(content, heads)[1]
        seen = held[:, :, : self.position + self.length]
        seen[...] = rng.standard_normal(seen.shape)
        self.keys, self.values = seen[0].copy(), seen[1].copy()
        self.cache = KvLayer(fill_slot(self.runtime, content), 1)
        padded = np.full((self.shape.tokens, heads.query_columns), np.nan, np.float32)
        padded[: self.length] = self.queries.reshape(self.length, -1)
        self.q = fill_slot(self.runtime, padded)
        self.step = step_slot(self.runtime, self.position, self.length)
        self.scales = [
            ScoreScale(tuple(rng.uniform(0.01, 0.04, heads.group).tolist()), float(step), self.exponent)
            for step in rng.uniform(0.01, 0.04, heads.kv_heads)
        ]
        self.table = HeadTable.upload(
            self.runtime,
            heads,
            self.scales,
            order=self.order,
            keep=self.keep,
            buckets=buckets(self.buckets),
        )
        self.memory = ScoreMemory.allocate(self.runtime, self.shape)
        self.selection = Selection.allocate(self.runtime, self.shape)
        for slot in (self.memory.queries, self.memory.keys, self.memory.scores):
            slot.acquire()
            slot.array[...] = GARBAGE
            slot.release()

    @property
    def whole(self):
        return 0, self.shape.heads.kv_heads

    def quantise(self):
        run_launches(
            self.runtime,
            self.sparse.quantise(self.q, self.cache, self.memory, self.table, self.step, shape=self.shape),
        )
        return slot_values(self.memory.queries), slot_values(self.memory.keys)

    def exact_codes(self):
        """Codes of queries and keys, and score steps, of the oracle."""
        shape, heads = self.shape, self.shape.heads
        queries = np.full((heads.kv_heads, heads.group, shape.tokens, heads.head_dim), 128, np.uint8)
        keys = np.full((heads.kv_heads, shape.keys, heads.head_dim), 128, np.uint8)
        steps = np.zeros((heads.kv_heads, heads.group), np.float32)
        for slot, head in enumerate(self.order):
            scale = self.scales[head]
            members = self.queries[:, head * heads.group : (head + 1) * heads.group]
            relative = np.abs(members).max(axis=(0, 2)) / np.array(scale.query_steps)
            factor = reference_sparse.nearest_bucket(
                relative.max(), float(np.abs(self.keys[head]).max()) / scale.key_step, buckets(self.buckets)
            )
            own = reference_sparse.codes(self.keys[head], 1 / scale.key_step / factor[1])
            keys[slot, : len(own)] = own
            for member, step in enumerate(scale.query_steps):
                reciprocal = 1 / step / factor[0]
                own = reference_sparse.codes(members[:, member], reciprocal)
                queries[slot, member, : self.length] = own
                steps[head, member] = scale.score_steps[member] * factor[0] * factor[1]
        return queries.reshape(heads.kv_heads, -1, heads.head_dim), keys, steps.ravel()

    def put(self, steps, scores):
        """Write score codes and steps that no kernel has computed."""
        for slot in (self.memory.scores,):
            slot.acquire()
            slot.array[...] = scores
            slot.release()
        self.runtime.copy(self.memory.steps.buffer, np.asarray(steps, np.float32))

    def select(self, slots=None):
        launch = self.sparse.select(
            self.memory,
            self.table,
            self.selection,
            self.step,
            shape=self.shape,
            slots=slots or self.whole,
            scores=self.scores,
        )
        run_launches(self.runtime, [launch])
        return self.selected()

    def selected(self):
        """Positions by head and block."""
        shape = self.shape
        counts = np.empty((shape.heads.heads, shape.blocks), np.int32)
        positions = np.empty((*counts.shape, shape.keys), np.int32)
        self.runtime.copy(counts, self.selection.counts.buffer)
        self.runtime.copy(positions, self.selection.positions.buffer)
        return [
            [positions[h, b, : counts[h, b]].copy() for b in range(shape.blocks)] for h in range(len(counts))
        ]

    def block_weights(self, scores, steps, head, block):
        """Weights of the oracle for one block of a head; None for a block of padding."""
        shape, heads = self.shape, self.shape.heads
        first, stop = block * shape.block, min((block + 1) * shape.block, self.length)
        if first >= stop:
            return None
        slot = self.order.index(head // heads.group)
        start = head % heads.group * shape.tokens
        return reference_sparse.weights(
            scores[slot, start + first : start + stop],
            self.position + first,
            float(steps[head]) * self.scores.scale,
            window=self.scores.window,
            soft_cap=self.scores.soft_cap,
        )

    def attend(self, slots=None):
        heads = self.shape.heads
        out = GuardedOutput(
            self.runtime,
            (self.length, heads.heads, heads.head_dim),
            {2: np.float16, 4: np.float32}[self.sparse._item_bytes],
        )
        options = {"shape": self.shape, "scores": self.scores, "tokens": self.length}
        launches = self.sparse.attend(
            self.q,
            self.cache,
            self.table,
            self.selection,
            out.slot,
            self.step,
            slots=slots or self.whole,
            **options,
        )
        run_launches(self.runtime, launches)
        return out.read()

    def exact_attention(self, selected):
        heads, block = self.shape.heads, self.shape.block
        exact = np.zeros((self.length, heads.heads, heads.head_dim))
        for head in range(heads.heads):
            for number, kept in enumerate(selected[head]):
                rows = slice(number * block, min((number + 1) * block, self.length))
                if rows.start >= self.length:
                    continue
                exact[rows, head] = reference_sparse.attention(
                    self.queries[rows, head],
                    self.keys[head // heads.group],
                    self.values[head // heads.group],
                    kept.astype(np.int64),
                    position=self.position + rows.start,
                    scale=self.scores.scale,
                    window=self.scores.window,
                    soft_cap=self.scores.soft_cap,
                )
        return exact


LAYERS: dict[tuple, GpuSparseAttention] = {}


@pytest.fixture
def make(runtime):
    """A pass of a style, types, heads and lengths, with data of a seed."""

    def get(
        style, heads, tokens, position, *, length=None, seed=0, activation=np.float32, kv=np.float32, **more
    ):
        key = (runtime, style, activation, kv)
        if key not in LAYERS:
            LAYERS[key] = GpuSparseAttention(runtime, activation, kv, style=style)
        rng = np.random.default_rng(seed)
        length = tokens if length is None else length
        keys = more.pop("keys", None) or -(-(position + tokens) // 16) * 16
        shape = SparseShape(HeadShape(*heads, position + tokens + 5), tokens, keys)
        count, group = heads[1], heads[0] // heads[1]
        scores = more.pop("scores", None) or Scores(heads[2] ** -0.5)
        order = more.pop("order", None) or tuple(rng.permutation(count).tolist())
        keep = more.pop("keep", None) or tuple(rng.uniform(0.05, 0.6, count * group).tolist())
        return Pass(runtime, LAYERS[key], shape, position, length, rng, scores, order, keep, **more)

    return get


shapes = st.sampled_from([(3, 1, 64), (2, 2, 80), (6, 1, 128), (9, 3, 64), (4, 2, 20)])


@pytest.mark.parametrize("count", [1, 5, 9])
@pytest.mark.parametrize("style", STYLES)
def test_codes_are_those_of_the_oracle(make, style, count):
    @given(
        seed=st.integers(0, 1 << 20),
        heads=shapes,
        tokens=st.integers(1, 70),
        padding=st.integers(0, 40),
        position=st.integers(0, 150),
        extra=st.integers(0, 3),
        half=st.booleans(),
    )
    def holds(seed, heads, tokens, padding, position, extra, half):
        keys = -(-(position + tokens + padding) // 16 + -extra) * 16
        made = make(
            style,
            heads,
            tokens + padding,
            position,
            length=tokens,
            keys=keys,
            seed=seed,
            buckets=count,
            kv=np.float16 if half else np.float32,
        )
        queries, keys, steps = made.exact_codes()
        own = made.quantise()
        for actual, exact in zip(own, (queries, keys), strict=True):
            np.testing.assert_array_equal(actual, exact)
        held = np.empty_like(steps)
        made.runtime.copy(held, made.memory.steps.buffer)
        np.testing.assert_allclose(held, steps, rtol=1e-6)
        assert (own[0].reshape(len(queries), -1, tokens + padding, heads[2])[:, :, tokens:] == 128).all()
        assert (own[1][:, position + tokens :] == 128).all()

    holds()


@pytest.mark.parametrize("style", STYLES)
def test_estimates_are_those_of_the_oracle(make, style):
    @given(
        seed=st.integers(0, 1 << 20),
        heads=shapes,
        tokens=st.integers(1, 70),
        blocks=st.integers(1, 12),
        exponent=st.integers(0, 14),
        data=st.data(),
    )
    def holds(seed, heads, tokens, blocks, exponent, data):
        made = make(style, heads, tokens, 0, keys=16 * blocks, seed=seed)
        first = data.draw(st.integers(0, heads[1] - 1))
        stop = data.draw(st.integers(first + 1, heads[1]))
        for slot in (made.memory.queries, made.memory.keys):
            slot.acquire()
            slot.array[...] = made.generator.integers(0, 256, slot.array.shape)
            slot.release()
        queries, keys = slot_values(made.memory.queries), slot_values(made.memory.keys)
        run_launches(
            made.runtime,
            [made.sparse.estimate(made.memory, shape=made.shape, slots=(first, stop), exponent=exponent)],
        )
        scores = slot_values(made.memory.scores)
        exact = reference_sparse.estimate(queries[first:stop], keys[first:stop], exponent)
        np.testing.assert_array_equal(scores[first:stop], exact)
        assert (scores[:first] == GARBAGE).all()
        assert (scores[stop:] == GARBAGE).all()

    holds()


def check_selection(made, selected, scores, steps):
    """Compare each block with the oracle; weights that differ by rounding alone may change places."""
    for head, blocks in enumerate(selected):
        for block, kept in enumerate(blocks):
            weights = made.block_weights(scores, steps, head, block)
            if weights is None:
                assert len(kept) == 0
                continue
            exact = reference_sparse.kept_positions(weights, made.keep[head])
            assert len(kept) == len(exact)
            assert (np.diff(kept) > 0).all()
            assert (weights[kept] >= 0).all()
            seen = np.flatnonzero(weights >= 0)
            always = seen[(seen < 4) | (seen > seen[-1] - 64)]
            assert np.isin(always, kept).all()
            gained, lost = np.setdiff1d(kept, exact), np.setdiff1d(exact, kept)
            if len(lost):
                assert weights[gained].min() >= weights[lost].max() * (1 - 1e-5)
                assert len(lost) <= 2


@pytest.mark.parametrize("style", STYLES)
def test_selections_are_those_of_the_oracle(make, style):
    @given(
        seed=st.integers(0, 1 << 20),
        heads=shapes,
        tokens=st.integers(1, 70),
        padding=st.integers(0, 40),
        position=st.integers(0, 300),
        window=st.just(0) | st.integers(1, 200),
        cap=st.sampled_from([0.0, 3.0]),
    )
    def holds(seed, heads, tokens, padding, position, window, cap):
        scores = Scores(0.2, window, cap)
        made = make(style, heads, tokens + padding, position, length=tokens, seed=seed, scores=scores)
        codes = made.generator.integers(0, 256, made.memory.scores.array.shape, np.uint8)
        steps = made.generator.uniform(0.02, 0.3, heads[0]).astype(np.float32)
        made.put(steps, codes)
        check_selection(made, made.select(), codes, steps)

    holds()


@pytest.mark.parametrize("style", STYLES)
def test_equal_weights_keep_the_lowest_positions(make, style):
    @given(
        seed=st.integers(0, 1 << 20),
        tokens=st.integers(1, 40),
        position=st.integers(0, 400),
        kinds=st.integers(1, 4),
    )
    def holds(seed, tokens, position, kinds):
        made = make(style, (2, 1, 32), tokens, position, seed=seed)
        # Each query scores a position alike, so that the oracle's order is that of the codes.
        columns = made.generator.integers(100, 100 + kinds, made.shape.keys)
        made.put([0.1, 0.1], np.broadcast_to(columns, made.memory.scores.array.shape).astype(np.uint8))
        selected = made.select()
        for head, blocks in enumerate(selected):
            for block, kept in enumerate(blocks):
                end = position + min((block + 1) * 32, tokens)
                weights = np.where(np.arange(made.shape.keys) < end, columns, -1).astype(float)
                np.testing.assert_array_equal(kept, reference_sparse.kept_positions(weights, made.keep[head]))

    holds()


@pytest.mark.parametrize("style", STYLES)
def test_a_long_context_is_selected(make, style):
    made = make(style, (2, 1, 16), 64, 8100, keys=8192, keep=(0.1, 0.5))
    codes = made.generator.integers(60, 200, made.memory.scores.array.shape, np.uint8)
    steps = np.array([0.2, 0.4], np.float32)
    made.put(steps, codes)
    check_selection(made, made.select(), codes, steps)


@pytest.mark.parametrize("style", STYLES)
def test_slots_select_alone_and_in_any_order(make, style):
    orders = ((0, 1, 2), (2, 0, 1))
    results = []
    for order in orders:
        made = make(style, (6, 3, 32), 40, 130, seed=5, order=order)
        codes = np.random.default_rng(7).integers(0, 256, (3, 80, made.shape.keys), np.uint8)
        made.put(np.full(6, 0.1, np.float32), codes[list(order)])
        for slot in (2, 0, 1):
            made.select((slot, slot + 1))
        results.append(made.selected())
    for one, other in zip(*results, strict=True):
        for kept, same in zip(one, other, strict=True):
            np.testing.assert_array_equal(kept, same)


@pytest.mark.parametrize("kv", [np.float32, np.float16])
@pytest.mark.parametrize("style", STYLES)
def test_attention_is_that_of_the_oracle(make, check, style, kv):
    @given(
        seed=st.integers(0, 1 << 20),
        heads=st.sampled_from([(3, 1, 64), (2, 2, 80), (6, 1, 128), (2, 2, 96), (6, 2, 20)]),
        tokens=st.integers(1, 70),
        padding=st.integers(0, 40),
        position=st.integers(0, 300),
        window=st.just(0) | st.integers(1, 200),
        cap=st.sampled_from([0.0, 3.0]),
    )
    def holds(seed, heads, tokens, padding, position, window, cap):
        scores = Scores(heads[2] ** -0.5, window, cap)
        made = make(
            style,
            heads,
            tokens + padding,
            position,
            length=tokens,
            seed=seed,
            scores=scores,
            kv=kv,
            activation=kv,
        )
        made.put(
            np.full(heads[0], 0.1, np.float32),
            made.generator.integers(0, 256, made.memory.scores.array.shape, np.uint8),
        )
        selected = made.select()
        actual, exact = made.attend(), made.exact_attention(selected)
        check((actual.reshape(tokens, -1), exact.reshape(tokens, -1)))

    holds()


@pytest.mark.parametrize("window", [0, 90])
@pytest.mark.parametrize("style", STYLES)
def test_all_positions_give_dense_attention(make, check, style, window):
    heads = (6, 2, 64)
    made = make(style, heads, 70, 201, scores=Scores(0.125, window), keep=(1.0,) * 6)
    made.quantise()
    for slot in (0, 1):
        run_launches(
            made.runtime,
            [
                made.sparse.estimate(
                    made.memory, shape=made.shape, slots=(slot, slot + 1), exponent=made.exponent
                )
            ],
        )
    made.select()
    actual = made.attend()
    dense = GuardedOutput(made.runtime, actual.shape, np.float32)
    layers = GpuGlue(made.runtime, np.float32, np.float32, style=style)
    run_launches(
        made.runtime,
        layers.attention(
            made.q,
            made.cache,
            dense.slot,
            made.step,
            shape=made.shape.heads,
            scores=made.scores,
            tokens=70,
            bucket=made.shape.heads.capacity,
        ),
    )
    check((actual.reshape(70, -1), dense.read().reshape(70, -1).astype(np.float64)))


def test_sizes_that_do_not_fit_are_refused(make):
    heads = HeadShape(4, 2, 16, 64)
    with pytest.raises(KernelError, match="whole 16 keys"):
        SparseShape(heads, 32, 40)
    with pytest.raises(KernelError, match="as many last positions"):
        SparseShape(heads, 32, 64, last=16)
    made = make("vector", (4, 2, 16), 8, 0)
    with pytest.raises(KernelError, match="Slots 1 to 3"):
        made.select((1, 3))
    with pytest.raises(KernelError, match="do not fit 2 key heads"):
        HeadTable.upload(made.runtime, made.shape.heads, made.scales, order=(0, 0), keep=(0.2,) * 4)
    with pytest.raises(KernelError, match="shares"):
        HeadTable.upload(made.runtime, made.shape.heads, made.scales, order=(0, 1), keep=(0.0,) * 4)
