"""Gated delta nets and output gates against float64, at sizes that fill no vector."""

import dataclasses

import numpy as np
import pytest

from heterollm.base import KernelError
from heterollm.kernels.formats.tolerances import sqnr_db
from heterollm.kernels.gpu import (
    STEP_LENGTH,
    STEP_POSITION,
    STEP_STATE_READ,
    STEP_STATE_WRITTEN,
    STEP_WORDS,
    DeltaShape,
    RecurrentLayer,
    Segments,
)
from heterollm.kernels.operators.data import fill_slot, run_launches
from heterollm.kernels.operators.delta_net import (
    DeltaCase,
    apply_delta_rule,
    convolve_inputs,
    exact_convolution,
    exact_delta_rule,
    exact_factors,
)
from heterollm.kernels.operators.output_gate import OutputGateCase

PAIRS = [
    *(("vector", np.float32), ("vector", np.float16), ("simt", np.float16)),
    pytest.param("simt", np.float32, marks=pytest.mark.slow),
]
"""Styles and types of activations; no device has the last pair by default."""

ODD = DeltaShape(key_heads=2, value_heads=6, key_dim=21, value_dim=13, taps=4)
ODD_SPACE = dataclasses.replace(ODD, recalls=False)
PUBLISHED = DeltaShape(key_heads=2, value_heads=4, key_dim=128, value_dim=128, taps=4)


# The type changes loads and stores alone: the style of GPUs has it here, that of processors in other tests.
@pytest.mark.parametrize(
    ("style", "dtype"),
    [PAIRS[0], pytest.param("vector", np.float16, marks=pytest.mark.slow), *PAIRS[2:]],
)
def test_a_delta_net_at_odd_sizes(cases, check, style, dtype):
    made = cases(style, dtype, 1)
    for case in (
        DeltaCase(5, 7, ODD, (8, 42, 0, 5, 6, 3)),
        # Shorter than the history, in the middle of a text and at its begin.
        *(DeltaCase(tokens, position, ODD) for tokens in (1, 2) for position in (0, 7)),
        DeltaCase(33, 0, dataclasses.replace(ODD, key_heads=3, taps=2)),
        DeltaCase(70, 7, DeltaShape(8, 8, 40, 8, taps=5), (0, 320, 0, 64, 8, 8)),
        DeltaCase(40, 7, PUBLISHED, (128, 0, 256, 512, 0, 4)),
        DeltaCase(5, 7, ODD, (8, 42, 0, 5, 6, 3), "sum"),
        # State spaces; the last one has Falcon-H1's width.
        *(DeltaCase(tokens, position, ODD_SPACE) for tokens in (1, 2) for position in (0, 7)),
        DeltaCase(33, 7, ODD_SPACE, (8, 42, 0, 5, 3), "sum"),
        DeltaCase(40, 7, DeltaShape(1, 4, 256, 64, taps=4, recalls=False), (128, 0, 256, 64, 4)),
    ):
        for actual, exact in made(case):
            # What stays float carries the error of q, k and v, which do not.
            check((actual.astype(dtype), exact), case)


def in_pieces(layers, pieces, drawn, shape=PUBLISHED):
    """Return the outputs of passes one after the other, and the state behind them."""
    inputs, taps, rates = drawn
    gpu, rows = layers.runtime, tuple(shape.members.values())
    values = shape.history + shape.matrix
    memory = fill_slot(gpu, np.full(2 * values, np.nan, np.float32))
    state, taps, rates = RecurrentLayer(memory, values), fill_slot(gpu, taps), fill_slot(gpu, rates)
    outputs, position = [], 0
    for turn, tokens in enumerate(pieces):
        words = np.zeros(STEP_WORDS, np.int32)
        words[[STEP_POSITION, STEP_LENGTH]] = position, tokens
        words[[STEP_STATE_READ, STEP_STATE_WRITTEN]] = turn % 2, 1 - turn % 2
        given = fill_slot(gpu, inputs[position : position + tokens])
        mixed = gpu.shared((tokens, shape.channels), inputs.dtype)
        factors = gpu.shared((tokens, shape.factors), np.float32)
        out, step = gpu.shared((tokens, shape.value_columns), np.float32), fill_slot(gpu, words)
        sizes = {"shape": shape, "tokens": tokens}
        members = Segments(given, given, rows, (0,) * len(rows))
        launches = (
            convolve_inputs(layers, members, taps, rates, mixed, factors, state, step, **sizes),
            apply_delta_rule(layers, mixed, factors, rates, out, state, step, **sizes),
        )
        run_launches(gpu, launches)
        outputs.append(out.read())
        position += tokens
    return np.concatenate(outputs), memory.read()[len(pieces) % 2 * values :][:values]


