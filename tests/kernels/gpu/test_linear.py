from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.base import KernelError
from heterollm.kernels.formats import (
    QuantizedTensor,
    concatenate_rows,
    linear_errors,
    random_weight,
    reference,
)
from heterollm.kernels.gpu import GpuLinear
from heterollm.kernels.operators.data import fill_slot
from heterollm.kernels.operators.linear import LINEARS, LinearCase, run_linear
from heterollm.kernels.ops import WeightFormat

KINDS = ["int4", "int4z", "int4m", "int8", "int8z", "f16", "f32"]
QUANTIZED = KINDS[:5]
STYLES = ["vector", "simt"]
ACTIVATIONS = [np.float32, np.float16]
PAIRS = [
    *(("vector", np.float32), ("vector", np.float16), ("simt", np.float16)),
    pytest.param("simt", np.float32, marks=pytest.mark.slow),
]
"""Styles and types of activations; no device has the last pair by default."""
MEMBERS = LinearCase(WeightFormat(4, 32, symmetric=False), (200, 64, 77), 96, 1)


def stored(kind, block=0):
    """The number format of a kind; ``z`` stands for zero points, ``m`` for minimums."""
    bits = int(kind.strip("intfzm"))
    minimum = kind.endswith("m")
    return WeightFormat(bits, block if bits <= 8 else 0, not kind.endswith(("z", "m")), minimum=minimum)


def lengths_of(style, kind, tokens):
    """Numbers of tokens: kernels for GPUs are built for each, and zero points are the same in all."""
    return (1, 5, 33, 129) if style == "simt" and kind.endswith("z") else tokens


@pytest.fixture
def check(runtime, within_gate):
    def run(case, dtype=None, **options):
        # By default the activations that devices of this style have.
        own = dtype or (np.float16 if options["style"] == "simt" else np.float32)
        within_gate(case.on_gpu(runtime, own, **options), case, options)

    return run


# tests/heterollm/doctor runs the first pair.
@pytest.mark.parametrize(("style", "dtype"), PAIRS[1:])
def test_the_cases_of_the_doctor_in_every_style_and_type(check, style, dtype):
    for case in LINEARS:
        check(case, dtype, style=style)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("style", "dtype"), PAIRS)
def test_every_edge_shape_matches_float64(check, style, kind, dtype):
    tokens = (1, 2, 3, 4, 5, 7, 8, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257)
    shapes = [(m, 77, 96, 32) for m in lengths_of(style, kind, tokens)]
    shapes += [(m, n, 48, 16) for m in (1, 2, 5) for n in (1, 15, 16, 17, 63, 64, 65, 100, 128, 200)]
    widths = ((16, 16), (32, 32), (48, 16), (80, 16), (128, 128), (192, 64), (896, 128))
    shapes += [(m, 33, k, block) for m in (1, 6) for k, block in widths]
    for m, n, k, block in shapes:
        check(LinearCase(stored(kind, block), (n,), k, m), dtype, style=style)


@pytest.mark.parametrize("kind", QUANTIZED)
@pytest.mark.parametrize("style", STYLES)
def test_edge_shapes_match_float64_of_the_rounded_inputs(check, style, kind):
    tokens = (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 33, 64, 129, 257)
    shapes = [(m, 77, 96, 32) for m in lengths_of(style, kind, tokens)]
    shapes += [(m, n, 48, 16) for m in (1, 5, 12) for n in (1, 17, 64, 65)]
    shapes += [(m, 33, k, b) for m in (1, 9) for k, b in ((16, 16), (128, 128), (192, 64), (896, 128))]
    for m, n, k, block in shapes:
        check(LinearCase(stored(kind, block), (n,), k, m, integer_inputs=True), style=style)


