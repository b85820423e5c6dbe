import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heterollm.base import KernelError
from heterollm.kernels.formats import QuantizedTensor, concatenate_rows, linear_errors, reference
from heterollm.kernels.gpu import GpuLinear
from heterollm.kernels.gpu.linear import ROW_ALIGNMENT
from heterollm.kernels.gpu.packing import BLOCKS
from heterollm.kernels.ops import WeightFormat

FORMATS = ["int4", "int4z", "int8", "int8z", "f16", "f32"]
STYLES = ["vector", "simt"]
ACTIVATIONS = [np.float32, np.float16]
GUARD = 0xA5


def make_weight(rng, rows, columns, kind, block=16):
    if kind in ("f16", "f32"):
        scale = rng.uniform(0.2, 2.0, (rows, 1)) / np.sqrt(columns)
        weight = rng.standard_normal((rows, columns)) * scale
        return weight.astype(np.float16 if kind == "f16" else np.float32)
    bits = int(kind[3])
    groups = columns // block
    codes = rng.integers(0, 256, (rows, groups, block * bits // 8), np.uint8)
    scales = rng.uniform(0.001, 0.02, (rows, groups)).astype(np.float16)
    zeros = rng.integers(0, 256, (rows, -(-groups * bits // 8)), np.uint8) if kind.endswith("z") else None
    return QuantizedTensor(codes, scales, zeros, bits, block)


def compute(runtime, members, x, *, first_token=0, kept=None, style=None, output_dtype=None, packed=None):
    """Run one launch on slots whose other bytes are NaN (input) and a guard pattern (output)."""
    tokens, columns = x.shape
    packed = packed or GpuLinear.pack(runtime, members, activation_dtype=x.dtype)
    spans = kept or [(0, rows) for rows in packed.member_rows]
    rows = sum(stop - start for start, stop in spans)
    x_slot = runtime.shared((first_token + tokens + 2, columns), x.dtype)
    x_slot.array[:] = np.nan
    x_slot.array[first_token : first_token + tokens] = x
    out = np.dtype(output_dtype or x.dtype)
    y_slot = runtime.shared(((first_token + tokens) * rows * out.itemsize + 4096,), np.uint8)
    y_slot.array[:] = GUARD
    launch = packed.launch(
        x_slot,
        y_slot,
        tokens=tokens,
        first_token=first_token,
        kept=kept,
        output_dtype=output_dtype,
        style=style,
        label="test",
    )
    launch()
    runtime.finish()
    start, stop = first_token * rows * out.itemsize, (first_token + tokens) * rows * out.itemsize
    assert np.all(y_slot.array[:start] == GUARD), "bytes before the output were written"
    assert np.all(y_slot.array[stop:] == GUARD), "bytes after the output were written"
    return y_slot.array[start:stop].view(out).reshape(tokens, rows).copy()


def check(runtime, members, tokens, dtype, *, kept=None, rng, **options):
    columns = members[0].columns if isinstance(members[0], QuantizedTensor) else members[0].shape[1]
    x = rng.standard_normal((tokens, columns)).astype(dtype)
    actual = compute(runtime, members, x, kept=kept, **options)
    errors = linear_errors(actual, reference.linear(x, members, kept))
    shape = (tokens, [m.shape[0] if isinstance(m, np.ndarray) else m.rows for m in members], columns, kept)
    assert errors.within("fp16" if actual.dtype == np.float16 else "fp32"), (shape, errors)


@pytest.mark.parametrize("dtype", ACTIVATIONS)
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("style", STYLES)
def test_every_edge_shape_matches_float64(runtime, style, kind, dtype):
    rng = np.random.default_rng(1)
    shapes = [(m, 77, 96, 32) for m in (1, 2, 3, 4, 5, 7, 8, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257)]
    shapes += [(m, n, 48, 16) for m in (1, 2, 5) for n in (1, 15, 16, 17, 63, 64, 65, 100, 128, 200)]
    shapes += [
        (m, 33, k, block)
        for m in (1, 6)
        for k, block in ((16, 16), (32, 32), (48, 16), (80, 16), (128, 128), (192, 64), (896, 128))
    ]
    for m, n, k, block in shapes:
        check(runtime, [make_weight(rng, n, k, kind, block)], m, dtype, rng=rng, style=style)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 2050, 896), (1, 130, 4864), (35, 2047, 896)])
def test_model_sized_shapes_match_float64(runtime, style, tokens, rows, columns):
    rng = np.random.default_rng(2)
    for kind in ("int4", "int8z"):
        check(runtime, [make_weight(rng, rows, columns, kind, 64)], tokens, np.float32, rng=rng, style=style)


@pytest.mark.parametrize("dtype", ACTIVATIONS)
@pytest.mark.parametrize("style", STYLES)
def test_cuts_and_members_of_every_kind(runtime, style, dtype):
    rng = np.random.default_rng(3)
    members = [make_weight(rng, n, 96, "int4z", 32) for n in (200, 64, 77)]
    packed = GpuLinear.pack(runtime, members, activation_dtype=dtype)
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
            check(runtime, members, tokens, dtype, kept=kept, rng=rng, style=style, packed=packed)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_cut_gives_the_same_bits_as_the_whole(runtime, style, tokens):
    rng = np.random.default_rng(4)
    members = [make_weight(rng, n, 160, "int4", 32) for n in (192, 100)]
    x = rng.standard_normal((tokens, 160)).astype(np.float32)
    whole = compute(runtime, members, x, style=style)
    part = compute(runtime, members, x, style=style, kept=((64, 192), (64, 100)))
    np.testing.assert_array_equal(part, whole[:, np.r_[64:192, 192 + 64 : 292]])
    stacked = compute(runtime, [concatenate_rows(members)], x, style=style)
    np.testing.assert_array_equal(stacked, whole)


@pytest.mark.parametrize("dtype", ACTIVATIONS)
@pytest.mark.parametrize("style", STYLES)
def test_the_first_token_offsets_both_slots(runtime, style, dtype):
    rng = np.random.default_rng(5)
    members = [make_weight(rng, n, 48, "int8", 16) for n in (70, 3)]
    for tokens, first_token in ((1, 1), (3, 4), (5, 7), (130, 2)):
        check(runtime, members, tokens, dtype, rng=rng, first_token=first_token, style=style)


@pytest.mark.parametrize("style", STYLES)
def test_half_activations_can_give_float_outputs(runtime, style):
    rng = np.random.default_rng(6)
    weight = make_weight(rng, 100, 96, "int8", 32)
    for tokens in (1, 6):
        check(runtime, [weight], tokens, np.float16, rng=rng, output_dtype=np.float32, style=style)


@pytest.mark.parametrize("style", STYLES)
def test_extreme_codes_zero_points_and_scales(runtime, style):
    rng = np.random.default_rng(7)
    for bits in (4, 8):
        codes = np.full((65, 3, 16 * bits // 8), 255, np.uint8)
        codes[::2] = 0
        scales = np.full((65, 3), 65504.0, np.float16)
        scales[:, 1] = 6e-8
        zeros = np.zeros((65, -(-3 * bits // 8)), np.uint8)
        for zero_points in (None, zeros):
            weight = QuantizedTensor(codes, scales, zero_points, bits, 16)
            for tokens in (1, 5):
                check(runtime, [weight], tokens, np.float32, rng=rng, style=style)


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_shape_and_cut(runtime, data):
    block = data.draw(st.sampled_from(BLOCKS), label="block")
    columns = block * data.draw(st.integers(1, 512 // block), label="blocks")
    kind = data.draw(st.sampled_from(FORMATS), label="format")
    rows = data.draw(st.lists(st.integers(1, 150), min_size=1, max_size=3), label="rows")
    kept = []
    for n in rows:
        start = ROW_ALIGNMENT * data.draw(st.integers(0, (n - 1) // ROW_ALIGNMENT), label="start")
        kept.append((start, data.draw(st.integers(start, n), label="stop")))
    if not any(stop > start for start, stop in kept):
        kept[0] = (0, rows[0])
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), label="seed"))
    check(
        runtime,
        [make_weight(rng, n, columns, kind, block) for n in rows],
        data.draw(st.integers(1, 140), label="tokens"),
        data.draw(st.sampled_from(ACTIVATIONS), label="activation"),
        kept=tuple(kept),
        rng=rng,
        first_token=data.draw(st.integers(0, 3), label="first token"),
        style=data.draw(st.sampled_from(STYLES), label="style"),
    )


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("kind", FORMATS)
def test_embedding_gathers_rows_and_limits_ids(runtime, style, kind):
    rng = np.random.default_rng(8)
    for rows, columns, block in ((1, 16, 16), (130, 96, 32), (64, 1280, 128)):
        table = make_weight(rng, rows, columns, kind, block)
        packed = GpuLinear.pack(runtime, [table], activation_dtype=np.float32)
        for count in (1, 9):
            ids = rng.integers(0, rows, count).astype(np.int32)
            ids[-1] = rows - 1
            tokens = runtime.shared((count + 5,), np.int32)
            tokens.array[:] = -1
            tokens.array[:count] = ids
            slot = runtime.shared((count * columns + 64,), np.float32)
            slot.array[:] = 123.0
            packed.embed_launch(tokens, slot, count=count, scale=1.5, style=style)()
            runtime.finish()
            actual = slot.view(np.float32, (count, columns))
            np.testing.assert_allclose(actual, reference.embedding(ids, table, 1.5), rtol=1e-6)
            assert np.all(slot.array[count * columns :] == 123.0)
            tokens.array[:count] = np.where(np.arange(count) % 2, rows + 10**6, -7)
            packed.embed_launch(tokens, slot, count=count, scale=1.0, style=style)()
            runtime.finish()
            limited = np.where(np.arange(count) % 2, rows - 1, 0)
            np.testing.assert_allclose(actual, reference.embedding(limited, table), rtol=1e-6)


def test_a_tied_head_and_the_embedding_share_one_copy(runtime):
    rng = np.random.default_rng(9)
    table = make_weight(rng, 100, 64, "int8", 32)
    packed = GpuLinear.pack(runtime, [table], activation_dtype=np.float32)
    tokens, slot = runtime.shared((3,), np.int32), runtime.shared((3, 64), np.float32)
    tokens.array[:] = [5, 99, 0]
    packed.embed_launch(tokens, slot, count=3)()
    logits = runtime.shared((3, 100), np.float32)
    packed.launch(slot, logits, tokens=3, label="head")()
    runtime.finish()
    exact = reference.embedding(tokens.array, table)
    assert linear_errors(logits.array, reference.linear(exact, [table])).within("fp32")
    assert packed.size_bytes == 128 * 64 + 2 * 128 * 2


def test_packing_takes_rows_of_a_larger_array(runtime):
    rng = np.random.default_rng(10)
    whole = make_weight(rng, 300, 64, "f32")
    x = rng.standard_normal((4, 64)).astype(np.float32)
    strided = np.asfortranarray(whole)[10:200:2]
    np.testing.assert_array_equal(
        compute(runtime, [strided], x), compute(runtime, [np.ascontiguousarray(strided)], x)
    )


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
    good = make_weight(rng, 8, 32, "int4", 16)

    def refused(message, members, dtype=np.float32):
        with pytest.raises(KernelError, match=message):
            GpuLinear.pack(runtime, members, activation_dtype=dtype)

    refused("at least one linear", [])
    refused("differ: formats", [good, make_weight(rng, 8, 32, "int8", 16)])
    refused("differ: formats", [good, make_weight(rng, 8, 48, "int4", 16)])
    refused("multiple of 16", [np.ones((4, 40), np.float32)])
    refused("rows cannot be computed", [np.ones((0, 32), np.float32)])
    refused("block of 256", [make_weight(rng, 4, 256, "int4", 256)])
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
    members = [make_weight(rng, n, 64, "int4z", 16) for n in (64, 65)]
    packed = GpuLinear.pack(runtime, members, activation_dtype=np.float16)
    assert packed.member_rows == (64, 65)
    assert packed.columns == 64
    assert packed.format == WeightFormat(4, 16, False)
    assert packed.size_bytes == 192 * (64 // 2 + 4 * 2 + 4)