def drawn_inputs(tokens, dtype, shape=PUBLISHED):
    """Return inputs with a direction in common, taps, and rates from slow to fast."""
    rng = np.random.default_rng(2)
    columns = sum(shape.members.values())
    inputs = (0.7 * rng.standard_normal((tokens, columns)) + rng.standard_normal(columns)).astype(dtype)
    heads = shape.value_heads
    rates = np.stack([-np.geomspace(0.01, 16.0, heads), rng.standard_normal(heads) - 3.0])
    return inputs, rng.standard_normal((shape.taps, shape.channels), np.float32), rates.astype(np.float32)


@pytest.mark.parametrize("style", ["vector", "simt"])
def test_pieces_give_the_bits_of_one_pass(make, style):
    """On CPUs pieces of 16 tokens and more run another form of the rule than shorter ones."""
    layers, drawn = make(style, np.float16), drawn_inputs(70, np.float16)
    whole = in_pieces(layers, (70,), drawn)
    for pieces in ((33, 1, 36), (2, 1, 1, 1, 65), (*(15,) * 4, 10)):
        for one, other in zip(in_pieces(layers, pieces, drawn), whole, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("style", "dtype", "least_db"), [("vector", np.float32, 110), ("simt", np.float16, 60)]
)
def test_errors_do_not_grow(make, style, dtype, least_db):
    """Over 1,024 tokens whose keys have a common direction, in passes of 256."""
    drawn, shape = drawn_inputs(1024, dtype), PUBLISHED
    out, _ = in_pieces(make(style, dtype), (256,) * 4, drawn)
    inputs, taps, rates = (values.astype(np.float64) for values in drawn)
    rows = list(shape.members.values())
    *parts, _, b, a = np.split(inputs, np.cumsum(rows)[:-1], axis=1)
    history = np.zeros((shape.taps - 1, shape.channels))
    mixed = exact_convolution(np.concatenate(parts, axis=1), history, taps)
    q, k = np.split(mixed[:, : 2 * rows[0]].reshape(len(mixed), -1, shape.key_dim), 2, axis=1)
    matrix = np.zeros((shape.value_heads, shape.value_dim, shape.key_dim))
    exact, _ = exact_delta_rule(shape, mixed, exact_factors((q, k), (b, a), rates), rates, matrix)
    for head in range(shape.value_heads):
        own = slice(head * shape.value_dim, (head + 1) * shape.value_dim)
        early, late = (sqnr_db(out[at : at + 64, own], exact[at : at + 64, own]) for at in (64, 960))
        assert min(early, late) >= least_db
        assert late >= early - 6.0


@pytest.mark.parametrize(("style", "dtype"), PAIRS)
def test_outputs_are_normed_and_gated(cases, check, style, dtype):
    made = cases(style, dtype, 3)
    for heads, head_dim, splits, normed, biased in (
        (3, 21, (5, 7), False, True),
        (3, 21, (63, 0), True, False),
        (2, 256, (256, 512), False, False),
        (4, 128, (0, 256), True, True),
    ):
        for join in ("concatenate", "sum"):
            case = OutputGateCase(3, heads, head_dim, splits, join, normed=normed, biased=biased)
            for numbers in made(case):
                check(numbers, case)
    for changes in ({"silu": True}, {"normed": True, "gate_first": True, "weights_by_head": True}):
        for numbers in made(OutputGateCase(3, 3, 21, (5, 7), **changes)):
            check(numbers, changes)


def test_sizes_that_kernels_cannot_have_are_refused(cases):
    made = cases("vector")
    with pytest.raises(KernelError, match="5 heads cannot share 2 key heads"):
        made(DeltaCase(3, 0, dataclasses.replace(ODD, value_heads=5)))
    with pytest.raises(KernelError, match="heads of 264 keys; at most 256"):
        made(DeltaCase(3, 0, dataclasses.replace(ODD, key_dim=264)))