@pytest.mark.parametrize(
    ("kind", "integer_inputs"), [*((kind, False) for kind in KINDS), *((kind, True) for kind in QUANTIZED)]
)
@pytest.mark.parametrize("style", STYLES)
def test_every_range_of_inputs_matches_float64(check, style, kind, integer_inputs):
    # Every number of tokens is a kernel to build for each width of weights: the common one has them all.
    tokens = (1, 2, 5, 33) if kind.startswith("int4") else (2, 33)
    for block, columns in ((16, 80), (32, 224), (128, 640)):
        # All, the first and the last block, and those between them.
        last, first = columns - block, (0, block)
        for inputs in ((0, columns), first, (last, columns), (block, last), (0, 2 * block)):
            for m in tokens:
                case = LinearCase(stored(kind, block), (77,), columns, m, inputs=inputs)
                check(replace(case, integer_inputs=integer_inputs), style=style)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 2050, 896), (1, 130, 4864), (35, 2047, 896)])
def test_model_sized_shapes_match_float64(check, style, tokens, rows, columns):
    for kind in ("int4", "int8z"):
        check(LinearCase(stored(kind, 64), (rows,), columns, tokens), style=style)


@pytest.mark.parametrize(("style", "dtype"), PAIRS)
def test_cuts_and_members_of_every_kind(check, style, dtype):
    cuts = [
        None,
        ((0, 200), (0, 64), (0, 77)),
        ((128, 200), (0, 64), (64, 77)),
        ((64, 129), (0, 0), (0, 1)),
        ((192, 200), (64, 64), (77, 77)),
        ((0, 0), (0, 64), (0, 0)),
        ((0, 64), (0, 17), (64, 65)),
    ]
    for kept in cuts:
        for tokens in (1, 5, 66):
            check(replace(MEMBERS, tokens=tokens, kept=kept), dtype, style=style)
    rounded = replace(MEMBERS, integer_inputs=True)
    for kept in (cuts[2], cuts[3], None):
        for tokens, first_token in ((1, 3), (6, 1), (40, 0)):
            check(replace(rounded, tokens=tokens, kept=kept, first_token=first_token), dtype, style=style)
    for integer_inputs in (False, True):
        part = replace(rounded, columns=192, integer_inputs=integer_inputs, kept=cuts[2], inputs=(64, 160))
        for tokens, first_token in ((5, 1), (33, 0)):
            check(replace(part, tokens=tokens, first_token=first_token), dtype, style=style)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_cut_gives_the_same_bits_as_the_whole(runtime, style, tokens):
    case = LinearCase(WeightFormat(4, 32), (192, 100), 160, tokens)
    whole, _ = case.on_gpu(runtime, np.float32, style=style)
    part, _ = replace(case, kept=((64, 192), (64, 100))).on_gpu(runtime, np.float32, style=style)
    np.testing.assert_array_equal(part, whole[:, np.r_[64:192, 192 + 64 : 292]])
    members, x = case.data(np.float32)
    stacked = GpuLinear.pack(runtime, [concatenate_rows(members)], activation_dtype=np.float32)
    np.testing.assert_array_equal(run_linear(runtime, stacked, x, style=style), whole)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_cut_can_lie_in_place_among_all_rows(runtime, style, tokens):
    case = LinearCase(WeightFormat(8, 32), (192, 101, 30), 160, tokens)
    members, x = case.data(np.float32)
    packed = GpuLinear.pack(runtime, members, activation_dtype=np.float32)
    whole = run_linear(runtime, packed, x, style=style)
    kept = ((64, 192), (64, 101), (0, 0))
    source, target = fill_slot(runtime, x), fill_slot(runtime, np.full_like(whole, np.nan))
    options = {"tokens": tokens, "kept": kept, "style": style, "label": "test"}
    packed.launch(source, target, in_place=True, **options)()
    packed.launch(source, runtime.shared((tokens, 165), np.float32), **options)()  # of the same rows
    runtime.finish()
    own = np.r_[64:192, 192 + 64 : 293]
    np.testing.assert_array_equal(target.read()[:, own], whole[:, own])
    assert np.isnan(np.delete(target.read(), own, axis=1)).all()


@pytest.mark.parametrize(("style", "dtype"), PAIRS)
def test_the_first_token_offsets_both_slots(check, style, dtype):
    for tokens, first_token in ((1, 1), (3, 4), (5, 7), (130, 2)):
        case = LinearCase(WeightFormat(8, 16), (70, 3), 48, tokens, first_token=first_token)
        check(case, dtype, style=style)


