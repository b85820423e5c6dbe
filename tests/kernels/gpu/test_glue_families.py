"""What only some families do between their linear layers."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from heterollm.base import KernelError
from heterollm.kernels.formats import linear_errors
from heterollm.kernels.gpu import STEP_LENGTH, STEP_POSITION, HeadShape, Scores
from heterollm.kernels.operators.attention import AttentionCase
from heterollm.kernels.operators.attention_work import visible
from heterollm.kernels.operators.data import GuardedOutput, fill_slot, run_launches, split_segments
from heterollm.kernels.operators.embedding import PositionsCase
from heterollm.kernels.operators.gated_activation import (
    ACTIVATIONS,
    GatedCase,
    activate,
    exact_gated_activation,
)
from heterollm.kernels.operators.logits import AddBiasCase, SoftCapCase, soft_cap
from heterollm.kernels.operators.norm import NormCase
from heterollm.kernels.operators.operator import check_case
from heterollm.kernels.operators.rope import RopeCase
from heterollm.kernels.operators.token_gate import TokenGateCase
from heterollm.kernels.ops import GateClip

STYLES = ["vector", "simt"]
PAIRS = [
    *(("vector", np.float32), ("vector", np.float16), ("simt", np.float16)),
    pytest.param("simt", np.float32, marks=pytest.mark.slow),
]
"""Styles and types of activations; no device has the last pair by default."""


@pytest.mark.parametrize(("style", "dtype"), PAIRS)
def test_a_delta_is_biased_and_normed_before_it_is_added(cases, check, style, dtype):
    made = cases(style, dtype, 1)
    for tokens, hidden, split, biased, post in (
        *((3, 100, 41, *flags) for flags in ((True, False), (False, True), (True, True))),
        (1, 7, 0, True, True),
        (33, 512, 512, False, True),
        (2, 2052, 1000, True, True),
    ):
        shape = (tokens, hidden, split)
        # A delta far larger than the residual: without its norm the sum would be another one.
        options = {"biased": biased, "post": post, "scale": 40}
        final, (stored, residual) = made(NormCase(*shape, head_row=tokens // 2, **options))
        np.testing.assert_array_equal(stored, residual)
        for numbers in (
            final,
            *made(NormCase(*shape, **options)),
            *made(NormCase(*shape, **options, unnormed=True)),
            *(made(NormCase(*shape, **options, alone=True)) if post else ()),
        ):
            check(numbers, (shape, options))


@pytest.mark.parametrize(("style", "dtype"), PAIRS)
def test_heads_are_normed_before_they_turn(cases, check, style, dtype):
    made = cases(style, dtype, 2)
    for heads, kv_heads, head_dim, rotary, tokens, biased in (
        (4, 2, 32, 32, 3, False),
        (3, 1, 36, 20, 5, True),
        (2, 2, 10, 6, 2, True),
        (2, 1, 128, 0, 33, False),
    ):
        shape = HeadShape(heads, kv_heads, head_dim, tokens + 5)
        splits = (shape.rows[0] // 3, 5, shape.rows[2])
        options = {"rotary": rotary, "biased": biased, "normed": True}
        for numbers in made(RopeCase(tokens, 4, shape, splits, **options)):
            check(numbers, shape)
        # Values that are keys before their norm.
        for numbers in made(RopeCase(tokens, 4, shape, splits[:2], value_norms=True, **options)):
            check(numbers, shape)


@pytest.mark.parametrize(("style", "dtype"), PAIRS)
def test_norms_that_subtract_the_mean(cases, check, style, dtype):
    made = cases(style, dtype, 6)
    for tokens, hidden, split, post in ((3, 104, 41, True), (1, 8, 0, False), (33, 2048, 1000, False)):
        shape, options = (tokens, hidden, split), {"biased": True, "post": post, "centered": True}
        final, (stored, residual) = made(NormCase(*shape, head_row=tokens // 2, **options))
        np.testing.assert_array_equal(stored, residual)
        for numbers in (final, *made(NormCase(*shape, **options))):
            check(numbers, (shape, options))
    with pytest.raises(KernelError, match="100 columns"):
        made(NormCase(1, 100, 0, centered=True))


@pytest.mark.parametrize(("style", "dtype"), PAIRS)
def test_one_norm_of_all_heads_and_a_limit(cases, check, style, dtype):
    made = cases(style, dtype, 7)
    for heads, kv_heads, head_dim, rotary, joint, limit in (
        (4, 2, 32, 32, True, 0.0),
        (3, 1, 36, 20, True, 0.7),
        (2, 2, 10, 6, False, 0.7),
    ):
        shape = HeadShape(heads, kv_heads, head_dim, 9)
        splits = (shape.rows[0] // 3, 5, shape.rows[2])
        options = {"biased": True, "normed": joint, "joint": joint, "limit": limit}
        for numbers in made(RopeCase(4, 4, shape, splits, rotary=rotary, **options)):
            check(numbers, (shape, options))


@pytest.mark.parametrize(("style", "dtype"), PAIRS)
def test_norms_behind_the_rotation_and_factors_of_queries(cases, check, style, dtype):
    made = cases(style, dtype, 9)
    for heads, kv_heads, head_dim, normed, scaled in (
        *((4, 2, 32, True, True), (3, 1, 36, True, False)),
        *((2, 2, 10, False, True), (2, 1, 128, True, True)),
    ):
        shape = HeadShape(heads, kv_heads, head_dim, 9)
        splits = (shape.rows[0] // 3, 5, shape.rows[2])
        options = {"biased": True, "normed": normed, "norms_last": True, "scaled": scaled}
        for numbers in made(RopeCase(4, 4, shape, splits, **options)):
            check(numbers, (shape, options))


@pytest.mark.parametrize("style", STYLES)
def test_positions_are_added_from_that_of_the_pass_on(cases, check, style):
    for shape in ((1, 0, 8), (1, 7, 5), (33, 30, 2060)):
        check(*cases(style)(PositionsCase(*shape)), shape)


@pytest.mark.parametrize("style", STYLES)
def test_logits_get_their_bias_in_place(cases, check, style):
    for rows, width in ((1, 5), (3, 2060)):
        check(*cases(style)(AddBiasCase(rows, width)))


@pytest.mark.parametrize(("style", "dtype"), PAIRS)
def test_the_output_of_each_token_is_gated(cases, check, style, dtype):
    made = cases(style, dtype, 8)
    for shape in ((3, 100, 41), (1, 7, 0), (33, 512, 512), (2, 2052, 1000)):
        check(*made(TokenGateCase(*shape)), shape)
        check(*made(TokenGateCase(*shape, "sum")), shape)


@pytest.mark.parametrize("style", STYLES)
def test_tokens_attend_to_their_chunks(cases, check, style):
    for tokens, position, parts, chunk in (
        *((1, 149, 1, 50), (1, 150, 1, 50), (1, 150, 3, 64), (33, 0, 1, 7), (40, 77, 1, 50)),
        *((3, 148, 2, 50), (70, 33, 1, 64)),
    ):
        shape = HeadShape(6, 2, 36, position + tokens + 2)
        options = {"parts": parts}
        found, plain = (
            cases(style, seed=3)(
                AttentionCase(tokens, position, shape, scores=Scores(0.3, chunk, chunked=chunked), **options)
            )[0]
            for chunked in (True, False)
        )
        check(found, (tokens, position, parts, chunk))
        # The last token of a chunk sees as many keys as in a window.
        is_last = tokens == 1 and (position + 1) % chunk == 0
        errors = linear_errors(found[0].reshape(-1, 36), plain[1].reshape(-1, 36))
        assert errors.within("fp16") == is_last


def test_work_of_chunks_counts_the_keys_that_tokens_see():
    for position, tokens, chunk in ((0, 33, 7), (48, 5, 50), (150, 1, 50)):
        step = np.zeros(8, np.int32)
        step[STEP_POSITION], step[STEP_LENGTH] = position, tokens
        row, key = np.arange(position, position + tokens)[:, None], np.arange(position + tokens)
        seen = (key <= row) & (key // chunk == row // chunk)
        expected = tokens, seen.sum(), seen.any(axis=0).sum()
        assert visible(step, tokens, chunk, chunked=True) == expected


@pytest.mark.parametrize("style", STYLES)
def test_scores_are_capped(cases, check, style):
    for tokens, position, parts, window in ((1, 150, 1, 0), (1, 150, 3, 40), (33, 0, 1, 0), (40, 77, 1, 50)):
        shape = HeadShape(6, 2, 36, position + tokens + 2)
        # Scores from far below the cap to ten times it.
        options = {"spread": 3.0, "parts": parts}
        found = [
            cases(style, seed=3)(
                AttentionCase(tokens, position, shape, scores=Scores(0.3, window, soft_cap=cap), **options)
            )[0]
            for cap in (4.0, 0.0)
        ]
        check(found[0], (tokens, parts, window))
        capped, plain = found[0][0], found[1][1]
        assert not linear_errors(capped.reshape(-1, 36), plain.reshape(-1, 36)).within("fp16")


@pytest.mark.parametrize(
    ("style", "kv"),
    [
        *itertools.product(STYLES, (np.float32, np.float16, np.int8)),
        *(("coalesced", kv) for kv in (np.float32, np.float16)),
    ],
)
def test_sinks_join_every_softmax(cases, check, style, kv):
    made = cases("simt" if style == "coalesced" else style, seed=10, kv=kv)
    # Far above the scores, among them, below them, and none at all.
    sinks = (9.0, 1.0, -1.0, -np.inf, 0.0, -40.0)
    options = {"sinks": sinks, "style": style}
    for tokens, position, parts, window in (
        *((1, 150, 1, 0), (1, 150, 3, 40), (3, 300, 3, 20), (9, 0, 1, 0), (33, 0, 1, 9), (40, 77, 1, 50)),
    ):
        # The window of the second and the third is behind the first part.
        shape = HeadShape(6, 2, 64, position + tokens + 2)
        case = AttentionCase(tokens, position, shape, Scores(0.3, window), parts=parts, **options)
        check(*made(case), (tokens, position, parts, window))


@pytest.mark.parametrize("style", STYLES)
def test_a_sink_of_minus_infinity_is_none(cases, style):
    layers = cases(style).layers
    for tokens, position, parts in ((1, 150, 1), (1, 150, 3), (33, 7, 1)):
        shape = HeadShape(4, 2, 40, position + tokens)
        case = AttentionCase(tokens, position, shape, Scores(0.3, 30), parts=parts)
        found = [
            check_case(one, layers, np.random.default_rng(5))["attended"][0]
            for one in (case, replace(case, sinks=(-np.inf,) * 4))
        ]
        np.testing.assert_array_equal(*found)


@pytest.mark.parametrize(("style", "dtype"), PAIRS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_with_and_without_bias(cases, check, style, dtype, activation):
    made = cases(style, dtype, 4)
    for shape in (
        *((1, 8, (0, 8)), (3, 100, (41, 7)), (33, 2056, (2056, 0))),
        # Without a gate.
        *((1, 8, (0,)), (3, 100, (41,)), (33, 2056, (2056,))),
    ):
        for biased, join in ((False, "concatenate"), (True, "concatenate"), (True, "sum")):
            case = GatedCase(*shape, join, activation=activation, biased=biased, scale=4)
            check(*made(case), (shape, join))


@pytest.mark.parametrize(("style", "dtype"), PAIRS)
def test_gate_and_up_are_clipped(cases, check, style, dtype):
    made = cases(style, dtype, 4)
    for shape in ((1, 8, (0, 8)), (3, 100, (41, 7)), (33, 2056, (2056, 0))):
        for biased, join in ((False, "concatenate"), (True, "sum")):
            case = GatedCase(*shape, join, biased=biased, scale=6, clip=GateClip(7.0, 1.702))
            check(*made(case), (shape, join))
    with pytest.raises(KernelError, match="clipped with silu"):
        made(GatedCase(1, 8, (0,), clip=GateClip(7.0, 1.702)))


@pytest.mark.parametrize(("style", "dtype"), PAIRS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_of_zero_and_of_large_gates(runtime, make, check, style, dtype, activation):
    gate, up = np.array([[0, -60, 60, -1e3]], dtype), np.array([[1, 2, 3, 4]], dtype)
    source = split_segments(runtime, np.concatenate([gate, up], axis=1), (4, 4), (1, 3))
    out = GuardedOutput(runtime, (1, 4), dtype)
    launch = activate(
        make(style, dtype, dtype), source, out.slot, tokens=1, intermediate=4, activation=activation
    )
    run_launches(runtime, [launch])
    check((out.read(), exact_gated_activation(gate, up, activation)))


@pytest.mark.parametrize("style", STYLES)
def test_logits_are_capped_in_place(runtime, cases, make, check, style):
    for rows, width in ((1, 5), (3, 2060)):
        actual, expected = cases(style, seed=5)(SoftCapCase(rows, width, 30.0))[0]
        check((actual, expected))
        # Small logits keep their precision, which a difference of exponentials would not.
        np.testing.assert_allclose(actual, expected, rtol=2e-6)
    slot = fill_slot(runtime, np.zeros((4, 2060), np.float32))
    with pytest.raises(KernelError, match="soft cap logits"):
        soft_cap(make(style), slot, 30.0, rows=5, vocabulary=2060)
