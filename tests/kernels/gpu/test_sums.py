"""Every kernel that reads a linear's output adds the first segment to the second where the join is a sum."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from heterollm.kernels.gpu import HeadShape
from heterollm.kernels.operators.gated_activation import GatedCase
from heterollm.kernels.operators.logits import JoinCase
from heterollm.kernels.operators.norm import NormCase
from heterollm.kernels.operators.rope import RopeCase

KERNELS = pytest.mark.parametrize(
    ("style", "dtype"),
    [("vector", np.float32), ("vector", np.float16), ("simt", np.float32), ("simt", np.float16)],
)


@st.composite
def splits_of(draw, rows):
    """Leading rows of each member: any number, or whole eights, which GPUs read at once."""
    unit = draw(st.sampled_from([1, 8]))
    return tuple(unit * draw(st.integers(0, row // unit)) for row in rows)


SEEDS = st.integers(0, 1 << 20)
TOKENS = st.integers(1, 40)
# In narrower rows a sum that cancels would fail the gate of a single row.
WIDTHS = st.integers(17, 150) | st.sampled_from([8, 64, 96, 2056])


@KERNELS
def test_norms_add(cases, check, style, dtype):
    @given(seed=SEEDS, tokens=TOKENS, hidden=WIDTHS, post=st.booleans(), data=st.data())
    def holds(seed, tokens, hidden, post, data):
        made = cases(style, dtype, seed)
        (split,) = data.draw(splits_of((hidden,)))
        for numbers in made(NormCase(tokens, hidden, split, biased=True, post=post, join="sum")):
            check(numbers)
        first = data.draw(st.integers(0, tokens - 1))
        for numbers in made(
            NormCase(tokens, hidden, split, head_row=first, biased=post, post=post, join="sum")
        ):
            check(numbers)

    holds()


@KERNELS
def test_the_gated_activation_adds(cases, check, style, dtype):
    @given(seed=SEEDS, tokens=TOKENS, width=WIDTHS, biased=st.booleans(), data=st.data())
    def holds(seed, tokens, width, biased, data):
        made = cases(style, dtype, seed)
        check(
            *made(GatedCase(tokens, width, data.draw(splits_of((width, width))), biased=biased, join="sum"))
        )

    holds()


@KERNELS
def test_the_logits_are_added(cases, check, style, dtype):
    @given(seed=SEEDS, rows=TOKENS, vocabulary=WIDTHS, data=st.data())
    def holds(seed, rows, vocabulary, data):
        (split,) = data.draw(splits_of((vocabulary,)))
        check(*cases(style, dtype, seed)(JoinCase(rows, vocabulary, split, join="sum")))

    holds()


@KERNELS
def test_rope_adds(cases, check, style, dtype):
    @given(
        seed=SEEDS,
        tokens=TOKENS,
        kv_heads=st.integers(1, 2),
        head_dim=st.sampled_from([18, 36, 64]),
        normed=st.booleans(),
        biased=st.booleans(),
        data=st.data(),
    )
    def holds(seed, tokens, kv_heads, head_dim, normed, biased, data):
        made = cases(style, dtype, seed)
        shape = HeadShape(2 * kv_heads, kv_heads, head_dim, tokens + 7)
        splits = data.draw(splits_of(shape.rows))
        for numbers in made(RopeCase(tokens, 5, shape, splits, normed=normed, biased=biased, join="sum")):
            check(numbers)

    holds()