@pytest.mark.parametrize("style", STYLES)
def test_half_activations_can_give_float_outputs(check, style):
    for tokens in (1, 6):
        case = LinearCase(WeightFormat(8, 32), (100,), 96, tokens)
        check(case, np.float16, style=style, output_dtype=np.float32)
    check(replace(case, integer_inputs=True), np.float16, style=style, output_dtype=np.float32)


@pytest.mark.parametrize("style", STYLES)
def test_extreme_codes_zero_points_and_scales(runtime, within_gate, style):
    rng = np.random.default_rng(7)
    for bits in (4, 8):
        codes = np.full((65, 3, 16 * bits // 8), 255, np.uint8)
        codes[::2] = 0
        scales = np.full((65, 3), 65504.0, np.float16)
        scales[:, 1] = 6e-8
        zeros = np.zeros((65, -(-3 * bits // 8)), np.uint8)
        for zero_points in (None, zeros):
            weight = QuantizedTensor(codes, scales, zero_points, bits, 16)
            packed = GpuLinear.pack(runtime, [weight], activation_dtype=np.float32)
            for tokens in (1, 5):
                x = rng.standard_normal((tokens, 48)).astype(np.float32)
                actual = run_linear(runtime, packed, x, style=style)
                within_gate((actual, reference.linear(x, [weight])), weight.format, tokens)


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_shape_and_cut(runtime, within_gate, data):
    block = data.draw(st.sampled_from((16, 32, 64, 128)), label="block")
    blocks = data.draw(st.integers(1, 512 // block), label="blocks")
    kind = data.draw(st.sampled_from(KINDS), label="format")
    rows = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=3), label="rows")
    kept = []
    for n in rows:
        start = 64 * data.draw(st.integers(0, (n - 1) // 64), label="start")
        kept.append((start, data.draw(st.integers(start, n), label="stop")))
    if not any(stop > start for start, stop in kept):
        kept[0] = (0, rows[0])
    first = data.draw(st.integers(0, blocks - 1), label="first block")
    last = data.draw(st.integers(first + 1, blocks), label="last block")
    case = LinearCase(
        stored(kind, block),
        tuple(rows),
        block * blocks,
        data.draw(st.integers(1, 140), label="tokens"),
        kept=tuple(kept),
        inputs=data.draw(st.sampled_from((None, (block * first, block * last))), label="inputs"),
        first_token=data.draw(st.integers(0, 3), label="first token"),
        integer_inputs=kind in QUANTIZED and data.draw(st.booleans(), label="rounded"),
        seed=data.draw(st.integers(0, 2**32), label="seed"),
    )
    dtype = data.draw(st.sampled_from(ACTIVATIONS), label="activation")
    style = data.draw(st.sampled_from(STYLES), label="style")
    within_gate(case.on_gpu(runtime, dtype, style=style), case)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", KINDS)
def test_embedding_gathers_rows_and_limits_ids(runtime, embed, style, kind):
    rng = np.random.default_rng(8)
    for rows, columns, block in ((1, 16, 16), (130, 96, 32), (64, 1280, 128)):
        table = random_weight(rng, rows, columns, stored(kind, block))
        for count in (1, 9):
            ids = rng.integers(0, rows, count)
            ids[-1] = rows - 1
            wild = np.where(np.arange(count) % 2, rows + 10**6, -7)
            for given_ids, taken in ((ids, ids), (wild, np.where(wild < 0, 0, rows - 1))):
                actual = embed(runtime, table, given_ids, scale=1.5, style=style)
                np.testing.assert_allclose(actual, reference.embedding(taken, table, 1.5), rtol=1e-6)


def test_a_tied_head_and_the_embedding_share_one_copy(runtime):
    rng = np.random.default_rng(9)
    table = random_weight(rng, 100, 64, WeightFormat(8, 32))
    packed = GpuLinear.pack(runtime, [table], activation_dtype=np.float32)
    tokens, slot = runtime.shared((3,), np.int32), runtime.shared((3, 64), np.float32)
    tokens.write([5, 99, 0])
    packed.embed_launch(tokens, slot, count=3)()
    logits = runtime.shared((3, 100), np.float32)
    packed.launch(slot, logits, tokens=3, label="head")()
    runtime.finish()
    exact = reference.embedding(tokens.read(), table)
    assert linear_errors(logits.read(), reference.linear(exact, [table])).within("fp32")
    assert packed.size_bytes == 128 * 64 + 2 * 128 * 2


def test_packing_takes_rows_of_a_larger_array(runtime):
    rng = np.random.default_rng(10)
    whole = random_weight(rng, 300, 64, WeightFormat(32))
    x = rng.standard_normal((4, 64)).astype(np.float32)
    strided = np.asfortranarray(whole)[10:200:2]
    both = [
        run_linear(runtime, GpuLinear.pack(runtime, [weight], activation_dtype=np.float32), x)
        for weight in (strided, np.ascontiguousarray(strided))
    ]
    np.testing.assert_array_equal(*both)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (((32, 100),), "multiple of 64"),
        (((0, 101),), "with 100 rows"),
        (((-64, 10),), "with 100 rows"),
        (((64, 0),), "with 100 rows"),
        (((0, 10), (0, 10)), "2 row ranges for 1 members"),
        (((64, 64),), "nothing to launch"),
    ],
)
def test_impossible_cuts_are_refused(runtime, kept, message):
    packed = GpuLinear.pack(runtime, [np.ones((100, 32), np.float32)], activation_dtype=np.float32)
    slot = runtime.shared((4, 128), np.float32)
    with pytest.raises(KernelError, match=message):
        packed.launch(slot, slot, tokens=1, kept=kept, label="test")


def test_impossible_weights_and_slots_are_refused(runtime):
    rng = np.random.default_rng(11)
    good = random_weight(rng, 8, 32, stored("int4", 16))

    def refused(message, members, dtype=np.float32):
        with pytest.raises(KernelError, match=message):
            GpuLinear.pack(runtime, members, activation_dtype=dtype)

    refused("at least one linear", [])
    refused("differ: formats", [good, random_weight(rng, 8, 32, stored("int8", 16))])
    refused("differ: formats", [good, random_weight(rng, 8, 48, stored("int4", 16))])
    refused("multiple of 16", [np.ones((4, 40), np.float32)])
    refused("rows cannot be computed", [np.ones((0, 32), np.float32)])
    refused("block of 256", [random_weight(rng, 4, 256, stored("int4", 256))])
    refused("float32 or float16", [good], np.float64)
    packed = GpuLinear.pack(runtime, [good], activation_dtype=np.float32)
    small, large = runtime.shared((31,), np.float32), runtime.shared((32,), np.float32)
    for x, y, message in (
        (small, large, "input slot has 124"),
        (large, runtime.shared((7,), np.float32), "output slot"),
    ):
        with pytest.raises(KernelError, match=message):
            packed.launch(x, y, tokens=1, label="test")
    with pytest.raises(KernelError, match="cannot compute 0 tokens"):
        packed.launch(large, large, tokens=0, label="test")
    with pytest.raises(KernelError, match="from token -1"):
        packed.launch(large, large, tokens=1, first_token=-1, label="test")
    with pytest.raises(KernelError, match="slot has"):
        packed.embed_launch(small, small, count=1)
    two = GpuLinear.pack(runtime, [good, good], activation_dtype=np.float32)
    with pytest.raises(KernelError, match="2 tables"):
        two.embed_launch(small, large, count=1)


def test_the_format_and_the_size_are_told(runtime):
    rng = np.random.default_rng(12)
    members = [random_weight(rng, n, 64, stored("int4z", 16)) for n in (64, 65)]
    packed = GpuLinear.pack(runtime, members, activation_dtype=np.float16)
    assert packed.member_rows == (64, 65)
    assert packed.columns == 64
    assert packed.format == WeightFormat(4, 16, False)
    assert packed.size_bytes == 192 * (64 // 2 + 4 * 2 + 4)
